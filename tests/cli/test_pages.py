"""Keys and commands that pages give, against what the program prints."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
PAGE = (SOURCE / "docs" / "commands.md").read_text()
WORDS = (SOURCE / "docs" / "words.md").read_text()
BLOCKS = re.MULTILINE | re.DOTALL

needs_jq = pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")


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


def in_shell(text: str) -> str:
    """Standard output of commands, by the model `tiny`."""
    program = f'xlcli() {{ "{sys.executable}" -P -m xlcli "$@"; }}\n' + text.replace("-m books", "-m tiny")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(["bash", "-euc", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def follow(heading: str) -> None:
    """Runs the scripts and commands below a heading of docs/words.md."""
    section = re.split(r"\n#+ ", WORDS.partition(f"# {heading}\n")[2])[0]
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", section, BLOCKS):
        if language == "python":
            subprocess.run([sys.executable, "-c", code], check=True)
        else:
            in_shell(code)


def table(name: str) -> list[dict[str, str]]:
    """Rows of a CSV file by the names of its columns."""
    with Path(name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@needs_jq
def test_the_most_surprising_passages_of_a_book(run, model):
    paragraphs = [f'"It rained, {chr(97 + i) * 250}," he said.\\' for i in range(12)]
    Path("text.txt").write_text("\n\n".join(["Short.", *paragraphs]) + "\n")
    follow("The most surprising passages of a book")
    rows = table("passages.csv")
    assert len(rows) == 10
    bits = [float(row["bits_per_byte"]) for row in rows]
    assert bits == sorted(bits, reverse=True)
    assert all(row["text"] == paragraphs[(int(row["line"]) - 3) // 2] for row in rows)


@needs_jq
def test_two_editions_against_each_other(run, model):
    first, second = ['"It rained," he said.', "A\tdog ran."], ["He said it rained.", "It was a dog, and it ran."]
    Path("first.txt").write_text("\n\n".join(first) + "\n")
    Path("second.txt").write_text("\n\n".join(second) + "\n")
    follow("Two editions or translations")
    rows = table("differences.csv")
    assert {(row["first"], row["second"]) for row in rows} == set(zip(first, second, strict=True))
    scores = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    wanted = sorted(score["first_bits"] - score["second_bits"] for score in scores)
    assert [float(row["difference"]) for row in rows] == pytest.approx(wanted)


@needs_jq
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


@needs_jq
def test_the_control_of_a_late_chapter(run, model):
    names = ["early.txt", "other.txt", "later/1.txt", "later/2.txt"]
    Path("later").mkdir()
    for number, name in enumerate(names):
        Path(name).write_text(f"It rained {number} times in the night.\n" * 20)
    block = re.search(r'^ +options="-m books.*?^      done$', PAGE, BLOCKS)[0]
    options = ("--mem-len", "16", "--adapt")
    printed = in_shell(block.replace("--mem-len 1024", "--mem-len 16"))
    rows = [line.split("\t") for line in printed.splitlines()]
    assert [row[0] for row in rows] == names[2:]
    for name, *bits in rows:
        for past, shown in zip([[], ["early.txt"], ["other.txt"]], bits, strict=True):
            assert run("eval", *past, name, *options, "--documents", "scores.jsonl").code == 0
            score = json.loads(Path("scores.jsonl").read_text().splitlines()[-1])
            assert float(shown) == pytest.approx(score["bits_per_byte"], rel=1e-4)
