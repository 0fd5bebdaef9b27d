"""Standard data sets: real ones where they are (folder `data`, or LM_DATA), and small archives of the same form."""

import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import datasets

from xlcli.metrics import perplexity
from xlcli.text.tokenizers import WordsTokenizer

REAL = Path(os.environ.get("LM_DATA", Path(__file__).parents[1] / "data"))
LINES = {"train": " \n = A title = \n a b <unk> , b \n", "valid": " a b \n", "test": " b b c\n \n"}


@pytest.fixture
def small(monkeypatch):
    """Data sets with the form of the published ones and the sizes of these texts."""
    whole = bytes(range(100)) + "é".encode() * 50
    enwik8 = replace(
        datasets.DATASETS["enwik8"],
        splits={
            split: replace(old, first=first, last=last, n_bytes=last - first)
            for (split, old), (first, last) in zip(
                datasets.DATASETS["enwik8"].splits.items(), [(0, 180), (180, 190), (190, 200)], strict=True
            )
        },
        whole=(200, hashlib.sha256(whole).hexdigest()),
    )
    wikitext = replace(
        datasets.DATASETS["wikitext-103"],
        splits={
            split: replace(old, words=len(LINES[split].split()) + LINES[split].count("\n"), lines=None)
            for split, old in datasets.DATASETS["wikitext-103"].splits.items()
        },
    )
    lm1b = replace(
        datasets.DATASETS["lm1b"],
        splits={split: replace(old, words=None, lines=None) for split, old in datasets.DATASETS["lm1b"].splits.items()},
        archives={},
    )
    monkeypatch.setattr(datasets, "DATASETS", {"enwik8": enwik8, "wikitext-103": wikitext, "lm1b": lm1b})
    return whole


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_file_is_split_by_bytes_even_within_a_character(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = zipped(Path("copy.zip"), {"enwik8": small})
    assert datasets.main([str(path), "-o", "out"]) == 0
    assert b"".join(Path(f"out/{split}.txt").read_bytes() for split in ("train", "valid", "test")) == small
    assert Path("out/valid.txt").read_bytes() == small[180:190]
    said = capsys.readouterr().out
    assert "character" in said
    assert "xlcli eval out/test.txt -m models/enwik8 --binary" in said
    assert sorted(file.name for file in Path("out").iterdir()) == [
        "dataset.json", "test.txt", "train.txt", "valid.txt"
    ]  # fmt: skip
    assert json.loads(Path("out/dataset.json").read_text())["splits"]["test"]["checked"] == ["bytes"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.zip", "out"]


def test_words_are_counted_with_the_ends_of_lines(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {f"wikitext-103/wiki.{split}.tokens": text for split, text in LINES.items()}
    name, folder, facts = datasets.prepare(zipped(Path("unnamed.zip"), files), name="wikitext-103")
    assert (name, folder) == ("wikitext-103", Path("data/wikitext-103"))
    assert [facts[split]["words"] for split in LINES] == [12, 3, 5]
    tokenizer = WordsTokenizer.train([LINES["train"].encode()])
    assert [len(tokenizer.encode(text.encode())) for text in LINES.values()] == [12, 3, 5]
    assert perplexity(2.0 * facts["test"]["words"], facts["test"]["words"]) == pytest.approx(7.389, abs=1e-3)
    assert Path("data/wikitext-103/train.txt").read_text() == LINES["train"]


def test_the_shards_of_lm1b_are_joined_in_order_without_the_held_out_ones(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"t/news.en-000{i:02}-of-00100" for i in (3, 1, 2)]
    names += [f"h/news.en.heldout-0000{i}-of-00050" for i in range(3)]
    with tarfile.open("lm1b.tar.gz", "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"benchmark/{name}")
            member.size = len(name) + 1
            archive.addfile(member, io.BytesIO(name.encode() + b"\n"))
    name, folder, facts = datasets.prepare("lm1b.tar.gz")
    assert name == "lm1b"
    shards = (folder / "train.txt").read_text().split()
    assert shards == sorted(names[:3])
    assert (folder / "test.txt").read_text() == f"{names[3]}\n"
    assert (folder / "valid.txt").read_text() == f"{names[4]}\n"
    assert facts["train"]["words"] == 6


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("enwik8", b"x" * 199, r"\b199\b.*\b200\b"),
        ("enwik8", b"x" * 200, "SHA-256"),
        ("wiki.valid.tokens", b"a b c d\n", r"\bvalid\b.*\b5\b.*\b3\b"),
        ("wiki.test.tokens", None, r"wiki\.test\.tokens"),
    ],
)
def test_other_files_are_refused(small, tmp_path, capsys, file, text, message):
    for split, line in LINES.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(line)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(text)
    name = "enwik8" if file == "enwik8" else "wikitext-103"
    assert datasets.main([str(tmp_path), "--name", name, "-o", str(tmp_path / "out")]) == 3
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*.partial"))


def test_a_changed_archive_is_refused(tmp_path, capsys):
    path = zipped(tmp_path / "enwik8.zip", {"enwik8": b"x"})
    assert datasets.main([str(path), "-o", str(tmp_path / "out")]) == 3
    assert "bytes" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert datasets.main([str(tmp_path / "empty")]) == 3
    assert "wikitext-103" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:10] + b"\xff" * 9 + data[19:]])
def test_damaged_files_are_named(small, tmp_path, capsys, damage):
    for split, line in LINES.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(line)
    (tmp_path / "wiki.test.tokens").unlink()
    (tmp_path / "wiki.test.tokens.gz").write_bytes(damage(gzip.compress(LINES["test"].encode() * 9)))
    assert datasets.main([str(tmp_path), "--name", "wikitext-103", "-o", str(tmp_path / "out")]) == 3
    assert str(tmp_path) in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_there_packed_and_unpacked_is_read_once(small, tmp_path):
    for split, line in LINES.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(line)
        (tmp_path / f"wiki.{split}.tokens.gz").write_bytes(gzip.compress(line.encode()))
    _, folder, _ = datasets.prepare(tmp_path, tmp_path / "out", "wikitext-103")
    assert (folder / "test.txt").read_text() == LINES["test"]


@pytest.mark.parametrize(("name", "vocab_size"), [("ptb", 10_000), ("wikitext-2", 33_278)])
def test_the_real_data_set_has_its_published_vocabulary_and_tokens(name, vocab_size, tmp_path):
    if not (REAL / name).is_dir():
        pytest.skip("the data set is not here")
    found, folder, facts = datasets.prepare(REAL / name, tmp_path)
    assert found == name
    assert all("sha256" in fact["checked"] for fact in facts.values())
    tokenizer = WordsTokenizer.train([(folder / "train.txt").read_bytes()])
    assert tokenizer.vocab_size == vocab_size
    assert len(tokenizer.encode((folder / "valid.txt").read_bytes())) == facts["valid"]["words"]
    (tmp_path / "packed").mkdir()
    for split in facts:
        original = datasets.DATASETS[name].splits[split].files[0]
        with gzip.open(tmp_path / "packed" / f"{original}.gz", "wb", compresslevel=1) as file:
            file.write((folder / f"{split}.txt").read_bytes())
    assert datasets.prepare(tmp_path / "packed", tmp_path / "again")[2] == facts
