"""Surprisal of words against self-paced reading times: the Natural Stories corpus (Futrell et al. 2021).

    git clone https://github.com/languageMIT/naturalstories && git -C naturalstories checkout 4700daa
    python benchmarks/reading.py naturalstories [-m books] [-m models/other] [--out benchmarks/results/reading.json]
    python benchmarks/reading.py --table benchmarks/results/reading.json     # prints the table

The corpus has ten stories of about 1,000 words and the mean time that readers spent on each word. It is not part of
xlcli, because its license is non-commercial (CC BY-NC-SA 4.0); the checksums of the files that are read are below.

Readings. Each model reads each story alone, as one text with the memory of training, and again each sentence alone. A
sentence ends at a word with . ? or !, perhaps followed by quotes, that is no title such as Mr., if the next word begins
with a capital letter or digit, perhaps after quotes. A word is what stands between white space. Its surprisal is
corrected for the blank that ends it (Pimentel and Meister 2024) or the plain sum of its tokens; of GPT-3 only the sum
is known, from the file of the corpus.

Times. The file of mean times is misaligned by one position: a time belongs to the word after the one it stands
beside. The page of the corpus reports the error, but only the file with the times of single readers was corrected. As
the file is, a time correlates with the length of the next word, which readers cannot see yet; the output has these
correlations. Results with the times as in the file are saved beside the others.

Words. Excluded are the first and the last word of a sentence, the second word of a story (GPT-3 has no prediction of
the first), and words that were shown otherwise than in the text. All rows use the same words.

Regression. Linear, of the logarithm of the mean time. The baseline has the length in characters as shown and the
logarithm of the frequency (Google Books, one added) of the word and of the word before; the gain is what the surprisals
of both add to the log likelihood of a word, in nats. Each story is predicted from the nine others (ten folds, without a
random number); the variance is estimated from these nine. `±` is the standard error over the ten stories. The second
gain has a baseline with the number of the word in the story and its logarithm as well, since readers become faster.
"""

import argparse
import csv
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from runs import machine, processor_seconds_of_commands, save, xlcli

TEXT, FREQUENCIES = "words.tsv", "freqs/freqs-1.tsv"
TIMES, GPT3 = "naturalstories_RTS/processed_wordinfo.tsv", "probs/all_stories_gpt3.csv"
CHECKSUMS = {
    TEXT: "0955415234babe7fe6890e447d96a2520175f5ea2b8eb130bd31e6aea94e4495",
    FREQUENCIES: "dfe87aa455e43226eb7f79faa6e5d9926446c3d8346014dd75837f39c3f19add",
    TIMES: "047d2a0b84eff99d90535d1517f7fa7d466b81fbd60e990f2f08caac04d8aa56",
    GPT3: "6ccee02c20a688d5f7e69a023025d725e8fb06d87e2c7f997b399384c200a0ad",
}
"""SHA-256 of the files at commit 4700daa."""
SHIFT = 1
"""The time beside word i is of word i + SHIFT."""
SENTENCE_END, SENTENCE_START = re.compile(r"[.?!]['\")]*$"), re.compile(r"['\"(]*[A-Z0-9]")
TITLES = {"Mr.", "Mrs.", "Ms.", "Dr.", "St."}
UNITS = ("story", "sentence")
KINDS = {"corrected": "bits", "naive": "naive_bits"}
"""Kind of surprisal to its column in the output of `xlcli eval --words`."""


@dataclass(frozen=True)
class Corpus:
    """All words of all stories in order; arrays (n) of one value for each word.

    Attributes:
        words: Words as in the text.
        story: Number of the story.
        number: Number of the word in its story, from 1.
        sentence: Number of the sentence, over all stories.
        frequency: Logarithm of the count in Google Books plus one; without punctuation, but for titles such as Mr.
        as_shown: Words that readers saw as in the text.
        beside: Mean time beside the word in the file, in milliseconds.
    """

    words: list[str]
    story: np.ndarray
    number: np.ndarray
    sentence: np.ndarray
    frequency: np.ndarray
    as_shown: np.ndarray
    beside: np.ndarray

    def times(self, shift: int) -> np.ndarray:
        """Mean time of each word (n) in milliseconds, not a number at the beginning of a story."""
        return np.where(self.number > shift, np.roll(self.beside, shift), np.nan)

    def included(self) -> np.ndarray:
        """Words (n) that enter the regression."""
        begins = before(self.sentence) != self.sentence
        return ~begins & ~np.roll(begins, -1) & (self.number > 2) & self.as_shown


def before(values: np.ndarray) -> np.ndarray:
    """Value of the word before (n), not a number for the first one."""
    return np.concatenate(([np.nan], values[:-1]))


def read(folder: Path) -> Corpus:
    """Reads and checks the corpus."""
    for name, checksum in CHECKSUMS.items():
        path = folder / name
        if not path.is_file():
            raise SystemExit(f"{path} is missing; clone https://github.com/languageMIT/naturalstories")
        if hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
            raise SystemExit(f"{path} differs from its version at commit 4700daa; check it out")
    words: dict[tuple[int, int], str] = {}
    for code, word in table_rows(folder / TEXT):
        if code.endswith(".whole"):
            words[place(code)] = word.replace(" ", "")
    rows = table_rows(folder / FREQUENCIES)
    counts = {place(row[0]): int(row[3]) for kind in (".whole", ".word") for row in rows if row[0].endswith(kind)}
    shown = {(int(row[2]), int(row[1])): (row[0], float(row[4])) for row in table_rows(folder / TIMES)[1:]}
    if list(words) != sorted(words) or not (words.keys() == counts.keys() == shown.keys()):
        raise SystemExit(f"the files of {folder} do not have the same words")
    return Corpus(
        words=list(words.values()),
        story=np.array([story for story, _ in words]),
        number=np.array([number for _, number in words]),
        sentence=sentences(words),
        frequency=np.log([counts[key] + 1 for key in words]),
        as_shown=np.array([shown[key][0] == word for key, word in words.items()]),
        beside=np.array([shown[key][1] for key in words]),
    )


def table_rows(path: Path) -> list[list[str]]:
    """Cells of a file with tabs and without quoting."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


def place(code: str) -> tuple[int, int]:
    """Story and number of a word from its code, such as `1.54.whole`."""
    story, number, _ = code.split(".")
    return int(story), int(number)


def sentences(words: dict[tuple[int, int], str]) -> np.ndarray:
    """Number of the sentence of each word (n)."""
    found, sentence = [], 0
    for (story, number), word in words.items():
        found.append(sentence)
        follower = words.get((story, number + 1), "A")
        ends = SENTENCE_END.search(word) and word not in TITLES and SENTENCE_START.match(follower)
        sentence += bool(ends)
    return np.array(found)


def surprisals(model: str, corpus: Corpus, unit: str, home: Path) -> dict[str, np.ndarray]:
    """Surprisal of all words in bits, corrected and naive (n), when each story or each sentence is read alone."""
    numbers = getattr(corpus, unit)
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    with (home / "items.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        writer.writerow(["text"])
        writer.writerows([" ".join(corpus.words[a:b])] for a, b in zip(first, [*first[1:], len(numbers)], strict=True))
    xlcli("eval", "items.tsv", *options_of(model), cwd=home)
    with (home / "words.tsv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, dialect="excel-tab"))
    check([row["word"] for row in rows], corpus, model)
    return {kind: np.array([float(row[column]) for row in rows]) for kind, column in KINDS.items()}


def options_of(model: str) -> list[str]:
    """Options of `xlcli eval`: texts of a table, each alone, and a table of their words."""
    reading = ["--text-field", "text", "--reset-on-document", "--words", "words.tsv", "--force", "-q"]
    return [*reading, "-m", str(Path(model).resolve()) if Path(model).is_dir() else model, "--threads", "1"]


def gpt3(folder: Path, corpus: Corpus) -> np.ndarray:
    """Sums of the surprisals of the tokens of each word in bits (n), not a number for the first word of a story."""
    words: list[str] = []
    bits: list[float] = []
    with (folder / GPT3).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["offset"] == "0" or row["token"].startswith(" "):
                words.append("")
                bits.append(0.0)
            words[-1] += row["token"].removeprefix(" ")
            bits[-1] -= (float(row["logprob"]) if row["logprob"] else np.nan) / np.log(2)
    check(words, corpus, GPT3)
    return np.array(bits)


def check(words: Sequence[str], corpus: Corpus, source: str) -> None:
    """Refuses words that are not those of the text."""
    if list(words) != corpus.words:
        wrong = next((i for i, (a, b) in enumerate(zip(words, corpus.words, strict=False)) if a != b), "the end")
        raise SystemExit(f"{source}: words differ from those of the text at {wrong}")


def evaluate(corpus: Corpus, bits: np.ndarray, shift: int) -> dict[str, object]:
    """Correlations and gains of the surprisals of all words in bits (n)."""
    use, times = corpus.included(), corpus.times(shift)
    length = np.array([len(word) for word in corpus.words], dtype=float)
    baseline = [length, corpus.frequency, before(length), before(corpus.frequency)]
    position = [corpus.number, np.log(corpus.number)]
    surprisal = [bits, before(bits)]
    found: dict[str, object] = {
        "bits_per_word": bits[use].mean(),
        "correlation": np.corrcoef(bits[use], times[use])[0, 1],
        "correlation_log": np.corrcoef(bits[use], np.log(times[use]))[0, 1],
        "correlation_log_of_word_before": np.corrcoef(before(bits)[use], np.log(times[use]))[0, 1],
    }
    for name, predictors in {"gain": baseline, "gain_with_position": baseline + position}.items():
        gains = log_likelihoods(corpus, predictors + surprisal, shift) - log_likelihoods(corpus, predictors, shift)
        by_story = [gains[corpus.story[use] == story].mean() for story in np.unique(corpus.story)]
        found[name] = {"mean": gains.mean(), "by_story": by_story}
    return found


def log_likelihoods(corpus: Corpus, predictors: Sequence[np.ndarray], shift: int) -> np.ndarray:
    """Log likelihood in nats of the logarithm of the time of each word that enters, from the other stories."""
    use = corpus.included()
    x = np.stack([np.ones(use.sum()), *(values[use] for values in predictors)], axis=1)
    y, story = np.log(corpus.times(shift)[use]), corpus.story[use]
    found = np.empty(len(y))
    for held_out in np.unique(story):
        fit, test = story != held_out, story == held_out
        weights, *_ = np.linalg.lstsq(x[fit], y[fit], rcond=None)
        variance = np.mean((y[fit] - x[fit] @ weights) ** 2)
        found[test] = -0.5 * (np.log(2 * np.pi * variance) + (y[test] - x[test] @ weights) ** 2 / variance)
    return found


def alignment(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Correlation of the log time of a word with the lengths of the words around it, by shift of the times."""
    use = corpus.included()
    length = np.array([len(word) for word in corpus.words], dtype=float)
    around = {"second before": before(before(length)), "before": before(length), "own": length}
    around["next"] = np.append(length[1:], np.nan)
    return {
        str(shift): {
            name: np.corrcoef(values[use], np.log(corpus.times(shift)[use]))[0, 1] for name, values in around.items()
        }
        for shift in (0, SHIFT)
    }


def rounded(value: object) -> object:
    """Numbers of a result with six digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(float(value), 6) if isinstance(value, float) else value


def with_error(by_story: Sequence[float], mean: float) -> str:
    """A gain in thousandths of a nat with its standard error over stories."""
    return f"{1000 * mean:.2f} ± {1000 * np.std(by_story, ddof=1) / len(by_story) ** 0.5:.2f}"


def table(result: dict) -> str:
    """Markdown table: a row for each surprisal, with the difference of its gain from the first row's."""
    lines = [
        f"{result['words']['included']:,} of {result['words']['all']:,} words; gains in 0.001 nats per word",
        "",
        "| model | reads alone | surprisal | bits per word | r, time | r, log time "
        "| gain | difference from first row | gain beside position |",
        "|---" * 9 + "|",
    ]
    first = result["rows"][0]["gain"]
    for row in result["rows"]:
        gain, position = row["gain"], row["gain_with_position"]
        differences = np.subtract(gain["by_story"], first["by_story"])
        is_first = row is result["rows"][0]
        cells = [
            *(row["model"], row["alone"], row["surprisal"], f"{row['bits_per_word']:.2f}"),
            *(f"{row['correlation']:.3f}", f"{row['correlation_log']:.3f}"),
            with_error(gain["by_story"], gain["mean"]),
            "–" if is_first else with_error(differences, gain["mean"] - first["mean"]),
            with_error(position["by_story"], position["mean"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("-m", "--model", action="append")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reading.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.corpus is None:
        parser.error("name the folder of the corpus")
    corpus = read(options.corpus)
    models = options.model or ["books"]
    result: dict = {
        "machine": machine(),
        "command": " ".join(["benchmarks/reading.py naturalstories", *(f"-m {model}" for model in models)]),
        "words": {
            "all": len(corpus.words),
            "sentences": int(corpus.sentence[-1]) + 1,
            "shown_otherwise": int((~corpus.as_shown).sum()),
            "included": int(corpus.included().sum()),
        },
        "correlation_of_time_with_lengths": alignment(corpus),
        "rows": [],
    }

    def add(bits: np.ndarray, row: dict[str, object]) -> None:
        in_file = evaluate(corpus, bits, 0)
        result["rows"].append(row | evaluate(corpus, bits, SHIFT) | {"times_as_in_the_file": in_file})

    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for unit in UNITS:
                start, spent = time.perf_counter(), processor_seconds_of_commands()
                found = surprisals(model, corpus, unit, Path(folder))
                seconds = round(time.perf_counter() - start, 1)
                spent = round(processor_seconds_of_commands() - spent, 1)
                for kind, bits in found.items():
                    row = {"model": Path(model).name, "alone": unit, "surprisal": kind}
                    add(bits, row | {"seconds": seconds, "processor_seconds": spent})
                print(model, unit, seconds, "s", flush=True)
    add(gpt3(options.corpus, corpus), {"model": "GPT-3 davinci", "alone": "story", "surprisal": "naive"})
    save(options.out, rounded(result))
    print(json.dumps(rounded(result["words"] | result["correlation_of_time_with_lengths"]), indent=1))
    print(table(result))


if __name__ == "__main__":
    main()
