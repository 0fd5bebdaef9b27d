"""The benchmark of a whole novel, in small: a reading of each kind gives its numbers, and is made only once."""

import json
import random
import sys
from argparse import Namespace
from concurrent.futures import Executor, Future
from itertools import pairwise
from pathlib import Path

import pytest

from xlcli.cli.entry import main

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import novel


def text_of(n_characters):
    """Paragraphs of random words."""
    draw = random.Random(0)
    words = ["the", "sea", "was", "calm", "and", "no", "bird", "sang", "that", "night"]
    paragraphs = []
    while sum(map(len, paragraphs)) < n_characters:
        paragraphs.append(" ".join(draw.choices(words, k=draw.randint(3, 60))) + ".")
    return "\n\n".join(paragraphs)


def test_needles_share_no_words_and_lie_near_their_distances():
    book = text_of(200_000)
    text, found = novel.planted(book)
    without = text
    for needle in found:
        data, sentence = text.encode(), needle.sentence.encode()
        for place in (needle.first, needle.second):
            assert data[place : place + len(sentence) + 2] == sentence + b"\n\n"
        assert text.count(needle.sentence) == 2
        assert abs(needle.second - needle.first - needle.distance) < max(400, 0.1 * needle.distance)
        without = without.replace(needle.sentence + "\n\n", "")
    assert without == book
    assert sorted({needle.distance for needle in found}) == [1_000, 10_000, 100_000]
    assert len(found) == 3 * novel.NEEDLES
    words = [word for needle in found for word in needle.sentence.split() if word[0].isupper() or word[0].isdigit()]
    assert len(words) == len(set(words))
    depths = sorted(needle.first for needle in found if needle.distance == 1_000)
    assert depths[0] < len(book) / 10
    assert depths[-1] > len(book) * 0.9
    assert all(b > a for a, b in pairwise(depths))


class InTurn(Executor):
    """Works in this thread, which the program needs for its signals."""

    def __init__(self, n_workers):
        assert n_workers == 2

    def submit(self, work, part):
        work(part)
        done = Future()
        done.set_result(None)
        return done


@pytest.fixture
def calls(monkeypatch, capsysbinary):
    """Commands that the benchmark runs, in this process."""
    calls = []

    def xlcli(*arguments, cwd):
        calls.append(arguments)
        capsysbinary.readouterr()
        assert main([*arguments, "--threads", "1"]) == 0
        return capsysbinary.readouterr().out.decode()

    monkeypatch.setattr(novel, "xlcli", xlcli)
    monkeypatch.setattr(novel, "ThreadPoolExecutor", InTurn)
    return calls


KINDS = ("memory 256", "memory 256, no sinks", "memory 256, both", "windows of 2,048, stride 512")


def test_readings_have_their_numbers_and_are_made_once(calls, untrained, tmp_path, monkeypatch, capsysbinary):
    position = {"kind": "rope", "clamp_len": 64, "n_sinks": 4}
    model = untrained("tiny", position=position)
    monkeypatch.setattr(novel, "TRAINED_HERE", str(model))
    monkeypatch.setattr(novel, "BLOCK", 1024)
    monkeypatch.setattr(novel, "NEEDLES", 3)
    monkeypatch.setattr(novel, "READINGS", {name: novel.READINGS[name] for name in KINDS})
    monkeypatch.setattr(novel, "NEEDLE_READINGS", ("memory 256, both",))
    monkeypatch.setattr(novel, "PLACES", (0, 2048))
    book = tmp_path / "book.txt"
    book.write_text(text_of(3_000))
    imported = untrained("imported", position=position)
    monkeypatch.setattr(novel, "FIRST_BYTES", 2_000)
    options = Namespace(out=tmp_path / "novel.json", book=book, smollm2=str(imported), figures=tmp_path)

    novel.everything(options)
    result = json.loads(options.out.read_text())
    readings = {name for name in novel.READINGS if "no sinks" not in name}
    assert result["runs"]["tiny"].keys() == readings
    assert result["runs"]["imported"].keys() == novel.READINGS.keys()
    assert "eval.adapt_lr=1e-4" in result["runs"]["imported"]["memory 256, both"]["options"]
    for model_name, n_bytes in (("tiny", book.stat().st_size), ("imported", 2_000)):
        for run in result["runs"][model_name].values():
            assert run["bytes"] == n_bytes
            assert novel.mean_of_places(run, 0, n_bytes) == pytest.approx(run["bits_per_byte"], rel=1e-6)
        for run in result["needles"][model_name].values():
            assert {row["distance"] for row in run["needles"]} == {1_000}
            assert run["bits_of_the_rest"] > 0
    assert (tmp_path / "novel-tiny.svg").exists()
    assert "| memory 256, both |" in capsysbinary.readouterr().out.decode()

    # Stopped and started again it makes what is missing, here one reading, and those of a text of another length.
    n_calls = len(calls)
    del result["runs"]["tiny"]["memory 256"]
    result["runs"]["tiny"]["memory 256, both"]["bytes"] -= 1
    options.out.write_text(json.dumps(result))
    novel.everything(options)
    assert len(calls) == n_calls + 2


def test_figures_of_the_page_are_those_of_the_results():
    source = Path(__file__).parents[2]
    made = novel.table(json.loads((source / "benchmarks" / "results" / "novel.json").read_text()))
    page = (source / "docs" / "long-context.md").read_text().partition("## Along a novel")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    scores = [row for row in rows if row[0] != "from byte"]
    assert len(scores) == 21
    for reading, *bits in scores:
        name = reading.replace(" tokens", "").replace(" without", ", no")
        assert f"| {name} | {' | '.join(bits)} | " in made
    (shares,) = [line for line in made.partition("books: second")[2].splitlines()[:3] if "memory 256, cache" in line]
    assert len(shares.split(" | ")) == 6
    assert [share for share in shares.strip("| ").split(" | ")[1:] if share not in page] == []
