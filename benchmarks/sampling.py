"""Figures of sampled text beside the same figures of real books, for a grid of sampling settings.

    python benchmarks/sampling.py --model books --valid books/valid --train books/train books-more/train
        [--reference FOLDER ...] [--prompts 100] [--prompt-tokens 64] [--tokens 200]
        [--settings "temperature=0.9 top_p=0.95" ...]
        [--threads 1] [--seed 0] [--out benchmarks/results/sampling.json]

Prompts are passages of `--prompt-tokens` tokens (64 are about 40 words) of books that the model has not read,
`--valid`: each ends with the first sentence that ends after one of `--prompts` evenly spaced positions of the text. A
passage is continued by `--tokens` tokens; sample i has the seed `--seed` + i in every setting. The row `books` is the
real continuation.
Defaults are chosen with these figures on validation books, never on test books.

A word is a run of letters, apostrophes between letters included, in lower case, without a final 's; an unfinished last
word is left out. For every figure but the surprisal, a real continuation has as many words as the samples of its
passage on average. All shares are pooled over passages; `error` is the standard error by bootstrap over passages.

    repeated      share of words that are one of the four words before them
    unknown       share of words in no reference text: those of `--train` and `--reference`, and the validation books
                  without the real continuation of the passage (the prompt is part of them)
    overlap       share of runs of four words that occur in the text of `--train`, which the model has read
    repeated4     share of runs of four words that occur earlier in the same continuation
    distinct      distinct words over words
    sentences     share of sentences that end within 60 words, of those that begin at least 60 words before the end
    loops         share of continuations with 30 marks in a row, such as underscores and quotes, and no letter or digit
    bits_per_byte surprisal under the model itself (temperature 1), all `--tokens` tokens
"""

import argparse
import gzip
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from runs import machine

import xlcli
from xlcli.api import Model
from xlcli.config import GenerateConfig
from xlcli.inference import InferenceSession
from xlcli.online import make_scorer
from xlcli.sampling import SampleRNG, sample_tokens

MARGIN = 4000
"""Minimum number of characters between a passage and the beginning and end of its book."""
SENTENCE_WORDS = 60
BATCH_SIZE = 50
SHARES = ("repeated", "unknown", "overlap", "repeated4", "distinct", "sentences", "loops", "bits_per_byte")

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?][\"'”’)_]*(?=\s+[\"'“‘(_—-]*[A-Z]|\s*\Z)"
)
LOOP = re.compile(r"(?:(?:[^\w\s]|_)\s*){30}")

GRID = [
    *({"temperature": t, "top_p": p, "repetition_penalty": r}
      for t, p, r in itertools.product((0.7, 0.8, 0.9, 1.0), (1.0, 0.95, 0.9), (1.0, 1.1))),
    *({"temperature": t, "min_p": p} for t, p in itertools.product((0.9, 1.0, 1.2), (0.02, 0.05, 0.1))),
    *({"temperature": 1.0, "min_p": 0.05, "repetition_penalty": r} for r in (1.05, 1.1, 1.2)),
    *({"temperature": 0.9, "top_p": 0.95, "repetition_penalty": r} for r in (1.05, 1.2)),
    *({"temperature": t, "top_k": 50} for t in (0.8, 1.0)),
]  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """Tokens of a prompt, the real text after it, and its first tokens."""

    prompt: list[int]
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Continuation:
    """A text and its surprisal in bits per token."""

    text: str
    bits: list[float]


def read_books(folders: Iterable[Path]) -> Iterator[str]:
    """The text of each book (`.txt`, `.txt.gz`) of the folders."""
    for folder in folders:
        for path in sorted(folder.glob("*.txt*")):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield data.decode()


def words_of(text: str) -> list[str]:
    """Words of a text in lower case."""
    return WORD.findall(re.sub(r"'s\b", " ", text.lower().replace("’", "'")))


def make_passages(books: Sequence[str], tokenizer, count: int, n_prompt: int, n_tokens: int) -> list[Passage]:
    """Passages after evenly spaced positions of the books, which count as one text."""
    ends = np.cumsum([len(book) for book in books])
    passages = []
    for place in ((i + 0.5) * ends[-1] / count for i in range(count)):
        i = int(np.searchsorted(ends, place, side="right"))
        book = books[i]
        start = min(max(int(place - ends[i]) + len(book), MARGIN), len(book) - 2 * MARGIN)
        end = SENTENCE_END.search(book, start).end()
        end += book.startswith("\n", end)  # no token crosses the end of a line
        before = book[book.index(" ", end - MARGIN // 2) : end]
        after = book[end : end + MARGIN]
        prompt = tokenizer.encode(before.encode())[-n_prompt:].tolist()
        passages.append(Passage(prompt, after, tokenizer.encode(after.encode())[:n_tokens].tolist()))
    return passages


class Reference:
    """Words of all reference texts and runs of four words of the training text.

    Attributes:
        vocabulary: Number of each word of training text and further reference texts.
        valid: Count of each word of the validation books.
        runs: Sorted hashes of the runs of four words of the training text, one for each place.
    """

    def __init__(self, train: list[Path], more: list[Path], valid: Sequence[str]) -> None:
        self.vocabulary: dict[str, int] = {}
        self.runs = np.concatenate([self._hash_runs(self._number(words_of(text))) for text in read_books(train)])
        self.runs.sort()
        for text in read_books(more):
            self._number(words_of(text))
        self.valid = Counter(word for text in valid for word in words_of(text))

    def _number(self, words: Sequence[str]) -> NDArray[np.uint64]:
        known = self.vocabulary
        return np.fromiter((known.setdefault(word, len(known)) for word in words), np.uint64, len(words))

    @staticmethod
    def _hash_runs(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Polynomial hash modulo 2^64 of each run of four."""
        hashes = np.zeros(max(len(numbers) - 3, 0), np.uint64)
        for i in range(4):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + numbers[i : i + len(hashes)]
        return hashes

    def n_unknown(self, words: Sequence[str], left_out: Sequence[str]) -> int:
        """Number of words in no reference text; `left_out` is the part of the validation books that is none."""
        own = Counter(left_out)
        return sum(word not in self.vocabulary and self.valid[word] <= own[word] for word in words)

    def n_known_runs(self, words: Sequence[str]) -> int:
        """Number of runs of four words that occur in the training text."""
        numbers = np.array([self.vocabulary.get(word, 2**40) for word in words], np.uint64)
        hashes = self._hash_runs(numbers)
        places = np.minimum(np.searchsorted(self.runs, hashes), len(self.runs) - 1)
        return int((self.runs[places] == hashes).sum())


def generate(model: Model, passages: Sequence[Passage], n_tokens: int, options, seed: int) -> list[Continuation]:
    """Continuations of all passages, in batches; the real ones if `options` is None."""
    found = []
    for first in range(0, len(passages), BATCH_SIZE):
        found += generate_batch(model, passages[first : first + BATCH_SIZE], n_tokens, options, seed + first)
    return found


def generate_batch(model: Model, passages, n_tokens: int, options, seed: int) -> list[Continuation]:
    """Continuations of passages (b), whose prompts all have the same length. The seed of row i is `seed + i`."""
    loaded, runtime = model.loaded, model.runtime
    train, tokenizer = loaded.config.train, loaded.tokenizer
    state = loaded.network.init_state(len(passages), mem_len=train.mem_len, segment_len=train.segment_len)
    settings = options or GenerateConfig()
    reader = make_scorer(loaded.network, loaded.tokenizer, settings)
    session = InferenceSession(loaded, runtime, settings, reader, state, [passage.prompt[-1] for passage in passages])
    tokens = torch.tensor([[tokenizer.start_id, *passage.prompt[:-1]] for passage in passages])
    with torch.inference_mode(), runtime.autocast():
        _, session.state = loaded.network.logits(tokens, state)
    rngs = [SampleRNG(seed + i, passage.prompt) for i, passage in enumerate(passages)]
    ids: list[list[int]] = [[] for _ in passages]
    bits: list[list[float]] = [[] for _ in passages]
    for t in range(n_tokens):
        logits = session.predict()
        real = [passage.tokens[t] for passage in passages]
        session.last_tokens = (
            real if options is None else sample_tokens(logits, rngs, settings.sampling("sentencepiece"))
        )
        surprisal = -logits.double().log_softmax(-1) / np.log(2)
        for row, token in enumerate(session.last_tokens):
            ids[row].append(token)
            bits[row].append(surprisal[row, token].item())
    texts = (tokenizer.decode(row).decode("utf-8", "replace") for row in ids)
    return [Continuation(text, row) for text, row in zip(texts, bits, strict=True)]


def sampled_words(text: str) -> list[str]:
    """Words of a sample without an unfinished last word."""
    return words_of(text.rstrip("'’") if not text[-1:].isalpha() else text.rpartition(" ")[0])


def counts(words: list[str], text: str, reference: Reference, left_out: list[str]) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of every share of a continuation but its surprisal."""
    runs = list(zip(*(words[i:] for i in range(4)), strict=False))
    repeated = sum(word in words[max(0, i - 4) : i] for i, word in enumerate(words))
    begun, ended = sentence_counts(text)
    return {
        "repeated": (repeated, len(words)),
        "unknown": (reference.n_unknown(words, left_out), len(words)),
        "overlap": (reference.n_known_runs(words), len(runs)),
        "repeated4": (len(runs) - len(set(runs)), len(runs)),
        "distinct": (len(set(words)), len(words)),
        "sentences": (ended, begun),
        "loops": (bool(LOOP.search(text)), 1),
    }


def sentence_counts(text: str) -> tuple[int, int]:
    """Number of sentences that begin at least `SENTENCE_WORDS` words before the end, and of those that end in time."""
    lengths, start = [], 0
    for match in SENTENCE_END.finditer(text):
        lengths.append(len(text[start : match.end()].split()))
        start = match.end()
    left = len(text[start:].split())
    begun = ended = 0
    for i, length in enumerate([*lengths, left]):
        if sum(lengths[i:]) + left >= SENTENCE_WORDS:
            begun += 1
            ended += i < len(lengths) and length <= SENTENCE_WORDS
    return begun, ended


def figures(found: list[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Pooled share and standard error of each figure, from the counts of each passage."""
    picks = np.random.default_rng(0).integers(len(found), size=(1000, len(found)))
    result = {}
    for name in found[0]:
        above, below = np.array([each[name] for each in found], np.float64).T
        drawn = above[picks].sum(1) / np.maximum(below[picks].sum(1), 1)
        result[name] = {"value": round(above.sum() / max(below.sum(), 1), 5), "error": round(drawn.std(), 5)}
    return result


def measure(
    passages: Sequence[Passage], made: Sequence[Continuation], n_words: Sequence[int] | None, reference: Reference
) -> tuple[dict[str, dict[str, float]], list[int]]:
    """Figures of samples, or of real continuations of `n_words` words, and the number of words of each."""
    found, lengths = [], []
    for i, (passage, each) in enumerate(zip(passages, made, strict=True)):
        real = words_of(passage.text)
        words = sampled_words(each.text) if n_words is None else real[: n_words[i]]
        text = each.text if n_words is None else " ".join(passage.text.split()[: n_words[i]])
        surprisal = {"bits_per_byte": (sum(each.bits), len(each.text.encode()))}
        found.append(counts(words, text, reference, real[: len(words)]) | surprisal)
        lengths.append(len(words))
    return figures(found), lengths


def table(result: dict) -> str:
    """Shares in per cent, with the standard error of the first three; the surprisal in bits per byte."""
    rows = [["settings", *SHARES]]
    for row in result["rows"]:
        cells = []
        for name in SHARES:
            value, error = row["figures"][name]["value"], row["figures"][name]["error"]
            percent = f"{100 * value:.1f}" + (f" ±{100 * error:.1f}" if name in SHARES[:3] else "")
            cells.append(f"{value:.3f}" if name == "bits_per_byte" else percent)
        rows.append([" ".join(f"{key}={value}" for key, value in row["settings"].items()) or "books", *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def parse_settings(text: str) -> dict[str, float]:
    """Settings of `--settings`, such as `temperature=0.9 top_k=50`."""
    pairs = (pair.split("=") for pair in text.split())
    return {key: int(value) if key == "top_k" else float(value) for key, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="books")
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--reference", type=Path, nargs="*", default=[])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--settings", type=parse_settings, nargs="+", default=GRID)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sampling.json")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    model = xlcli.load(options.model, threads=options.threads)
    books = list(read_books([options.valid]))
    passages = make_passages(books, model.loaded.tokenizer, options.prompts, options.prompt_tokens, options.tokens)
    reference = Reference(options.train, options.reference, books)
    say(f"{len(reference.vocabulary):,} reference words, {len(reference.runs):,} runs of four words")
    rows, lengths = [], []
    for settings in options.settings:
        chosen = GenerateConfig(**settings)
        made = generate(model, passages, options.tokens, chosen, options.seed)
        found, n_words = measure(passages, made, None, reference)
        prompts = (model.loaded.tokenizer.decode(passage.prompt).decode("utf-8", "replace") for passage in passages)
        examples = [
            {"prompt": prompt, "text": each.text}
            for prompt, each in itertools.islice(zip(prompts, made, strict=True), 2)
        ]
        rows.append({"settings": settings, "figures": found, "words": sum(n_words), "examples": examples})
        lengths.append(n_words)
        say(" ".join(f"{key}={value}" for key, value in settings.items()))
    n_words = np.rint(np.mean(lengths, axis=0)).astype(int).tolist()
    real = generate(model, passages, options.tokens, None, options.seed)
    rows.append({"settings": {}, "figures": measure(passages, real, n_words, reference)[0], "words": sum(n_words)})
    result = {
        "machine": machine(),
        "model": model.loaded.name,
        "weights": model.loaded.fingerprints["weights"],
        "passages": len(passages),
        "prompt_tokens": options.prompt_tokens,
        "tokens": options.tokens,
        "seed": options.seed,
        "train": [f"{folder.parent.name}/{folder.name}" for folder in options.train],
        "reference": [f"{folder.parent.name}/{folder.name}" for folder in options.reference],
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
