"""Standard data sets: checks a file that you have downloaded, and writes the published splits.

    python benchmarks/datasets.py --list
    python benchmarks/datasets.py enwik8.zip [-o data/enwik8] [--name enwik8]

PATH is the archive as published, or a folder with its unpacked files (each may be gzipped). Nothing is downloaded. Size
and SHA-256 are compared with public values where there are any, sizes and numbers of words and lines with those of the
papers, and every difference is refused. Then train.txt, valid.txt and test.txt are written, unchanged bytes of the data
set, with the commands for `xlcli`, whose `eval` has the unit of the papers:

- enwik8 and text8: bits per character are bits per byte (90, 5 and 5 million bytes; Mahoney 2006, Al-Rfou et al. 2019).
- WikiText, Penn Treebank and One Billion Words: perplexity per word, where a line end counts as a word, <eos> (Mikolov
  et al. 2010, Merity et al. 2017, Chelba et al. 2014). `eval` prints it for models of any vocabulary; models of words
  have the closed vocabulary of the papers, whose <unk> is a word like others.
"""

import argparse
import contextlib
import fnmatch
import gzip
import hashlib
import json
import lzma
import sys
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from xlcli.metrics import TextCounter

PORTION = 2**20
DAMAGED = (EOFError, RuntimeError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError)
"""Errors of files that cannot be unpacked; RuntimeError: an encrypted or unknown zip file."""


@dataclass(frozen=True)
class Split:
    """One split.

    files: patterns of the names of its files, one of which must match; all files that match are joined, by name
    first, last: slice of the file in bytes
    n_bytes, sha256, lines, words: expected values, None if no public value is known; a line end is a word
    """

    files: tuple[str, ...]
    first: int = 0
    last: int | None = None
    n_bytes: int | None = None
    sha256: str | None = None
    lines: int | None = None
    words: int | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set; `archives` and `whole` are sizes and SHA-256 of published archives and of an unpacked single file."""

    source: str
    unit: str
    splits: dict[str, Split]
    archives: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    whole: tuple[int, str] | None = None
    train: str = ""
    remark: str = ""


def by_bytes(name):
    """90 %, 5 % and 5 % of a file of 100 MB."""
    ends = {"train": (0, 90_000_000), "valid": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}
    return {split: Split((name,), first, last, last - first) for split, (first, last) in ends.items()}


DATASETS = {
    "enwik8": DataSet(
        source="Mahoney 2006, http://mattmahoney.net/dc/enwik8.zip",
        unit="bits per byte, published as bits per character",
        splits=by_bytes("enwik8"),
        archives={"enwik8.zip": (36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc")},
        whole=(100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
        train="--tokenizer bytes --binary",
    ),
    "text8": DataSet(
        source="Mahoney 2006, http://mattmahoney.net/dc/text8.zip",
        unit="bits per byte = bits per character",
        splits=by_bytes("text8"),
        archives={"text8.zip": (31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232")},
        whole=(100_000_000, "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7"),
        train="--tokenizer bytes --binary",
    ),
    "wikitext-103": DataSet(
        source="Merity et al. 2017, wikitext-103-v1.zip",
        unit="perplexity per word, line ends included",
        splits={
            "train": Split(("wiki.train.tokens",), words=103_227_021, lines=1_801_350),
            "valid": Split(("wiki.valid.tokens",), words=217_646, lines=3_760),
            "test": Split(("wiki.test.tokens",), words=245_569, lines=4_358),
        },
        archives={"wikitext-103-v1.zip": (None, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590")},
        train="--tokenizer words --vocab-size 267735",
        remark="Unpacked files are checked by their numbers of words and lines only.",
    ),
    "wikitext-2": DataSet(
        source="Merity et al. 2017, wikitext-2-v1.zip",
        unit="perplexity per word, line ends included",
        splits={
            "train": Split(
                ("wiki.train.tokens", "train.txt"),
                n_bytes=10_797_148,
                sha256="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                lines=36_718,
                words=2_088_628,
            ),
            "valid": Split(
                ("wiki.valid.tokens", "valid.txt"),
                n_bytes=1_121_681,
                sha256="f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                lines=3_760,
                words=217_646,
            ),
            "test": Split(
                ("wiki.test.tokens", "test.txt"),
                n_bytes=1_256_449,
                sha256="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
                lines=4_358,
                words=245_569,
            ),
        },
        archives={"wikitext-2-v1.zip": (None, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c")},
        train="--tokenizer words",
    ),
    "ptb": DataSet(
        source="Penn Treebank as prepared by Mikolov et al. 2010, simple-examples.tgz",
        unit="perplexity per word, line ends included",
        splits={
            "train": Split(
                ("ptb.train.txt",),
                n_bytes=5_101_618,
                sha256="fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
                lines=42_068,
                words=929_589,
            ),
            "valid": Split(
                ("ptb.valid.txt",),
                n_bytes=399_782,
                sha256="c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
                lines=3_370,
                words=73_760,
            ),
            "test": Split(
                ("ptb.test.txt",),
                n_bytes=449_945,
                sha256="dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
                lines=3_761,
                words=82_430,
            ),
        },
        train="--tokenizer words",
        remark="No SHA-256 of the archive is known; its files are checked.",
    ),
    "lm1b": DataSet(
        source="Chelba et al. 2014, 1-billion-word-language-modeling-benchmark-r13output.tar.gz",
        unit="perplexity per word, line ends included; sentences in random order",
        splits={
            # The published 829,250,940 count a mark at the beginning and at the end of each of 30,301,028 sentences.
            "train": Split(("news.en-000??-of-00100",), lines=30_301_028, words=798_949_912),
            "valid": Split(("news.en.heldout-00001-of-00050",), words=165_560),
            "test": Split(("news.en.heldout-00000-of-00050",), lines=6_075, words=159_658),
        },
        archives={
            "1-billion-word-language-modeling-benchmark-r13output.tar.gz": (
                1_792_209_805,
                "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
            )
        },
        train="--tokenizer words --vocab-size 793471",
        remark="Validation is held-out shard 1; the papers report shard 0, the test text. "
        "Unpacked files are checked by their numbers of words and lines only.",
    ),
}


class MismatchError(Exception):
    """A file is missing, or is not the published one."""


def prepare(path, folder=None, name=None):
    """Checks the data set in `path` and writes its splits to `folder`. Returns name, folder and facts of each split."""
    path = Path(path)
    with contextlib.ExitStack() as stack:
        for data in DATASETS.values():
            if path.is_file() and path.name in data.archives:
                compare(path.name, digest(stored(path)), data.archives[path.name])
        files = unpacked(path, stack)
        name = name or recognize(path, files)
        folder = Path(folder or Path("data") / name)
        data = DATASETS[name]
        if data.whole:
            single = find(files, next(iter(data.splits.values())).files)[0]
            compare(single.name, digest(portions(single)), data.whole)
        folder.mkdir(parents=True, exist_ok=True)
        facts, partial = {}, {split: folder / f"{split}.partial" for split in data.splits}
        try:
            for split, expected in data.splits.items():
                facts[split] = write_split(find(files, expected.files), expected, partial[split])
                check_split(f"{name}, {split}", facts[split], expected)
            for split, file in partial.items():
                file.replace(folder / f"{split}.txt")
        finally:
            for file in partial.values():
                file.unlink(missing_ok=True)
        (folder / "dataset.json").write_text(json.dumps({"name": name, "splits": facts}, indent=1) + "\n")
        return name, folder, facts


def unpacked(path, stack):
    """Files of a folder, an archive (unpacked into a temporary folder) or a single file."""
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.is_file()]
    if not path.is_file():
        raise MismatchError(f"{path} does not exist")
    if not (zipfile.is_zipfile(path) or tarfile.is_tarfile(path)):
        return [path]
    temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            file.extractall(temporary)
    else:
        with tarfile.open(path) as file:
            file.extractall(temporary, filter="data")
    return [file for file in sorted(temporary.rglob("*")) if file.is_file()]


def recognize(path, files):
    """Name of the data set, by the name of an archive, else by its files and their sizes."""
    for name, data in DATASETS.items():
        if path.name in data.archives:
            return name
    fitting = []
    for name, data in DATASETS.items():
        with contextlib.suppress(MismatchError):
            sizes = [sum(map(size, find(files, split.files))) for split in data.splits.values()]
            expected = [data.whole[0] if data.whole else split.n_bytes for split in data.splits.values()]
            if all(known in (None, found) for known, found in zip(expected, sizes, strict=True)):
                fitting.append((sum(known is not None for known in expected), name))
    if not fitting:
        raise MismatchError(f"{path} holds none of {', '.join(DATASETS)}; name one with --name to see what is missing")
    return max(fitting)[1]


def find(files, patterns):
    """Files of the first pattern that any name matches, with or without `.gz`, in order of their names, each once."""
    for pattern in patterns:
        named = {file.name.removesuffix(".gz"): file for file in sorted(files, reverse=True)}
        if found := fnmatch.filter(sorted(named), pattern):
            return [named[name] for name in found]
    raise MismatchError(f"there is no file {' or '.join(patterns)}")


def stored(file, opened=open):
    """Bytes of a file."""
    with opened(file, "rb") as source:
        while portion := source.read(PORTION):
            yield portion


def portions(file):
    """Bytes of a file, unpacked if its name ends in `.gz`."""
    return stored(file, gzip.open if file.suffix == ".gz" else open)


def size(file):
    """Bytes of a file, unpacked."""
    return sum(map(len, portions(file))) if file.suffix == ".gz" else file.stat().st_size


def digest(data):
    """Size in bytes and SHA-256 of data in portions."""
    total, value = 0, hashlib.sha256()
    for portion in data:
        total += len(portion)
        value.update(portion)
    return total, value.hexdigest()


def compare(name, found, expected):
    """Refuses a file whose size or SHA-256 differs from the known one."""
    for what, is_, should_be in zip(("bytes", "SHA-256"), found, expected, strict=True):
        if should_be is not None and is_ != should_be:
            raise MismatchError(f"{name}: {what} {is_}, published {should_be}")


def write_split(files, split, target):
    """Writes one split and returns its size, counts and SHA-256."""
    counter, value, place, n_lines = TextCounter(), hashlib.sha256(), 0, 0
    with target.open("wb") as out:
        for file in files:
            for portion in portions(file):
                first, last = split.first - place, None if split.last is None else split.last - place
                place += len(portion)
                part = portion[max(first, 0) : None if last is None else max(last, 0)]
                counter.feed(part)
                n_lines += part.count(b"\n")
                value.update(part)
                out.write(part)
    counts = counter.counts()
    return {
        "bytes": counts.bytes,
        "chars": counts.chars,
        "lines": n_lines,
        "words": counts.words,
        "sha256": value.hexdigest(),
    }


def check_split(name, facts, split):
    """Refuses a split that differs from the published one; `facts["checked"]` names the quantities that agree."""
    expected = {"bytes": split.n_bytes, "lines": split.lines, "words": split.words, "sha256": split.sha256}
    for key, value in expected.items():
        if value is not None and facts[key] != value:
            raise MismatchError(f"{name}: {key} {facts[key]}, published {value}")
    facts["checked"] = [key for key, value in expected.items() if value is not None]


def describe(name, facts, folder):
    """Table of the splits, and the commands that use them."""
    data = DATASETS[name]
    rows = [
        f"{name}: {data.source}",
        f"{'split':6} {'bytes':>13} {'characters':>13} {'lines':>11} {'words':>12}  checked",
    ]
    for split, fact in facts.items():
        chars = "-" if fact["chars"] is None else f"{fact['chars']:,}"
        words = "-" if fact["words"] is None else f"{fact['words']:,}"
        checked = ", ".join(fact["checked"]) or "nothing"
        rows.append(f"{split:6} {fact['bytes']:13,} {chars:>13} {fact['lines']:11,} {words:>12}  {checked}")
    rows += [f"unit: {data.unit}. {data.remark}".rstrip(), ""]
    options = f"--valid {folder}/valid.txt --test {folder}/test.txt {data.train}"
    binary = " --binary" if "--binary" in data.train else ""
    rows += [
        f"xlcli train {folder}/train.txt {options} -o models/{name}",
        f"xlcli eval {folder}/test.txt -m models/{name}{binary}",
    ]
    return "\n".join(rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--name", choices=DATASETS)
    parser.add_argument("-o", "--out", type=Path, help="folder of the splits; default: data/NAME")
    parser.add_argument("--list", action="store_true", help="list the data sets")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:13} {data.source}; {data.unit}" for name, data in DATASETS.items()))
        return 0
    if options.path is None:
        parser.error("give the path of a data set, or --list")
    try:
        name, folder, facts = prepare(options.path, options.out, options.name)
    except DAMAGED as error:
        print(f"error: {options.path} cannot be unpacked: {error}", file=sys.stderr)
        return 3
    except (MismatchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(describe(name, facts, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
