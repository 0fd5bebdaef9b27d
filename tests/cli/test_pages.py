"""Keys and commands that docs/commands.md gives, against what the program prints."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def documented(heading: str, column: int = 0) -> set[str]:
    """Names in a column of the first table below a heading of the page, without those in parentheses."""
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.partition(f"# {heading}\n")[2], re.MULTILINE)[1]
    cells = [row.strip("|").split("|")[column] for row in table.splitlines()]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


@pytest.mark.parametrize(
    ("heading", "command"),
    [
        ("Keys of eval --json", ("eval", "text.txt", "--json")),
        ("Keys of stream --emit stats --json", ("stream", "text.txt", "--emit", "stats", "--json")),
        ("Keys of --dry-run --json", ("eval", "text.txt", "--dry-run", "--json")),
        ("Keys of --dry-run --json", ("stream", "text.txt", "--dry-run", "--json")),
        ("Keys of train --dry-run --json", ("train", "text.txt", "--init", "none", "--dry-run", "--json")),
    ],
)
def test_documented_keys_are_those_that_come_out(run, model, heading, command):
    Path("text.txt").write_text("It rained in the night.\n" * 50)
    done = run(*command)
    assert done.code == 0, done.err
    assert set(json.loads(done.out.splitlines()[-1])) == documented(heading)


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize("names", [["b.txt"], ["a.txt", "b.txt"]])
def test_documents_in_another_order(run, model, names):
    Path("a.txt").write_text("It rained.\n")
    Path("b.txt").write_text("It rained.\n\nXylophones quack.\n")
    assert run("eval", *names, "--each-line", "--documents", "chapters.jsonl").code == 0
    command = re.search(r"^ +(jq -rs .+ chapters\.jsonl)$", PAGE, re.MULTILINE)[1]
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    printed = [line.split("\t") for line in done.stdout.splitlines()]
    rows = [json.loads(line) for line in Path("chapters.jsonl").read_text().splitlines()]
    rows = sorted((row for row in rows if row["words"] > 1), key=lambda row: -row["bits_per_byte"])
    assert [(float(bits), file, int(number)) for bits, file, number in printed] == [
        (row["bits_per_byte"], row.get("file", ""), row["document"]) for row in rows
    ]
