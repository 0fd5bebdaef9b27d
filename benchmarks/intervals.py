"""How often the 95 % intervals of `xlcli eval` contain what they are of, by simulation.

    python benchmarks/intervals.py DATA                                      # measures documents once, then simulates
    python benchmarks/intervals.py --table benchmarks/results/intervals.json

A population of documents is sampled with replacement; an interval holds if it contains the bits per byte, or the mean
over documents, of the population. DATA has the folders books, modern, wikitext-2 and logs. Measured documents have the
bits per byte that the bundled model gives to their first 3,000 characters, with a memory of 256 and of 32 tokens, and
the size of the whole document:

- files: validation and test files of `modern`, one for each source (present-day English of many kinds)
- books: all books, training text included; 3,000 characters after the first 20,000
- chapters: of the validation books
- articles: of WikiText-2 (validation and test)
- lines: of a Linux log

Made documents have lognormal sizes (standard deviation of the logarithm: `sd`) and 1.5 ± 0.2 bits per byte, normal or
of Student's t with three degrees of freedom, with a correlation `r` with the logarithm of the size.

Differences are of memory 256 to memory 32, document by document. Contexts are the rows `context seen`: segments of 256
tokens of *The Jungle*, each from empty memory, sampled as documents are. The percentile bootstrap stands beside.
"""

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from runs import machine, save, write_rows

N_DOCUMENTS = (5, 10, 20, 50)
SAMPLES, RESAMPLED, RESAMPLES = 4_000, 400, 1_000
"""Samples for each number of documents; samples that are bootstrapped, and resamples of each."""
MADE_DOCUMENTS = 2_000_000
MEM_LENS = (256, 32)
SEGMENT_LEN = 256
CHARACTERS = 3_000
"""Of each document, which the model reads."""


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def documents(data: Path) -> dict[str, list[tuple[str, int]]]:
    """The text that is scored and the size in bytes of each document, by population."""
    modern = sorted([*(data / "modern" / "valid").glob("*.gz"), *(data / "modern" / "test").glob("*.gz")])
    books = sorted((data / "books").glob("*/*.txt*"))
    chapters = [
        chapter
        for path in sorted((data / "books" / "valid").glob("*"))
        for chapter in re.split(r"(?m)^(?=(?:CHAPTER|Chapter)\b)", text_of(path))
        if len(chapter) > 500
    ]
    wikitext = "".join(text_of(data / "wikitext-2" / name) for name in ("valid.txt", "test.txt"))
    articles = [text for text in re.split(r"(?m)^(?= = [^=].* = $)", wikitext) if len(text) > 200]
    lines = [f"{line}\n" for line in text_of(data / "logs" / "Linux_2k.log").splitlines() if line]
    return {
        "files": [(text[:CHARACTERS], len(text.encode())) for text in map(text_of, modern)],
        "books": [(text[20_000 : 20_000 + CHARACTERS], len(text.encode())) for text in map(text_of, books)],
        "chapters": [(text[:CHARACTERS], len(text.encode())) for text in chapters],
        "articles": [(text[:CHARACTERS], len(text.encode())) for text in articles],
        "lines": [(text[:-1], len(text.encode())) for text in lines],
    }


def measure(texts: list[tuple[str, int]]) -> dict[str, list[float]]:
    """Sizes of documents, and bits by memory length: those of the beginning, raised to the size of the document."""
    import xlcli
    from xlcli.events import Score

    model = xlcli.load("books")
    found = {"bytes": [float(size) for _, size in texts]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        write_rows(path, ({"text": text} for text, _ in texts))
        for mem_len in MEM_LENS:
            options = {"mem_len": mem_len, "text_field": "text", "reset_on_document": True}
            *_, score = (each for each in xlcli.evaluate(model, [path], **options) if isinstance(each, Score))
            rates = [bits / size for bits, size in score.sums]
            bits = [round(rate * size, 3) for rate, size in zip(rates, found["bytes"], strict=True)]
            found[f"memory {mem_len}"] = bits
    return found


def segments(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Nats and bytes of the tokens of segments (s t)."""
    import xlcli
    from xlcli.events import TokenScore

    options = {"mem_len": 0, "segment_len": SEGMENT_LEN, "per_token": True, "limit": 200_000}
    scored = xlcli.evaluate(xlcli.load("books"), [data / "books" / "valid" / "the-jungle.txt"], **options)
    tokens = [(each.bits * np.log(2), len(each.text)) for each in scored if isinstance(each, TokenScore)]
    whole = np.array(tokens[: len(tokens) // SEGMENT_LEN * SEGMENT_LEN]).reshape(-1, SEGMENT_LEN, 2)
    return whole[..., 0], whole[..., 1]


def made(sd: float, r: float, freedom: int | None, draw: np.random.Generator) -> np.ndarray:
    """Bits and bytes of many documents (d 2)."""
    z = draw.normal(size=MADE_DOCUMENTS)
    noise = draw.normal(size=MADE_DOCUMENTS)
    if freedom is not None:
        noise = draw.standard_t(freedom, MADE_DOCUMENTS) * np.sqrt((freedom - 2) / freedom)
    sizes = np.exp(8 + sd * z)
    return np.stack((sizes * (1.5 + 0.2 * (r * z + np.sqrt(1 - r * r) * noise)), sizes), 1)


def populations(measured: dict[str, dict], draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Bits and bytes of the documents of each population (d 2), and bits of another model if there is one (d 3)."""
    found = {}
    for sd, r, freedom in (
        (0.5, 0, None),
        (0.5, -0.5, None),
        (1, 0, None),
        (1, 0, 3),
        (1, -0.3, None),
        (1, -0.5, None),
    ):
        name = f"made, sd {sd}, r {r}" + (f", t{freedom}" if freedom else "")
        found[name] = made(sd, r, freedom, draw)
    for name, columns in measured.items():
        keys = [f"memory {MEM_LENS[0]}", "bytes", f"memory {MEM_LENS[1]}"]
        found[name] = np.array([columns[key] for key in keys]).T
    return found


def coverage(documents: np.ndarray, n: int, draw: np.random.Generator) -> dict[str, float]:
    """Share of samples of n documents (d 2, or d 3 with those of another model) in which each interval holds."""
    from xlcli.evaluation.spread import spread_of

    bits, sizes = documents[:, 0], documents[:, 1]
    ratio, mean = bits.sum() / sizes.sum(), (bits / sizes).mean()
    held: dict[str, list[bool]] = {"bits/byte": [], "mean": []}
    if documents.shape[1] == 3:
        difference = documents[:, 2].sum() / sizes.sum() - ratio
        held["difference"] = []
    for _ in range(SAMPLES):
        drawn = documents[draw.integers(len(documents), size=n)]
        found = spread_of(drawn[:, :2])
        held["bits/byte"].append(found.bits_per_byte_low <= ratio <= found.bits_per_byte_high)
        held["mean"].append(found.document_mean_low <= mean <= found.document_mean_high)
        if documents.shape[1] == 3:
            found = spread_of(drawn[:, [2, 1]], drawn[:, :2])
            held["difference"].append(found.bits_per_byte_low <= difference <= found.bits_per_byte_high)
    held["bootstrap, bits/byte"] = [
        bootstrap_holds(documents[draw.integers(len(documents), size=n), :2], ratio, draw) for _ in range(RESAMPLED)
    ]
    return {name: round(float(np.mean(each)), 4) for name, each in held.items()}


def bootstrap_holds(documents: np.ndarray, ratio: float, draw: np.random.Generator) -> bool:
    """Whether the percentile bootstrap of a sample (n 2) contains the ratio."""
    sums = documents[draw.integers(len(documents), size=(RESAMPLES, len(documents)))].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return bool(low <= ratio <= high)


def context_coverage(nats: np.ndarray, n_bytes: np.ndarray, n: int, draw: np.random.Generator) -> dict[str, float]:
    """Share of samples of n segments (s t) in which the margin of each row of `context seen` holds."""
    from xlcli.evaluation.passes import ContextSums

    def bins(rows: np.ndarray) -> tuple:
        sums = ContextSums(SEGMENT_LEN)
        sums.start(len(rows))
        sums.add(SEGMENT_LEN, nats[rows], n_bytes[rows], np.ones((len(rows), SEGMENT_LEN)))
        return sums.bins()

    truth = bins(np.arange(len(nats)))
    held: dict[str, list[bool]] = {}
    for _ in range(SAMPLES):
        for row, true in zip(bins(draw.integers(len(nats), size=n)), truth, strict=True):
            holds = abs(row.bits_per_byte - true.bits_per_byte) <= row.margin
            held.setdefault(f"context {row.start} to {row.stop - 1}", []).append(holds)
    return {name: round(float(np.mean(each)), 4) for name, each in held.items()}


def simulate(data: Path, measured: dict[str, dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Coverage by population, number of documents and interval."""
    draw = np.random.default_rng(0)
    nats, n_bytes = segments(data)
    cases: dict[str, Callable[[int], dict[str, float]]] = {}
    for name, columns in populations(measured, draw).items():
        cases[name] = lambda n, columns=columns: coverage(columns, n, draw)
    cases["segments"] = lambda n: context_coverage(nats, n_bytes, n, draw)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, cover in cases.items():
        found[name] = {str(n): cover(n) for n in N_DOCUMENTS}
        print(name, found[name], flush=True)
    return found


def table(result: dict) -> str:
    """Markdown table: a row for each population and interval, a column for each number of documents."""
    lines = [
        "| documents | interval | " + " | ".join(map(str, N_DOCUMENTS)) + " |",
        "|---" * (2 + len(N_DOCUMENTS)) + "|",
    ]
    for name, by_n in result["coverage"].items():
        for interval in by_n[str(N_DOCUMENTS[0])]:
            cells = [f"{100 * by_n[str(n)][interval]:.1f}" for n in N_DOCUMENTS]
            lines.append("| " + " | ".join([name, interval, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "intervals.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    result = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine(), "documents": {}}
    if options.data is None:
        parser.error("name the folder of the texts")
    for name, texts in documents(options.data).items():
        if name not in result["documents"]:
            result["documents"][name] = measure(texts)
            save(options.out, result, indent=None)
    result["coverage"] = simulate(options.data, result["documents"])
    save(options.out, result, indent=None)
    print(table(result))


if __name__ == "__main__":
    main()
