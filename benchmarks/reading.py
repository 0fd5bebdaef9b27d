"""Surprisal of words against reading times of three corpora.

    git clone https://github.com/languageMIT/naturalstories && git -C naturalstories checkout 4700daa
    python benchmarks/reading.py [naturalstories] [--provo FOLDER] [--ucl FILE] [-m books] [-m models/other]
    python benchmarks/reading.py --table benchmarks/results/reading.json     # prints the tables
    python benchmarks/reading.py --table benchmarks/results/reading.json --baseline words    # without numbers of tokens

Corpora. None is part of xlcli; the checksums of the files that are read are below.

- Natural Stories (Futrell et al. 2021, CC BY-NC-SA 4.0): ten stories of about 1,000 words and the mean time of
  self-paced reading of each word.
- Provo (Luke and Christianson 2018): 55 texts of 50 words and eye movements of 84 readers. FOLDER has the texts and
  frequencies of github.com/wilcoxeg/MoTR (`experiments/provo/data`, `provo_items.tsv` and `provo_stats.csv`) and the
  means over readers of github.com/SPOClab-ca/cmcl-shared-task (`data/provo.csv`), which are standardized.
- UCL (Frank et al. 2013): 205 sentences of novels, self-paced reading and eye movements. FILE is `reading_data.csv`
  of BabyLM's evaluation data (De Varda et al. 2023), with frequencies of subtitles.

Readings. Each model reads each story or text alone, as one text with the memory of training or each of `--contexts`,
and again each sentence alone. A sentence ends at a word with . ? or !, perhaps followed by quotes, that is no title
such as Mr., if the next word begins with a capital letter or digit, perhaps after quotes. A word is what stands
between white space. Its surprisal is corrected for the blank that ends it (Pimentel and Meister 2024) or the plain
sum of its tokens; of GPT-3 only the sum is known, from the file of Natural Stories.

Times. The file of mean times of Natural Stories is misaligned by one position: a time belongs to the word after the
one it stands beside. The page of the corpus reports the error, but only the file with the times of single readers
was corrected. As the file is, a time correlates with the length of the next word, which readers cannot see yet; the
output has these correlations. Results with the times as in the file are saved beside the others. The means of Provo
lack 94 words, most of them the first of a text; words and means are matched in order. A mean of eye movements counts
0 for readers who skipped the word.

Words. Excluded are the first and the last word of a sentence, the second word of a story (GPT-3 has no prediction of
the first), words that were shown otherwise than in the text, and words without a time or frequency. All rows of a
corpus use the same words.

Regression. Linear, of the logarithm of the mean time of self-paced reading, or of the mean time of an eye movement.
The baseline has the length in characters as shown, the logarithm of the frequency (Natural Stories: Google Books,
one added) and the numbers of tokens in the vocabularies of all models that are compared, of the word and of the word
before. A word of many tokens is long, rare or has a mark, and readers are slow at it; without these numbers the gain
of a surprisal has this effect, too. The gain is what the surprisals of both words add to the log likelihood of a
word, in nats. Each tenth of the texts is predicted from the nine others (ten folds, without a random number): of
Natural Stories each story. The variance is estimated from these nine. `±` is the standard error over the ten folds;
a 95 % interval reaches 2.26 of them to both sides. The second gain has a baseline with the number of the word in the
story and its logarithm as well, since readers become faster.

The baseline `words` has no numbers of tokens. Rows named `number of tokens` have these numbers in place of a surprisal.
"""

import argparse
import csv
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
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
"""SHA-256 of the files of Natural Stories at commit 4700daa."""
PROVO_TEXT, PROVO_FREQUENCIES, PROVO_TIMES = "provo_items.tsv", "provo_stats.csv", "provo.csv"
PROVO_CHECKSUMS = {
    PROVO_TEXT: "c5171c1dc1ddb77324686b94f0efde4042438c9a2f455230e6646559a3d69068",
    PROVO_FREQUENCIES: "a85437a2e25e870c5e19a76b9c6bb0cec5f14c1d4189174d12eac00e9254f841",
    PROVO_TIMES: "9bb4c367c8eb95b684065a069e1dd0a21430f5eded0fc20fa6676056cb0e93e4",
}
"""SHA-256 of the files at commits bee2685 of MoTR and 19d7af0 of cmcl-shared-task."""
UCL_CHECKSUM = "45204bc7ccfb10bdb6140797b5e60e83e9a85cc62d195a84ad4566cb429f0065"
SHIFT = 1
"""The time of Natural Stories beside word i is of word i + SHIFT."""
SENTENCE_END, SENTENCE_START = re.compile(r"[.?!]['\")]*$"), re.compile(r"['\"(]*[A-Z0-9]")
TITLES = {"Mr.", "Mrs.", "Ms.", "Dr.", "St."}
KINDS = {"corrected": "bits", "naive": "naive_bits"}
"""Kind of surprisal to its column in the output of `xlcli eval --words`."""
N_FOLDS = 10
BASELINES = ("tokens", "words")
"""Baselines with and without numbers of tokens; `with position` has the place in the story as well."""
WITH_POSITION = " with position"
AS_TRAINED = "as trained"
UNITS = ("story", "sentence")
GPT3_NAME = "GPT-3 davinci"
SELF_PACED, AS_IN_THE_FILE = "self-paced reading", "self-paced reading, times as in the file"


@dataclass(frozen=True)
class Measure:
    """Mean time of each word (n), not a number where there is none; `log` if the regression takes its logarithm."""

    times: np.ndarray
    log: bool = True

    def response(self) -> np.ndarray:
        """What the regression predicts (n)."""
        return np.log(self.times) if self.log else self.times


@dataclass(frozen=True)
class Reading:
    """What a model says of all words: bits by kind of surprisal (n), and how many of its tokens they have (n)."""

    bits: Mapping[str, np.ndarray]
    tokens: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """All words of all stories in order; arrays (n) of one value for each word.

    Attributes:
        words: Words as in the text.
        story: Number of the story.
        number: Number of the word in its story, from 1.
        sentence: Number of the sentence, over all stories.
        frequency: Logarithm of the count in other text, not a number where it is not known.
        as_shown: Words that readers saw as in the text.
        measures: Times of the words by what was measured.
    """

    words: list[str]
    story: np.ndarray
    number: np.ndarray
    sentence: np.ndarray
    frequency: np.ndarray
    as_shown: np.ndarray
    measures: Mapping[str, Measure]

    def included(self) -> np.ndarray:
        """Words (n) that enter the regression."""
        begins = before(self.sentence) != self.sentence
        inside = ~begins & ~np.roll(begins, -1) & (self.number > 2) & self.as_shown
        known = [self.frequency, before(self.frequency), *(measure.times for measure in self.measures.values())]
        return inside & np.all(np.isfinite(known), axis=0)

    def folds(self) -> np.ndarray:
        """Number of the fold (n)."""
        return (self.story - 1) % N_FOLDS

    def units(self) -> dict[str, np.ndarray]:
        """What a model reads alone: name to the number of each word's (n)."""
        if np.array_equal(self.story, self.sentence):
            return {"sentence": self.sentence}
        return {"story": self.story, "sentence": self.sentence}


def before(values: np.ndarray) -> np.ndarray:
    """Value of the word before (n), not a number for the first one."""
    return np.concatenate(([np.nan], values[:-1]))


def verify(folder: Path, checksums: Mapping[str, str]) -> None:
    """Refuses files that are missing or differ."""
    for name, checksum in checksums.items():
        path = folder / name
        if not path.is_file():
            raise SystemExit(f"{path} is missing; see `python benchmarks/reading.py --help`")
        if hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
            raise SystemExit(f"{path} differs from the version that this script reads")


def natural_stories(folder: Path) -> Corpus:
    """Reads and checks the corpus; the frequency is without punctuation, but for titles such as Mr."""
    verify(folder, CHECKSUMS)
    words: dict[tuple[int, int], str] = {}
    for code, word in table_rows(folder / TEXT):
        if code.endswith(".whole"):
            words[place(code)] = word.replace(" ", "")
    rows = table_rows(folder / FREQUENCIES)
    counts = {place(row[0]): int(row[3]) for kind in (".whole", ".word") for row in rows if row[0].endswith(kind)}
    shown = {(int(row[2]), int(row[1])): (row[0], float(row[4])) for row in table_rows(folder / TIMES)[1:]}
    if list(words) != sorted(words) or not (words.keys() == counts.keys() == shown.keys()):
        raise SystemExit(f"the files of {folder} do not have the same words")
    number = np.array([number for _, number in words])
    beside = np.array([shown[key][1] for key in words])
    moved = np.where(number > SHIFT, np.roll(beside, SHIFT), np.nan)
    return Corpus(
        words=list(words.values()),
        story=np.array([story for story, _ in words]),
        number=number,
        sentence=sentences(words),
        frequency=np.log([counts[key] + 1 for key in words]),
        as_shown=np.array([shown[key][0] == word for key, word in words.items()]),
        measures={SELF_PACED: Measure(moved), AS_IN_THE_FILE: Measure(beside)},
    )


def provo(folder: Path) -> Corpus:
    """Reads the texts and brings the means of eye movements and the frequencies to their words."""
    verify(folder, PROVO_CHECKSUMS)
    texts = csv.DictReader((folder / PROVO_TEXT).read_text(encoding="utf-8").splitlines(), dialect="excel-tab")
    words = {
        (int(row["item_id"]), number): word for row in texts for number, word in enumerate(row["text"].split(), start=1)
    }
    frequencies = {form(row["word"]): float(row["freq"]) for row in comma_rows(folder / PROVO_FREQUENCIES)}
    means = comma_rows(folder / PROVO_TIMES)
    forms = [form(word) for word in words.values()]
    matcher = SequenceMatcher(None, forms, [form(row["word"]) for row in means], autojunk=False)
    measures = {name: np.full(len(words), np.nan) for name in ("first fixation", "go-past")}
    for at, row, n in matcher.get_matching_blocks():
        for name, column in {"first fixation": "FFD", "go-past": "GPT"}.items():
            measures[name][at : at + n] = [float(means[row + i][column]) for i in range(n)]
    return Corpus(
        words=list(words.values()),
        story=np.array([story for story, _ in words]),
        number=np.array([number for _, number in words]),
        sentence=sentences(words),
        frequency=np.array([frequencies.get(each, np.nan) for each in forms]),
        as_shown=np.ones(len(words), dtype=bool),
        measures={name: Measure(times, log=False) for name, times in measures.items()},
    )


def ucl(path: Path) -> Corpus:
    """Reads the sentences and the times of their words; the first word of a sentence has none."""
    verify(path.parent, {path.name: UCL_CHECKSUM})
    texts: dict[int, list[str]] = {}
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in comma_rows(path):
        sentence, number = int(row["sent_id"]), int(row["context_length"]) + 1
        texts[sentence] = row["sentence"].split()
        found[sentence, number] = row
        if form(texts[sentence][number - 1]) != form(row["word"]):
            raise SystemExit(f"{path}: {row['word']} is not word {number} of sentence {sentence}")
    words = {(s, n): word for s in sorted(texts) for n, word in enumerate(texts[s], start=1)}

    def column(name: str) -> np.ndarray:
        return np.array([float(found[key][name] or "nan") if key in found else np.nan for key in words])

    story = np.array([sentence for sentence, _ in words])
    return Corpus(
        words=list(words.values()),
        story=story,
        number=np.array([number for _, number in words]),
        sentence=story,
        frequency=column("Subtlex_log10"),
        as_shown=np.ones(len(words), dtype=bool),
        measures={
            SELF_PACED: Measure(column("self_paced_reading_time")),
            "first pass": Measure(column("RTfirstpass"), log=False),
            "go-past": Measure(column("RTgopast"), log=False),
        },
    )


CORPORA = {"Natural Stories": natural_stories, "Provo": provo, "UCL": ucl}


def form(word: str) -> str:
    """A word without marks but apostrophes, in lower case."""
    return re.sub(r"[^\w']", "", word).strip("'").lower()


def comma_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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


def read(
    model: str, corpus: Corpus, numbers: np.ndarray, context: str, home: Path, temperatures: Sequence[str] = ()
) -> Reading:
    """What a model says with a context of `CONTEXTS` when the words of each number (n) are a text.

    The bits at each temperature are a further kind of surprisal.
    """
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    with (home / "items.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
        writer.writerow(["text"])
        writer.writerows([" ".join(corpus.words[a:b])] for a, b in zip(first, [*first[1:], len(numbers)], strict=True))
    options, kinds = options_of(model, context), dict(KINDS)
    if temperatures:
        options += ["--columns", f"temperature={','.join(temperatures)}"]
        kinds |= {f"corrected, T = {each}": f"temperature_{each}" for each in temperatures}
    xlcli("eval", "items.tsv", *options, cwd=home)
    with (home / "words.tsv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, dialect="excel-tab"))
    check([row["word"] for row in rows], corpus, model)
    bits = {kind: np.array([float(row[column]) for row in rows]) for kind, column in kinds.items()}
    return Reading(bits, np.array([float(row["tokens"]) for row in rows]))


CONTEXTS: dict[str, list[str]] = {
    AS_TRAINED: ["--reset-on-document"],
    "N": ["--reset-on-document", "--mem-len", "N"],
    "strict N": ["--reset-on-document", "--context", "N"],
    "cache": ["--context-cache", "100k"],
    "adapting": ["--adapt"],
    "both": ["--adapt", "--context-cache", "100k"],
}
"""Options of a context by its name, in which N is a number of tokens: a memory, exactly the tokens before, or learning
from the texts before, which are read in their order."""


def options_of(model: str, context: str) -> list[str]:
    """Options of `xlcli eval`: texts of a table, and a table of their words."""
    number = "".join(filter(str.isdigit, context))
    name = context.replace(number, "N") if number else context
    options = ["--text-field", "text", "--words", "words.tsv", "-q", "--threads", "1"]
    options += [word.replace("N", number) if word == "N" else word for word in CONTEXTS[name]]
    return [*options, "-m", str(Path(model).resolve()) if Path(model).is_dir() else model]


def gpt3(folder: Path, corpus: Corpus) -> Reading:
    """Sums of the surprisals of the tokens of each word, not a number for the first word of a story."""
    words: list[str] = []
    bits: list[float] = []
    tokens: list[float] = []
    with (folder / GPT3).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["offset"] == "0" or row["token"].startswith(" "):
                words.append("")
                bits.append(0.0)
                tokens.append(0.0)
            words[-1] += row["token"].removeprefix(" ")
            bits[-1] -= (float(row["logprob"]) if row["logprob"] else np.nan) / np.log(2)
            tokens[-1] += 1
    check(words, corpus, GPT3)
    return Reading({"naive": np.array(bits)}, np.array(tokens))


def check(words: Sequence[str], corpus: Corpus, source: str) -> None:
    """Refuses words that are not those of the text."""
    if list(words) != corpus.words:
        wrong = next((i for i, (a, b) in enumerate(zip(words, corpus.words, strict=False)) if a != b), "the end")
        raise SystemExit(f"{source}: words differ from those of the text at {wrong}")


def evaluate(
    corpus: Corpus, values: np.ndarray, measure: Measure, baselines: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, object]:
    """Correlations of a value of each word (n) with its time, and what it and the value before gain over baselines."""
    use, times, response = corpus.included(), measure.times, measure.response()
    folds = corpus.folds()[use]
    gains = {}
    for name, baseline in baselines.items():
        without = log_likelihoods(corpus, baseline, response)
        gain = log_likelihoods(corpus, [*baseline, values, before(values)], response) - without
        gains[name] = {"mean": gain.mean(), "by_fold": [gain[folds == fold].mean() for fold in np.unique(folds)]}
    return {
        "correlation": np.corrcoef(values[use], times[use])[0, 1],
        "correlation_response": np.corrcoef(values[use], response[use])[0, 1],
        "correlation_response_of_word_before": np.corrcoef(before(values)[use], response[use])[0, 1],
        "gains": gains,
    }


def baselines_of(corpus: Corpus, counts: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Predictors (n) of each baseline, with these numbers of tokens (n)."""
    length = np.array([len(word) for word in corpus.words], dtype=float)
    words = [length, corpus.frequency, before(length), before(corpus.frequency)]
    tokens = [*words, *counts, *map(before, counts)]
    position = [corpus.number, np.log(corpus.number)]
    found = {"tokens": tokens, "words": words}
    return found | {name + WITH_POSITION: baseline + position for name, baseline in found.items()}


def log_likelihoods(corpus: Corpus, predictors: Sequence[np.ndarray], response: np.ndarray) -> np.ndarray:
    """Log likelihood in nats of the response of each word that enters, from the words of the other folds."""
    use = corpus.included()
    x = np.stack([np.ones(use.sum()), *(values[use] for values in predictors)], axis=1)
    y, folds = response[use], corpus.folds()[use]
    found = np.empty(len(y))
    for held_out in np.unique(folds):
        fit, test = folds != held_out, folds == held_out
        weights, *_ = np.linalg.lstsq(x[fit], y[fit], rcond=None)
        variance = np.mean((y[fit] - x[fit] @ weights) ** 2)
        found[test] = -0.5 * (np.log(2 * np.pi * variance) + (y[test] - x[test] @ weights) ** 2 / variance)
    return found


def alignment(corpus: Corpus) -> dict[str, dict[str, float]]:
    """Correlation of the response of a word with the lengths of the words around it, by measure."""
    use = corpus.included()
    length = np.array([len(word) for word in corpus.words], dtype=float)
    around = {"second before": before(before(length)), "before": before(length), "own": length}
    around["next"] = np.append(length[1:], np.nan)
    return {
        name: {where: np.corrcoef(values[use], measure.response()[use])[0, 1] for where, values in around.items()}
        for name, measure in corpus.measures.items()
    }


def rounded(value: object) -> object:
    """Numbers of a result with six digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(float(value), 6) if isinstance(value, float) else value


def with_error(by_fold: Sequence[float], mean: float) -> str:
    """A gain in thousandths of a nat with its standard error over folds."""
    return f"{1000 * mean:.2f} ± {1000 * np.std(by_fold, ddof=1) / len(by_fold) ** 0.5:.2f}"


def table(result: dict, baseline: str = BASELINES[0]) -> str:
    """Markdown table for each measure of each corpus."""
    parts = []
    for name, found in result.items():
        words = found["words"]
        parts.append(f"{name}: {words['included']:,} of {words['all']:,} words; gains in 0.001 nats per word")
        measures = (measure for measure in found["correlation_with_lengths"] if measure != AS_IN_THE_FILE)
        parts += [f"{measure}:\n\n{table_of_measure(found['rows'], measure, baseline)}" for measure in measures]
    return "\n\n".join(parts)


def table_of_measure(rows: list[dict], measure: str, baseline: str) -> str:
    """A row for each surprisal that has a gain over the baseline of the first row, with the difference from it."""
    lines = [
        "| model | memory | reads alone | surprisal | bits per word | r, time | r, response "
        "| gain | difference from first row | gain beside position |",
        "|---" * 10 + "|",
    ]
    first = rows[0]["measures"][measure]["gains"][baseline]
    for row in rows:
        is_comparable = baseline == "words" or row["vocabularies"] == rows[0]["vocabularies"]
        if not is_comparable:
            continue
        found = row["measures"][measure]
        gain, position = found["gains"][baseline], found["gains"][baseline + WITH_POSITION]
        differences = np.subtract(gain["by_fold"], first["by_fold"])
        cells = [
            *(row["model"], str(row["memory"]), row["alone"], row["surprisal"]),
            f"{row['bits_per_word']:.2f}" if row["bits_per_word"] else "–",
            *(f"{found['correlation']:.3f}", f"{found['correlation_response']:.3f}"),
            with_error(gain["by_fold"], gain["mean"]),
            "–" if row is rows[0] else with_error(differences, gain["mean"] - first["mean"]),
            with_error(position["by_fold"], position["mean"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows_of(corpus: Corpus, readings: Sequence[tuple[dict[str, object], Reading]]) -> list[dict[str, object]]:
    """Results of readings and what they are, by kind of surprisal; then those of numbers of tokens alone."""
    counts = {about["model"]: reading.tokens for about, reading in readings}
    baselines = baselines_of(corpus, list(counts.values()))
    without = {name: predictors for name, predictors in baselines.items() if name.startswith("words")}
    used = corpus.included()
    rows = []
    for about, reading in readings:
        for kind, bits in reading.bits.items():
            found = {name: evaluate(corpus, bits, measure, baselines) for name, measure in corpus.measures.items()}
            known = {"surprisal": kind, "vocabularies": sorted(counts), "bits_per_word": bits[used].mean()}
            rows.append(about | known | {"measures": found})
    for model, tokens in counts.items():
        found = {name: evaluate(corpus, tokens, measure, without) for name, measure in corpus.measures.items()}
        about = {"model": model, "memory": "–", "alone": "–", "surprisal": "number of tokens"}
        rows.append(about | {"vocabularies": [], "bits_per_word": None, "measures": found})
    return rows


def readings_of(
    model: str, corpus: Corpus, contexts: Sequence[str], temperatures: Sequence[str], units: Sequence[str]
) -> list[tuple[dict[str, object], Reading]]:
    """What a model says of a corpus, with what it is, by what it reads alone and by its context."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for unit, numbers in corpus.units().items():
            if unit not in units:
                continue
            for context in contexts:
                start, spent = time.perf_counter(), processor_seconds_of_commands()
                reading = read(model, corpus, numbers, context, Path(folder), temperatures)
                about: dict[str, object] = {
                    "model": Path(model).name,
                    "memory": int(context) if context.isdigit() else context,
                    "alone": unit,
                    "seconds": round(time.perf_counter() - start, 1),
                    "processor_seconds": round(processor_seconds_of_commands() - spent, 1),
                }
                found.append((about, reading))
    return found


def score(
    models: Sequence[str],
    homes: Mapping[str, Path],
    out: Path,
    contexts: Sequence[str] = (AS_TRAINED,),
    temperatures: Sequence[str] = (),
    units: Sequence[str] = UNITS,
) -> dict:
    """Scores models on corpora, saves the results of each corpus at once and returns all that `out` has.

    Rows of other models and contexts stay there, below the new ones.
    """
    result = json.loads(out.read_text()) if out.exists() else {}
    for name, home in homes.items():
        corpus = CORPORA[name](home)
        readings = [each for model in models for each in readings_of(model, corpus, contexts, temperatures, units)]
        if name == "Natural Stories":
            readings.append(({"model": GPT3_NAME, "memory": AS_TRAINED, "alone": "story"}, gpt3(home, corpus)))
        rows = rows_of(corpus, readings)
        again = {(row["model"], row["memory"]) for row in rows}
        earlier = result.get(name, {"rows": []})["rows"]
        rows += [row for row in earlier if (row["model"], row["memory"]) not in again]
        options = [*(f"-m {model}" for model in models), *(f"--contexts {name!r}" for name in contexts)]
        options += [f"--temperatures {each}" for each in temperatures]
        if units != UNITS:
            options += ["--alone", *units]
        result[name] = rounded(
            {
                "machine": machine(),
                "command": " ".join(["benchmarks/reading.py", *options]),
                "words": {
                    "all": len(corpus.words),
                    "sentences": len(np.unique(corpus.sentence)),
                    "shown_otherwise": int((~corpus.as_shown).sum()),
                    "included": int(corpus.included().sum()),
                },
                "correlation_with_lengths": alignment(corpus),
                "rows": rows,
            }
        )
        save(out, result)
        print(name, "scored", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("naturalstories", type=Path, nargs="?")
    parser.add_argument("--provo", type=Path)
    parser.add_argument("--ucl", type=Path)
    parser.add_argument("-m", "--model", action="append")
    parser.add_argument("--contexts", nargs="+", default=[AS_TRAINED], help=f"of {', '.join(CONTEXTS)}")
    parser.add_argument("--alone", nargs="+", choices=UNITS, default=UNITS, help="what is read alone")
    parser.add_argument("--temperatures", nargs="+", default=[], help="also bits at these temperatures, such as 2")
    parser.add_argument("--baseline", choices=BASELINES, default=BASELINES[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reading.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text()), options.baseline))
        return
    homes = dict(zip(CORPORA, (options.naturalstories, options.provo, options.ucl), strict=True))
    homes = {name: home for name, home in homes.items() if home is not None}
    if not homes:
        parser.error("name the folder of Natural Stories, or the files of another corpus")
    found = score(options.model or ["books"], homes, options.out, options.contexts, options.temperatures, options.alone)
    print(table(found, options.baseline))


if __name__ == "__main__":
    main()
