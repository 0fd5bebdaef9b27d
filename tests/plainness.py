"""Counts what makes code hard to read, and ends with 1 if the package has more of it than agreed.

    python tests/plainness.py [xlcli]

Rates are per 1,000 lines of code: lines that are no docstring, not blank, and more than a comment.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LIMITS = {"conditional expressions": 18.0, "comprehensions": 28.0, "assignment expressions": 0.5}
MOST_LINES = 39_100  # what the package has now; the aim is 33,500, so this only goes down
LONGEST_FUNCTION = 60
CODE_PER_COMMENT = 35

KINDS = {
    ast.IfExp: "conditional expressions",
    ast.ListComp: "comprehensions",
    ast.SetComp: "comprehensions",
    ast.DictComp: "comprehensions",
    ast.GeneratorExp: "comprehensions",
    ast.NamedExpr: "assignment expressions",
}


def main(folder: Path) -> int:
    """Prints the counts and what is too much."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        counts["lines"] += source.count("\n")
        count_lines(source, tree, counts)
        for node in ast.walk(tree):
            if type(node) in KINDS:
                counts[KINDS[type(node)]] += 1
            faults += [f"{path}:{fault}" for fault in faults_of(node)]
    for name, most in LIMITS.items():
        rate = 1000 * counts[name] / counts["code"]
        print(f"{rate:6.1f} {name} per 1,000 lines of code, at most {most}")
        if rate > most:
            faults.append(f"{name}: {rate:.1f} per 1,000 lines of code, more than {most}")
    code_per_comment = counts["code"] / counts["comments"]
    print(f"{code_per_comment:6.1f} lines of code for each comment, at most {CODE_PER_COMMENT}")
    print(f"{counts['lines']:6} lines, at most {MOST_LINES}")
    if code_per_comment > CODE_PER_COMMENT:
        faults.append(f"a comment in {code_per_comment:.0f} lines of code, fewer than one in {CODE_PER_COMMENT}")
    if counts["lines"] > MOST_LINES:
        faults.append(f"{counts['lines']} lines, more than {MOST_LINES}")
    print("\n".join(faults))
    return 1 if faults else 0


def count_lines(source: str, tree: ast.AST, counts: Counter[str]) -> None:
    """Adds lines of code and comments to the counts."""
    in_docstring: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            in_docstring.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type", "# noqa", "#!")):
            comments.add(token.start[0])
    counts["comments"] += len(comments)
    for number, line in enumerate(source.splitlines(), 1):
        is_only_comment = number in comments and line.lstrip().startswith("#")
        if line.strip() and number not in in_docstring and not is_only_comment:
            counts["code"] += 1


def faults_of(node: ast.AST) -> list[str]:
    """What is never right: a text or list times a truth value, arguments that are swallowed, a long function."""
    faults = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        if any(map(is_text_or_list, sides)) and any(map(is_truth_value, sides)):
            faults.append(f"{node.lineno}: a text or list times a truth value")
    if isinstance(node, ast.arguments) and node.kwarg is not None and node.kwarg.arg == "_":
        faults.append(f"{node.kwarg.lineno}: **_ swallows arguments")
    if isinstance(node, ast.FunctionDef):
        n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if n_lines > LONGEST_FUNCTION:
            faults.append(f"{node.lineno}: {node.name} has {n_lines} lines, more than {LONGEST_FUNCTION}")
    return faults


def is_text_or_list(node: ast.AST) -> bool:
    """True if an expression is written as a text, a list or a tuple."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def is_truth_value(node: ast.AST) -> bool:
    """True if an expression is written as a condition."""
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    is_bool = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    return is_not or is_bool or isinstance(node, (ast.Compare, ast.BoolOp))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "xlcli")))
