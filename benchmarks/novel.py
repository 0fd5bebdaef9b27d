"""One novel, read as one text: bits per byte along it, and what a sentence costs when it comes again.

    python benchmarks/novel.py all BOOK.txt SMOLLM2  # every number of docs/long-context.md but those of reading times
    python benchmarks/novel.py read BOOK.txt --models books SMOLLM2 [--only PART_OF_NAME] [--limit BYTES]
    python benchmarks/novel.py needle BOOK.txt --models books
    python benchmarks/novel.py table                 # the tables and the figures of docs/long-context.md
    python benchmarks/novel.py check SMOLLM2 HUGGING_FACE_FOLDER BOOK.txt      # with transformers installed

`read` scores the book by each of `READINGS`: memories, sinks, cache, adaptation, and what other programs do with a text
that is longer than their window. `needle` plants sentences that no other text has, twice each, and compares the second
time with the first. `check` computes 6,000 tokens by transformers with an explicit window. Models are names or folders;
SMOLLM2 is an imported SmolLM2-135M (docs/models.md). Results are written after each reading, and a restarted benchmark
continues with the missing ones. `all` runs two readings at once, so set OMP_NUM_THREADS=1 where there are two cores.
Reading times are those of `reading.py`.
"""

import argparse
import functools
import json
import math
import random
import re
import statistics
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from runs import save, saved, xlcli

RESULT = Path(__file__).parent / "results" / "novel.json"
FIGURES = Path(__file__).parent.parent / "docs" / "pictures"
BLOCK = 16_384
"""Bytes of a place in the text, whose bits are counted together."""
LONG_CACHE = "1000000"
"""Tokens in the cache: more than the book has."""


TRAINED_HERE = "books"
"""The model that xlcli trained: it has no sinks, and the default rate of adaptation suits it."""
IMPORTED_RATE = ("--set", "eval.adapt_lr=1e-4")
"""The default rate makes imported models worse (docs/adapting.md)."""


def _memory(length: int, *options: str) -> tuple[str, ...]:
    return ("--mem-len", str(length), *options)


CACHE, ADAPT, NO_SINKS = ("--context-cache", LONG_CACHE), ("--adapt",), ("--set", "eval.n_sinks=0")
WINDOW = 2048
"""Window of those that know no memory; it is what evaluation harnesses give to a small model."""
READINGS = {
    "memory 256": _memory(256),
    "memory 1,024": _memory(1024),
    "memory 4,096": _memory(4096),
    "whole window, 8,191": _memory(8191),
    "memory 256, no sinks": _memory(256, *NO_SINKS),
    "memory 1,024, no sinks": _memory(1024, *NO_SINKS),
    "memory 4,096, no sinks": _memory(4096, *NO_SINKS),
    "memory 256, cache": _memory(256, *CACHE),
    "memory 256, adapting": _memory(256, *ADAPT),
    "memory 256, both": _memory(256, *ADAPT, *CACHE),
    "memory 1,024, cache": _memory(1024, *CACHE),
    "memory 1,024, adapting": _memory(1024, *ADAPT),
    "memory 1,024, both": _memory(1024, *ADAPT, *CACHE),
    "independent blocks of 2,048": _memory(0, "--segment-len", str(WINDOW)),
    "windows of 2,048, stride 512": _memory(0, "--segment-len", str(WINDOW), "--set", "eval.stride=512"),
}
"""Options of `xlcli eval` by name. The last two are what lm-eval and the page of transformers on perplexity do."""
NEEDLE_READINGS = ("memory 256", "memory 4,096", "memory 256, cache", "memory 256, adapting", "memory 256, both")

DISTANCES = (1_000, 10_000, 100_000, 1_000_000)
"""Characters between the two places of a needle."""
NEEDLES = 20
"""Needles of each distance; their first places are spread over the part of the book that leaves room for the second."""
ADJECTIVES = [
    "copper", "silent", "crooked", "frozen", "painted", "hollow", "scarlet", "wooden", "patient", "narrow",
    "velvet", "distant", "rusty", "gilded",
]  # fmt: skip
THINGS = [
    "lanterns", "anchors", "violins", "beehives", "ladders", "kettles", "compasses", "orchards", "chimneys",
    "saddles", "mirrors", "barrels", "sundials", "thimbles",
]  # fmt: skip
BEGINNINGS = ["Quil", "Ostra", "Mallow", "Tirren", "Hask", "Wyn", "Brezz", "Culver", "Yth", "Zandr", "Grim", "Pell"]
MIDDLES = ["ver", "ob", "fin", "dal", "erb", "noth", "an", "ed", "or", "ell", "um", "isk"]
ENDS = ["n", "eck", "ow", "e", "y", "ia", "o", "ine", "pe", "a", "us", "ard"]
"""Parts of names."""
VERBS = ["counted", "buried", "borrowed", "polished", "traded", "weighed", "repaired", "hid"]


class Needle(NamedTuple):
    """A planted sentence: its text, the characters between its two places, and their first bytes in the new text."""

    sentence: str
    distance: int
    first: int
    second: int


def needles(n: int) -> list[str]:
    """Sentences that occur in no other text; no two share a name, a number, or an adjective with its noun."""
    draw = random.Random(0)
    names = draw.sample([a + b + c for a in BEGINNINGS for b in MIDDLES for c in ENDS], 2 * n)
    numbers = draw.sample(range(1_013, 9_987), 2 * n)
    things = draw.sample([f"{adjective} {thing}" for adjective in ADJECTIVES for thing in THINGS], 2 * n)
    sentences = []
    for i in range(0, 2 * n, 2):
        verb = draw.choice(VERBS)
        counted = f"{numbers[i]} {things[i]} and {numbers[i + 1]} {things[i + 1]}"
        sentences.append(f"{names[i]} of {names[i + 1]} {verb} {counted}.")
    return sentences


def fitting_distances(n_characters: int) -> list[int]:
    """Those of `DISTANCES` that leave a quarter of the book as room for the first places."""
    return [distance for distance in DISTANCES if n_characters - distance >= n_characters / 4]


def pair_near(place: float, distance: int, paragraphs: list[int]) -> tuple[int, int]:
    """The paragraph nearest to a place that has another one at this distance behind it, within a tenth, and the other.

    Raises:
        ValueError: There is no such pair.
    """
    for first in sorted(paragraphs, key=lambda start: abs(start - place)):
        second = min(paragraphs, key=lambda start: abs(start - first - distance))
        if abs(second - first - distance) <= distance / 10:
            return first, second
    raise ValueError(f"no two paragraphs are {distance} characters apart")


def planted(book: str) -> tuple[str, list[Needle]]:
    """The book with needles between its paragraphs."""
    paragraphs = [match.end() for match in re.finditer(r"\n\n+", book)]
    distances = fitting_distances(len(book))
    sentences = iter(needles(NEEDLES * len(distances)))
    wanted: list[tuple[int, str, int]] = []  # place in the book, sentence, its distance
    for distance in distances:
        room = len(book) - distance
        for i in range(NEEDLES):
            sentence = next(sentences)
            place = room * (i + 0.5) / NEEDLES
            first, second = pair_near(place, distance, paragraphs)
            wanted += [(first, sentence, distance), (second, sentence, distance)]
    parts: list[str] = []
    places: dict[tuple[str, int], list[int]] = {}
    end = n_bytes = 0
    for paragraph, sentence, distance in sorted(wanted):
        parts += [book[end:paragraph], sentence + "\n\n"]
        n_bytes += len(parts[-2].encode())
        places.setdefault((sentence, distance), []).append(n_bytes)
        n_bytes += len(parts[-1].encode())
        end = paragraph
    text = "".join([*parts, book[end:]])
    return text, [Needle(sentence, distance, *starts) for (sentence, distance), starts in places.items()]


def options_for(model: str, name: str) -> tuple[str, ...] | None:
    """Options of a reading for a model; None if a model without sinks is to read without them."""
    options = READINGS[name]
    if model == TRAINED_HERE:
        return None if set(NO_SINKS) <= set(options) else options
    return (*options, *IMPORTED_RATE) if set(ADAPT) <= set(options) else options


def score(book: Path, model: str, options: tuple[str, ...]) -> tuple[dict, list[dict]]:
    """Figures of a reading, and its tokens with the bytes where they begin."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.jsonl"
        command = ["eval", str(book), "-m", model, "--json", "-q", "--per-token", str(tokens)]
        figures = json.loads(xlcli(*command, "--set", "eval.context_share=0", *options, cwd=Path.cwd()))
        return figures, [json.loads(line) for line in tokens.read_text().splitlines()]


def bits_by_place(tokens: list[dict], n_bytes: int) -> list[float]:
    """Bits per byte of each block of `BLOCK` bytes, by the bytes where its tokens begin."""
    bits = [0.0] * math.ceil(n_bytes / BLOCK)
    for token in tokens:
        bits[token["byte"] // BLOCK] += token["bits"]
    return [total / min(BLOCK, n_bytes - i * BLOCK) for i, total in enumerate(bits)]


def bits_between(tokens: list[dict], start: int, end: int) -> float:
    """Bits of the tokens that begin in these bytes."""
    return sum(token["bits"] for token in tokens if start <= token["byte"] < end)


def missing(options: argparse.Namespace, part: str, model: str, names: Iterable[str], n_bytes: int) -> Iterator[str]:
    """Names of the readings of a model that have no result for a text of this many bytes, each when it is its turn."""
    for name in names:
        runs = saved(options.out, 0).get(part, {}).get(Path(model).name, {})
        is_done = name in runs and runs[name]["bytes"] == n_bytes
        if not is_done and options.only in name and options_for(model, name) is not None:
            yield name


LOCK = threading.Lock()


def keep(out: Path, part: str, model: str, name: str, run: dict) -> None:
    """Writes a result beside all others, among them those of readings that run at the same time."""
    with LOCK:
        result = saved(out, 0)
        result.setdefault(part, {}).setdefault(Path(model).name, {})[name] = run
        save(out, result, indent=None)


def read(options: argparse.Namespace) -> None:
    """Scores the book by each reading."""
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / options.book.name
        book.write_bytes(options.book.read_bytes()[: options.limit])
        for model in options.models:
            for name in missing(options, "runs", model, READINGS, book.stat().st_size):
                chosen = options_for(model, name)
                figures, tokens = score(book, model, chosen)
                kept = {key: figures[key] for key in ("bytes", "tokens", "bits_per_byte", "seconds", "peak_rss_bytes")}
                places = bits_by_place(tokens, figures["bytes"])
                keep(options.out, "runs", model, name, kept | {"places": places, "options": chosen})
                print(Path(model).name, name, kept, flush=True)


def needle(options: argparse.Namespace) -> None:
    """Scores the book with needles, and each needle at both places."""
    text, all_needles = planted(options.book.read_text()[: options.limit])
    n_in_needles = sum(2 * len(found.sentence.encode()) for found in all_needles)
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / options.book.name
        book.write_text(text)
        for model in options.models:
            for name in missing(options, "needles", model, NEEDLE_READINGS, book.stat().st_size):
                figures, tokens = score(book, model, options_for(model, name))
                rows = []
                for found in all_needles:
                    n = len(found.sentence.encode())
                    first, second = (bits_between(tokens, at, at + n) for at in (found.first, found.second))
                    row = {"distance": found.distance, "depth": found.first, "first": first, "second": second}
                    rows.append(row | {"depth_of_second": found.second})
                n_bits = sum(row["first"] + row["second"] for row in rows)
                rest = figures["bits_per_byte"] * figures["bytes"] - n_bits
                run = {"needles": rows, "bits_of_the_rest": rest, "bytes": figures["bytes"]}
                keep(options.out, "needles", model, name, run | {"bytes_of_the_rest": figures["bytes"] - n_in_needles})
                print(Path(model).name, name, shares(rows), flush=True)


FIRST_BYTES = 200_000
"""Bytes of the book that the slower model reads in `everything`."""


def everything(options: argparse.Namespace) -> None:
    """All missing results, two readings at once: the whole book by `TRAINED_HERE`, its beginning by SmolLM2."""
    limits = {options.smollm2: FIRST_BYTES, TRAINED_HERE: None}
    with ThreadPoolExecutor(2) as pool:
        parts = []
        for work in (read, needle):
            for model, limit in limits.items():
                part = argparse.Namespace(out=options.out, book=options.book, models=[model], limit=limit, only="")
                parts.append(pool.submit(work, part))
        for part in parts:
            part.result()  # raises what ended it
    show(options)


def shares(rows: list[dict]) -> dict[int, tuple[float, float]]:
    """Bits of the second place as a share of the first, mean and half-width of its 95 % interval, by distance."""
    found = {}
    for distance in sorted({row["distance"] for row in rows}):
        ratios = [row["second"] / row["first"] for row in rows if row["distance"] == distance]
        student = 2.093  # of 19 degrees of freedom
        found[distance] = statistics.fmean(ratios), student * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return found


PLACES = (0, 65_536, 262_144, 1_048_576)
"""First bytes of the columns of the table."""


def table(result: dict) -> str:
    """Markdown tables: bits per byte of each reading by place, with time and RAM; shares of needles by distance."""
    parts = []
    for model, runs in result["runs"].items():
        runs = of_longest_text(runs)
        n_bytes = max(run["bytes"] for run in runs.values())
        starts = [start for start in PLACES if start < n_bytes]
        head = [f"from {start:,}" for start in starts]
        lines = [f"| {model} | {' | '.join(head)} | all | ms per token | RAM, MB |", "|---" * (len(head) + 4) + "|"]
        for name, run in sorted(runs.items(), key=lambda item: list(READINGS).index(item[0])):
            places = [
                mean_of_places(run, start, end) for start, end in zip(starts, [*starts[1:], n_bytes], strict=True)
            ]
            figures = [f"{bits:.3f}" for bits in (*places, run["bits_per_byte"])]
            time = f"{1e3 * run['seconds'] / run['tokens']:.2f}"
            lines.append(f"| {name} | {' | '.join(figures)} | {time} | {run['peak_rss_bytes'] / 1e6:.0f} |")
        parts.append("\n".join(lines))
    for model, runs in result.get("needles", {}).items():
        runs = of_longest_text(runs)
        distances = sorted({row["distance"] for run in runs.values() for row in run["needles"]})
        head = [*(f"{distance:,}" for distance in distances), "rest, bits per byte"]
        lines = [f"| {model}: second time, % of the first | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for name, run in runs.items():
            found = [f"{100 * mean:.1f} ± {100 * half:.1f}" for mean, half in shares(run["needles"]).values()]
            rest = run["bits_of_the_rest"] / run["bytes_of_the_rest"]
            lines.append(f"| {name} | {' | '.join(found)} | {rest:.3f} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def of_longest_text(runs: dict[str, dict]) -> dict[str, dict]:
    """The runs over the most bytes: others are of an earlier benchmark with another --limit."""
    n_bytes = max(run["bytes"] for run in runs.values())
    return {name: run for name, run in runs.items() if run["bytes"] == n_bytes}


def mean_of_places(run: dict, start: int, end: int) -> float:
    """Mean bits per byte of the blocks that begin in these bytes."""
    blocks = run["places"][start // BLOCK : math.ceil(end / BLOCK)]
    sizes = [min(BLOCK, run["bytes"] - (start // BLOCK + i) * BLOCK) for i in range(len(blocks))]
    return sum(bits * size for bits, size in zip(blocks, sizes, strict=True)) / sum(sizes)


def plot(model: str, runs: dict, file: Path) -> None:
    """Bits that each reading saves along the book, in percent of those of the shortest memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [name for name in READINGS if name in runs and name != "memory 256"]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    base = runs["memory 256"]
    n_blocks = len(base["places"])
    ends = sorted({round(n_blocks ** (i / 12)) for i in range(13)})  # equal steps of the logarithm
    for name in drawn:
        saved_percent = []
        for start, end in zip([0, *ends], ends, strict=False):
            plain = mean_of_places(base, start * BLOCK, end * BLOCK)
            saved_percent.append(100 * (1 - mean_of_places(runs[name], start * BLOCK, end * BLOCK) / plain))
        middles = [BLOCK * (start + end) / 2 for start, end in zip([0, *ends], ends, strict=False)]
        axes.plot(middles, saved_percent, label=name, marker=".")
    axes.set(xscale="log", xlabel="characters read before", ylabel="bits saved, % of memory 256", title=model)
    axes.axhline(0, color="gray", linewidth=0.8)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def show(options: argparse.Namespace) -> None:
    """Prints the tables, and draws a figure for each model."""
    result = json.loads(options.out.read_text())
    print(table(result))
    for model, all_runs in result["runs"].items():
        runs = of_longest_text(all_runs)
        if "memory 256" in runs:
            plot(model, runs, options.figures / f"novel-{model.lower()}.svg")


CHECKED = 6_000
"""Tokens that `check` compares."""


def check(options: argparse.Namespace) -> None:
    """Largest difference from transformers, in nats per token, for two memories with sinks, on `CHECKED` tokens.

    Its eager attention is replaced by the definition: a query sees the tokens of the memory, and the first tokens of
    the text as if they were as far away as the trained window reaches. Its rotary angles are replaced by the same in
    float64. In float32 an angle of 6,000 radians is rounded by up to 2.4e-4, and two tokens that are near each other no
    longer have the difference of their positions: that alone moves a token by 4.7e-3 nats. All else is in float32.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    config = json.loads((options.model / "config.json").read_text())["model"]["position"]
    n_sinks, far = config["n_sinks"], config["clamp_len"]
    hugging_face = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    width, base = hugging_face.config.head_dim, hugging_face.config.rope_theta
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def rope(_: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (... t e) of the angles of positions (... t)."""
        angles = positions[..., None] * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().float(), angles.sin().float()

    hugging_face.model.rotary_emb.forward = rope

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Vectors (b h t e) turned by positions (t)."""
        cos, sin = rope(x, positions)
        half = width // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + swapped * sin

    def attend(module, q, k, v, mask, scaling, mem_len, **_):  # type: ignore[no-untyped-def]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        at = torch.arange(q.shape[2])
        distance = at[:, None] - at
        scores = (q @ k.mT) * scaling
        scores[..., (distance < 0) | (distance > mem_len)] = -math.inf
        sinks_seen = at[:, None] - at[:n_sinks] > mem_len
        from_far = turned(q, far - at)  # queries come turned by their positions
        sinks = turned(k[:, :, :n_sinks], -at[:n_sinks])
        sink_scores = (from_far @ sinks.mT) * scaling
        sink_scores = sink_scores.masked_fill(~sinks_seen, -math.inf)
        weights = torch.cat((sink_scores, scores), -1).softmax(-1)
        return (weights @ torch.cat((v[:, :, :n_sinks], v), 2)).transpose(1, 2), None

    text = options.book.read_text()[: 8 * CHECKED]
    ids = AutoTokenizer.from_pretrained(options.folder)(text).input_ids[:CHECKED]
    ids = [hugging_face.config.bos_token_id, *ids]  # a text follows the token that begins one
    for mem_len in (256, 1024):
        AttentionInterface.register("memory", functools.partial(attend, mem_len=mem_len))
        hugging_face.set_attn_implementation("memory")
        with torch.inference_mode():
            logits = hugging_face(torch.tensor([ids])).logits[0, :-1]
        theirs = -logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        _, tokens = score(options.book, str(options.model), _memory(mem_len, "--limit", str(5 * CHECKED)))
        ours = torch.tensor([token["bits"] for token in tokens]) * math.log(2)
        n = min(len(ours), len(theirs))
        print(f"memory {mem_len}: {(ours[:n] - theirs[:n]).abs().max():.2e} nats at most, {n} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    commands = parser.add_subparsers(required=True)
    for work in (read, needle):
        command = commands.add_parser(work.__name__)
        command.add_argument("book", type=Path)
        command.add_argument("--models", nargs="+", default=["books"])
        command.add_argument("--only", default="", help="readings with this in their names")
        command.add_argument("--limit", type=int, help="bytes from the beginning of the book")
        command.set_defaults(work=work)
    command = commands.add_parser("all")
    command.add_argument("book", type=Path)
    command.add_argument("smollm2")
    command.add_argument("--figures", type=Path, default=FIGURES)
    command.set_defaults(work=everything)
    command = commands.add_parser("table")
    command.add_argument("--figures", type=Path, default=FIGURES)
    command.set_defaults(work=show)
    command = commands.add_parser("check")
    for name in ("model", "folder", "book"):
        command.add_argument(name, type=Path)
    command.set_defaults(work=check)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
