"""Training on ten million words, in the spirit of the Strict-Small track of BabyLM (Charpentier et al. 2025).

    python benchmarks/babylm.py train DATA OUT [--hours 3] [--seed 0] [--set KEY=VALUE ...]
    python benchmarks/babylm.py score OUT [FOLDER ...] [--babylm FOLDER] [--naturalstories FOLDER] [--ucl FILE] ...

DATA is a folder with `books`, `books-more` and `modern`; `modern/tenmillion.txt` lists the parts of their files that
are read: 10.0 million words by white space, half of them speech. OUT gets these words as they are (`text/`) and once
more as rows of one to five sentences (`rows/`), each of which is read from empty memory like a sentence of the tests.
It also gets a part of each file of `modern/valid` (`valid.txt`).

The vocabulary is learned on the same words. The run (`first/`) reads text and rows at constant rates and goes on
(`model/`) with those that are not recorded talk (`written/`), where the rates decay. Both take the budget together.
OUT may hold a run of the same recipe that was stopped, which continues. The track allows ten passes over the words;
three hours of two cores take fewer.

`score` takes the models in the FOLDERs, by default those of OUT and those that its run kept, and writes
OUT/pairs.json and OUT/reading.json with benchmarks/pairs.py and benchmarks/reading.py, whose folders it takes. What
OUT/pairs.json has already is not scored again, so the command also continues one that was stopped.
"""

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pairs
import reading
import rows
from runs import write_rows

VALID_BYTES = 4000
"""Of each file of modern/valid."""
N_WORDS = 9_999_996
MOST_SENTENCES = 5
"""Of a row."""
LEAST_WORDS = 4
"""Of a row of the second part of the run."""
SPEAKER = re.compile(r"^[^:.?!]{1,30}: ")
"""What rows lack at their beginning: a name before speech, and a few words of prose before a colon."""
TALK = ("changelog", "qmsum")
"""Beginnings of the names of recorded talk, which the second part of the run leaves out: 4.0 million words."""
RECIPE = {
    "train.shuffle": "true",
    "train.reset_on_document": "true",
    "train.average_share": "0.125",
    "train.eval_every": "300s",
    "train.save_every": "120s",
}
FIRST = {
    "model.n_layers": "6",
    "model.embedding.n_bigrams": "0",
    "train.lr_schedule": "constant",
    "train.keep_at": "1560k,3120k,7800k",
}
"""What else differs from the preset medium. Models are kept after 1, 2 and 5 million words of 1.56 tokens."""
SECOND = {
    "train.batch_size": "16",
    "train.lr": "0.006",
    "train.adam_lr": "0.01",
    "train.lr_schedule": "linear",
    "train.keep_at": "15600k",
}
"""Batches and rates are those of the first part."""
FIRST_SHARE = 0.46
"""Of the budget."""
SETS = ("blimp_filtered", "supplement", "ewok")


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def row_texts(text: str, rng: random.Random, *, is_wrapped: bool) -> Iterator[str]:
    """All sentences of the text in order, one to `MOST_SENTENCES` of a paragraph in a row."""
    for sentences, is_before_blank in rows.paragraphs(text, is_wrapped=is_wrapped):
        while sentences:
            n = rng.randint(1, MOST_SENTENCES)
            row, sentences = " ".join(sentences[:n]), sentences[n:]
            yield SPEAKER.sub("", row, count=1) + ("\n\n" if is_before_blank and not sentences else "")


def prepare(data: Path, out: Path) -> None:
    """Write the listed parts of the text, a file each, their rows, and the validation text."""
    for folder in ("text", "rows", "written"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    n_words = 0
    for line in (data / "modern/tenmillion.txt").read_text().splitlines()[1:]:
        name, begin, end, _ = line.split("\t")
        part = read(data / name)[int(begin) : int(end)]
        n_words += len(part.split())
        stem = Path(name).name.removesuffix(".gz").removesuffix(".txt")
        (out / "text" / f"{stem}.txt").write_bytes(part)
        texts = list(row_texts(part.decode(errors="replace"), rng, is_wrapped=name.startswith("books")))
        write_rows(out / "rows" / f"{stem}.jsonl", ({"text": text} for text in texts))
        if not stem.startswith(TALK):
            (out / "written" / f"{stem}.txt").write_bytes(part)
            longer = ({"text": text} for text in texts if len(text.split()) >= LEAST_WORDS)
            write_rows(out / "written" / f"{stem}.jsonl", longer)
    if n_words != N_WORDS:
        raise SystemExit(f"{data}: {n_words} words, not {N_WORDS}")
    beginnings = [read(path)[:VALID_BYTES] for path in sorted((data / "modern/valid").iterdir())]
    whole_lines = [part[: part.rindex(b"\n") + 1] for part in beginnings]
    (out / "valid.txt").write_bytes(b"\n".join(whole_lines))


def train_part(
    options: argparse.Namespace, folder: str, hours: float, source: list[str], recipe: dict[str, str]
) -> int:
    """Train one part of the run, or what is left of it, in OUT; the exit code of the command."""
    settings = [f"{key}={value}" for key, value in (RECIPE | recipe).items()]
    command = [sys.executable, "-m", "xlcli", "train", *source, "--valid", "valid.txt", "--test", "0"]
    command += ["--max-time", f"{hours:g}h", "--seed", str(options.seed), "-o", folder]
    command += ["--nproc", "2", "--threads", "1"]
    command += ["--resume"] if (options.out / folder).exists() else []
    command += [part for setting in settings + options.settings for part in ("--set", setting)]
    return subprocess.run(command, cwd=options.out, check=False).returncode


def train(options: argparse.Namespace) -> int:
    """Train in OUT, with the progress on this terminal; the exit code of the first part that fails, or 0."""
    if not (options.out / "valid.txt").exists():
        prepare(options.data, options.out)
    hours = options.hours * FIRST_SHARE
    new = ["text", "rows", "--preset", "medium", "--vocab-size", "8192"]
    if not (options.out / "model").exists():
        code = train_part(options, "first", hours, new, FIRST)
        if code:
            return code
    return train_part(options, "model", options.hours - hours, ["written", "--init", "first"], SECOND)


def score(options: argparse.Namespace) -> int:
    """Score models on pairs and reading times, those that have no score yet."""
    own = [options.out / "model", options.out / "first", *sorted(options.out.glob("*/kept/*"))]
    models = [str(folder) for folder in options.models or own]
    homes = {name: options.babylm for name in SETS if options.babylm is not None}
    out = options.out / "pairs.json"
    for model in models:
        scored = json.loads(out.read_text())["models"].get(Path(model).name, {}) if out.exists() else {}
        pairs.evaluate([model], {name: home for name, home in homes.items() if name not in scored}, out)
    if out.exists():
        print(pairs.sets_table(json.loads(out.read_text())))
    corpora = dict(zip(reading.CORPORA, (options.naturalstories, options.provo, options.ucl), strict=True))
    corpora = {name: home for name, home in corpora.items() if home is not None}
    if corpora:
        print(reading.table(reading.score(models, corpora, options.out / "reading.json")))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("data", type=Path)
    training.add_argument("out", type=Path)
    training.add_argument("--hours", type=float, default=3)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--set", dest="settings", action="append", default=[])
    scoring = commands.add_parser("score")
    scoring.set_defaults(run=score)
    scoring.add_argument("out", type=Path)
    scoring.add_argument("models", type=Path, nargs="*")
    for name in ("--babylm", "--naturalstories", "--provo", "--ucl"):
        scoring.add_argument(name, type=Path)
    options = parser.parse_args()
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
