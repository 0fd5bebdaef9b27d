"""Text to train the bundled model on, without the texts that measure it, and text to validate it.

    python benchmarks/corpus.py DATA HELD_OUT OUT

DATA has these texts; files may be gzipped:
    books/{train,valid,test}, books-more/train     books of Project Gutenberg, a file each
    modern/{train,valid,test}                      present-day English; modern/manifest.jsonl has the `file`, `split`,
                                                   `source` and `register` of each
    wikitext-2/{train,valid,test}.txt              of Merity et al. 2016
    enwik8-prefix.txt.gz                           at least the first 3,750,000 bytes of enwik8
    code/python-stdlib-{train,valid,test}.txt      modules, each after a line `# >>> FILE: PATH`
    ptb/ptb.{valid,test}.txt                       of Mikolov

HELD_OUT has further texts that measure the model:
    naturalstories, blimp     clones, as for benchmarks/reading.py and benchmarks/pairs.py
    item-set.csv              205 sentences of the UCL corpus of reading times (Frank et al. 2013), a file of
                              github.com/sathvikn/cloze-surprisal in cloze_data/devarda
    book1                     of the Calgary corpus

OUT/train/*.txt: the training text by group, in the order for benchmarks/ids.py. WikiText-2 is without the marks of its
tokens and without sentences that have <unk>. Of enwik8 there are whole pages of bytes 3,000,000 to 3,750,000, of Python
a megabyte, of books those in benchmarks/corpus_books.txt, in random order and without the underscores that mark
italics. Podcasts are thinned to five of nine blocks, and small groups are there twice.

OUT/check.txt: what was left out because it shares too many runs of successive words with the texts that measure the
model (limits in `held_out_sets`). Checked are whole books, articles, pages and modules; of modern text, whose documents
have no marks, blocks of paragraphs.

OUT/valid.txt: 95 kB of nine groups of modern/valid and of the books of books/valid. OUT/valid/GROUP.txt: 120 kB, or all
there is, of a group of modern/valid, in equal parts from the middle of each of its files.
"""

import argparse
import csv
import gzip
import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from wikitext import articles


class Group(NamedTuple):
    """A group of training text."""

    name: str
    label: str = ""
    """Register or source of a modern group in the manifest."""
    copies: int = 1
    block_chars: int = 8000
    """Size of the blocks of a modern group that are checked, in characters."""


GROUPS = (
    Group("podcasts", "changelog"),
    Group("spoken-meetings", "qmsum-meetings"),
    Group("spoken-nasa", "nasa-airground"),
    Group("speeches", "spoken (speeches)", copies=2),
    Group("web-chat", "web chat", copies=2),
    Group("dialogue", "dialogue (written)", copies=2, block_chars=1),
    Group("technical", "technical", copies=2),
    Group("code-python"),
    Group("web-government", "web (government)", block_chars=4000),
    Group("web", "web", copies=2),
    Group("news-academic", "news/encyclopedia/academic", copies=2),
    Group("simple-news", "simple news", copies=2),
    Group("mixed", "mixed (spoken, news, web, fiction)", copies=2),
    Group("encyclopedia", "encyclopedia", copies=2, block_chars=4000),
    Group("encyclopedia-enwik8"),
    Group("encyclopedia-wikitext", copies=2),
    Group("textbook", "textbook", block_chars=4000),
    Group("children", "children's", copies=2),
    Group("fiction-web", "fiction (web)", copies=2),
    Group("fiction-1950s", "fiction"),
)
MIXED_VALID = ("podcasts", "spoken-meetings", "textbook", "web-government", "dialogue", "mixed", "fiction-1950s")
MIXED_VALID += ("web-chat", "encyclopedia")
"""Groups of valid.txt."""
ENWIK8_TRAIN = slice(3_000_000, 3_750_000)
"""Bytes of enwik8 to train on; the others measure models."""
BOOKS = Path(__file__).with_name("corpus_books.txt")


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def modern_files(data: Path, split: str, label: str) -> list[bytes]:
    """Modern texts of a register or source."""
    rows = map(json.loads, (data / "modern" / "manifest.jsonl").read_text().splitlines())
    chosen = [row for row in rows if row["split"] == split and label in (row["register"], row["source"])]
    return [read(data / "modern" / name) for name in sorted(row["file"] for row in chosen)]


def blocks(text: str, size: int, length: Callable[[str], int] = len) -> Iterator[str]:
    """Successive whole paragraphs of a length of at least `size`; a block begins with the blank line before it."""
    block, total = [], 0
    for paragraph in re.split(r"(?<=\n)(?=\n)", text):
        block.append(paragraph)
        total += length(paragraph)
        if total >= size:
            yield "".join(block)
            block, total = [], 0
    if block:
        yield "".join(block)


def pages(data: Path) -> list[str]:
    text = read(data / "enwik8-prefix.txt.gz")[ENWIK8_TRAIN].decode()
    return re.findall(r"  <page>.*?</page>\n", text, re.DOTALL)


def modules(data: Path) -> list[str]:
    """Two of each five modules of at most 60,000 characters, up to a million characters in all."""
    text = read(data / "code" / "python-stdlib-train.txt.gz").decode()
    found = re.split(r"(?m)^(?=# >>> FILE: )", text)[1:]
    chosen, total = [], 0
    for number in [*range(0, len(found), 5), *range(1, len(found), 5)]:
        if len(found[number]) < 60_000 and total + len(found[number]) <= 1_000_000:
            chosen.append(number)
            total += len(found[number])
    return [found[number] for number in sorted(chosen)]


def books(data: Path) -> Iterator[str]:
    for name in BOOKS.read_text().split():
        (path,) = data.glob(f"books*/train/{name}.txt*")
        yield read(path).decode().replace("_", "").rstrip("\n") + "\n\n\n"


class HeldOut(NamedTuple):
    """Texts that measure the model. A document is left out that shares more runs with them than both limits."""

    n_words: int
    """Words of a run."""
    max_runs: int
    max_share: float
    """Share of the runs of the document."""
    runs: dict[str, np.ndarray]
    """Runs by the name of the text."""


def words(text: str) -> np.ndarray:
    """A number for each word, without case and accents. Apostrophes divide words."""
    plain = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text)).lower()
    found = re.findall(r"[^\W_]+", plain.replace(" n't", "n't").replace("_", ""))
    return np.fromiter(map(hash, found), np.int64).view(np.uint64)


def distinct_runs(numbers: np.ndarray, n_words: int) -> np.ndarray:
    """Sorted 64-bit hashes of the runs of `n_words` successive words."""
    hashes = np.zeros(max(len(numbers) - n_words + 1, 0), np.uint64)
    for i in range(n_words):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + numbers[i : i + len(hashes)]
    return np.unique(hashes)


def shared(runs: np.ndarray, table: np.ndarray) -> np.ndarray:
    places = np.minimum(np.searchsorted(table, runs), len(table) - 1)
    return runs[table[places] == runs]


def held_out(n_words: int, max_runs: int, max_share: float, texts: dict[str, list[str]]) -> HeldOut:
    runs = {name: [distinct_runs(words(part), n_words) for part in parts] for name, parts in texts.items()}
    tables = {name: np.unique(np.concatenate(parts)) for name, parts in runs.items()}
    return HeldOut(n_words, max_runs, max_share, tables)


def reading_time_sentences(folder: Path) -> list[str]:
    """The longest beginning of each sentence: a row has the words so far, and the next one."""
    longest: dict[str, str] = {}
    with (folder / "item-set.csv").open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            longest[row["sent_id"]] = max(longest.get(row["sent_id"], ""), f"{row['sentence']} {row['word']}", key=len)
    return list(longest.values())


def natural_stories(folder: Path) -> list[str]:
    stories = defaultdict(list)
    for line in (folder / "naturalstories" / "words.tsv").read_text().splitlines():
        code, word = line.split("\t")[:2]
        if code.endswith(".whole"):
            stories[code.split(".")[0]].append(word)
    return [" ".join(story) for story in stories.values()]


def blimp(folder: Path) -> list[str]:
    lines = [line for path in (folder / "blimp" / "data").iterdir() for line in path.read_text().splitlines()]
    return [row[key] for row in map(json.loads, lines) for key in ("sentence_good", "sentence_bad")]


def other_texts(data: Path, folder: Path) -> dict[str, list[str]]:
    texts = {}
    for name in ("books", "modern"):
        for split in ("valid", "test"):
            texts[f"{name}/{split}"] = [read(path).decode() for path in (data / name / split).iterdir()]
    for name in ("wikitext-2/{}.txt", "ptb/ptb.{}.txt", "code/python-stdlib-{}.txt"):
        texts[name.format("*")] = [read(data / name.format(split)).decode() for split in ("valid", "test")]
    enwik8 = read(data / "enwik8-prefix.txt.gz")
    parts = enwik8[: ENWIK8_TRAIN.start], enwik8[ENWIK8_TRAIN.stop :]
    texts["enwik8"] = [part.decode(errors="replace") for part in parts]
    texts["book1"] = [(folder / "book1").read_text(errors="replace")]
    return texts


def held_out_sets(data: Path, folder: Path) -> list[HeldOut]:
    return [
        held_out(6, 0, 0, {"reading times": reading_time_sentences(folder)}),
        held_out(8, 2, 0, {"Natural Stories": natural_stories(folder)}),
        held_out(7, 3, 0, {"BLiMP": blimp(folder)}),
        held_out(10, 8, 0.01, other_texts(data, folder)),
    ]


def overlap(document: str, sets: Sequence[HeldOut]) -> tuple[Counter[str], bool]:
    """Number of runs that a document shares with each text, and whether they are too many."""
    numbers = words(document)
    counts, too_many = Counter(), False
    for held in sets:
        runs = distinct_runs(numbers, held.n_words)
        found = {name: shared(runs, table) for name, table in held.runs.items()}
        n_shared = len(np.unique(np.concatenate([*found.values()])))
        too_many |= n_shared > max(held.max_runs, held.max_share * len(runs))
        counts.update({name: len(some) for name, some in found.items() if len(some)})
    return counts, too_many


def checked(group: str, documents: Iterable[str], sets: Sequence[HeldOut], report: list[str]) -> list[str]:
    """The documents that may be read; the report gets the number of these, and the others with what they share."""
    kept, left_out, rest = [], [], Counter()
    for number, document in enumerate(documents):
        counts, too_many = overlap(document, sets)
        if too_many:
            start = " ".join(document[:200].split())[:70]
            left_out.append(f"  {number} {start!r}: {described(counts)}")
        else:
            kept.append(document)
            rest += counts
    summary = f"{group}: {len(left_out)} documents left out; {len(kept)} others share runs: {described(rest) or 'none'}"
    print(summary, flush=True)
    report += [summary, *left_out]
    return kept


def described(counts: Counter[str]) -> str:
    return ", ".join(f"{n} with {name}" for name, n in counts.items())


def documents(data: Path, group: Group) -> Iterable[str]:
    match group.name:
        case "code-python":
            return modules(data)
        case "encyclopedia-enwik8":
            return pages(data)
        case "encyclopedia-wikitext":
            return articles(read(data / "wikitext-2" / "train.txt.gz").decode())
    return blocks(b"\n".join(modern_files(data, "train", group.label)).decode(), group.block_chars)


def thinned(text: str) -> str:
    """Five of each nine blocks of 200 kB."""
    portions = blocks(text, 200_001, lambda paragraph: len(paragraph.encode()))
    return "".join(portion for i, portion in enumerate(portions) if i % 9 in (0, 2, 4, 5, 7))


def write_training_text(data: Path, sets: Sequence[HeldOut], folder: Path) -> list[str]:
    """Writes the files, and returns the report of the check."""
    report: list[str] = []
    for number, group in enumerate(GROUPS):
        text = "".join(checked(group.name, documents(data, group), sets, report))
        if group.name == "podcasts":
            text = thinned(text)
        text = text.rstrip("\n") + "\n\n"
        (folder / f"{number:02d}-{group.name}.txt").write_text(text * group.copies)
    kept = checked("books", books(data), sets, report)
    random.Random(5).shuffle(kept)
    (folder / "90-books.txt").write_text("".join(kept))
    return report


def whole_lines(text: bytes, start: int, size: int) -> bytes:
    """At most `size` bytes of whole lines, from the line that has `start` on."""
    begin = text.rfind(b"\n", 0, start) + 1
    return text[begin : text.rfind(b"\n", 0, begin + size) + 1]


def middle(text: bytes, size: int) -> bytes:
    return whole_lines(text, max(0, (len(text) - size) // 2), size)


def write_validation_text(data: Path, out: Path) -> None:
    parts = {}
    for group in GROUPS:
        if group.label:
            files = modern_files(data, "valid", group.label)
            text = b"\n".join(middle(file, 120_000 // len(files)) for file in files)
            (out / "valid" / f"{group.name}.txt").write_bytes(text)
            parts[group.name] = middle(whole_lines(b"\n".join(files), 0, 120_000), 8000)
    novels = [middle(read(path), 5000) for path in sorted((data / "books" / "valid").iterdir())]
    (out / "valid.txt").write_bytes(b"\n".join([parts[name] for name in MIXED_VALID] + novels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "held_out", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    for name in ("train", "valid"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    write_validation_text(options.data, options.out)
    sets = held_out_sets(options.data, options.held_out)
    report = write_training_text(options.data, sets, options.out / "train")
    (options.out / "check.txt").write_text("\n".join(report) + "\n")


if __name__ == "__main__":
    main()
