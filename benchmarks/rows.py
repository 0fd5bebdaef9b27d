"""Rows to train the bundled model on: running text, and paragraphs from a sentence on to their end.

    python benchmarks/rows.py MODERN BOOKS OUT

MODERN has the present-day groups of benchmarks/corpus.py, BOOKS a file for each book, both in UTF-8. OUT gets
`modern.jsonl`, `code.jsonl` and `books.jsonl`. Half of the blocks of present-day text and a quarter of those of books
become short rows, one for each paragraph: its last sentences, from one that is drawn at random, at most eight. The
paragraphs of books lose their line breaks. A blank line after a paragraph belongs to the row. With
`train.reset_on_document` a model learns to begin without context, as with the sentences of an experiment. All other
blocks stay as they are, a row each.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from runs import write_rows

BLOCK_CHARS = 16_000
"""Approximate size of the rows of running text, and of the groups of short rows between them."""
MOST_SENTENCES = 8
SHARES = {"modern": 0.5, "code": 0.0, "books": 0.25}
"""Share of the blocks that become short rows."""
SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"”’')]))(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)\s+(?=[\"“‘'(]?[A-Z])"
)


def blocks(text: str) -> Iterator[str]:
    """Successive lines of about `BLOCK_CHARS`, up to a blank line if there is one."""
    block, size = [], 0
    for line in text.splitlines(keepends=True):
        block.append(line)
        size += len(line)
        if (size >= BLOCK_CHARS and not line.strip()) or size >= 3 * BLOCK_CHARS:
            yield "".join(block)
            block, size = [], 0
    if block:
        yield "".join(block)


def paragraphs(text: str, *, is_wrapped: bool) -> Iterator[tuple[list[str], bool]]:
    """Sentences of each paragraph, and whether a blank line follows it. A wrapped paragraph has several lines."""
    if is_wrapped:
        found = [(paragraph, "\n\n") for paragraph in re.split(r"\n\s*\n", text)]
    else:
        found = re.findall(r"([^\n]+)(\n[^\S\n]*\n)?", text)
    for paragraph, blank in found:
        sentences = [sentence.strip() for sentence in SENTENCE_END.split(" ".join(paragraph.split()))]
        if any(sentences):
            yield sentences, bool(blank)


def beginnings(block: str, rng: random.Random, *, is_wrapped: bool) -> Iterator[str]:
    """Ends of the paragraphs of a block, each from the beginning of a sentence on, with the blank line after it."""
    for sentences, is_before_blank in paragraphs(block, is_wrapped=is_wrapped):
        first = rng.randrange(len(sentences))
        rest = " ".join(sentences[max(first, len(sentences) - MOST_SENTENCES) :])
        yield rest + "\n\n" if is_before_blank else rest


def grouped(rows: list[str]) -> Iterator[list[str]]:
    """Successive rows of about `BLOCK_CHARS` together."""
    group, size = [], 0
    for row in rows:
        group.append(row)
        size += len(row) + 1
        if size > BLOCK_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def write(paths: list[Path], out: Path, share: float, rng: random.Random, *, is_wrapped: bool = False) -> None:
    running: list[list[str]] = []
    short: list[str] = []
    for path in paths:
        for block in blocks(path.read_text(encoding="utf-8", errors="replace")):
            if rng.random() < share:
                short += beginnings(block, rng, is_wrapped=is_wrapped)
            else:
                running.append([block])
    rng.shuffle(short)
    groups = running + list(grouped(short))
    rng.shuffle(groups)
    write_rows(out, ({"text": row} for group in groups for row in group))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("modern", "books", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    files = sorted(options.modern.glob("*.txt"))
    groups = {
        "modern": [path for path in files if "code" not in path.name],
        "code": [path for path in files if "code" in path.name],
        "books": sorted(options.books.iterdir()),
    }
    for name, paths in groups.items():
        write(paths, options.out / f"{name}.jsonl", SHARES[name], rng, is_wrapped=name == "books")


if __name__ == "__main__":
    main()
