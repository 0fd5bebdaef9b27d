"""How dense the package is: long functions, large classes, conditional expressions, and attributes set from outside.

    python benchmarks/shape.py [PACKAGE]

Lines of code are those of functions and classes without docstrings, comments and blank lines.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LONGEST, MOST_ATTRIBUTES = 60, 15
PACKAGE = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "xlcli")


def code_lines(source: str) -> int:
    """Number of lines that hold a token other than a comment or a string that stands alone."""
    marks = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in marks
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def set_attributes(body: ast.AST) -> Counter[tuple[str, str]]:
    """Names of objects with the attributes that are assigned to them."""
    found: Counter[tuple[str, str]] = Counter()
    for node in ast.walk(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (part for each in targets if each for part in ast.walk(each)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                found[ast.unparse(target.value), target.attr] += 1
    return found


def main() -> None:
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    n_lines, n_choices, with_memory = 0, 0, sum("mem_len" in text for text in sources.values())
    for path, source in sources.items():
        tree = ast.parse(source)
        n_lines += code_lines(source)
        n_choices += sum(isinstance(node, ast.IfExp) for node in ast.walk(tree))
        for node in ast.walk(tree):
            where = f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef) and node.end_lineno and "kernels" not in path.parts:
                if (length := node.end_lineno - node.lineno + 1) > LONGEST:
                    print(f"{where}: {node.name} has {length} lines")
                for owner, name in set_attributes(node):
                    if owner.split(".")[0] not in ("self", "cls") or "." in owner:
                        print(f"{where}: {node.name} sets {owner}.{name}")
            if isinstance(node, ast.ClassDef):
                own = {name for owner, name in set_attributes(node) if owner == "self"}
                if len(own) > MOST_ATTRIBUTES:
                    print(f"{where}: {node.name} has {len(own)} attributes")
    total = sum(source.count("\n") for source in sources.values())
    print(f"{total} lines in {len(sources)} files; {with_memory} of them have mem_len")
    print(f"a conditional expression for each {n_lines / n_choices:.1f} lines of code")


if __name__ == "__main__":
    main()
