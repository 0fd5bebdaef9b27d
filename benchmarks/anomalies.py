"""New against normal: lines of a log beside a baseline of normal lines, by area under the ROC curve.

    python benchmarks/anomalies.py FOLDER [--log BGL ...] [--out benchmarks/results/anomalies.json]
    python benchmarks/anomalies.py --table benchmarks/results/anomalies.json    # the table of docs/logs.md

FOLDER has samples of Loghub (`BGL_2k.log`). The baseline is the normal lines of the first half. Each line of the second
half is scored from the state of the baseline, and none learns from another. The area is the probability that a random
alert has a higher score than another random line, ties counting half (Mann-Whitney).

BGL has a label in its first column, which is cut off. HDFS has none for lines: alerts are its warnings, whose level is
cut off. The sample of Thunderbird has no alert among its labels.

Scores, each with digits masked and not: rarity of words (`rarities`: the twenty lines of docs/logs.md); the context
cache over a model that knows nothing; the model with a cache, and adapting, too. Each is given per byte of the line
(as `stream` prints it), as its sum, per word, and as the largest of a word. One thread, a few minutes for each log.
"""

import argparse
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adapting import CACHE
from runs import machine, save

READINGS: dict[str, dict[str, Any]] = {
    "model and cache": {"context_cache": int(CACHE)},
    "model, adapting, and cache": {"adapt": True, "context_cache": int(CACHE)},
}
SHOWN = ("per byte", "sum", "mean", "largest")


class Log(NamedTuple):
    """Normal lines to learn from, and lines to score with whether each is an alert."""

    baseline: list[str]
    lines: list[str]
    alerts: list[bool]


def divided(lines: list[str], alerts: list[bool]) -> Log:
    half = len(lines) // 2
    normal = [line for line, is_alert in zip(lines[:half], alerts[:half], strict=True) if not is_alert]
    return Log(normal, lines[half:], alerts[half:])


def labeled(folder: Path) -> Log:
    """BGL: the first column is its label, `-` for no alert."""
    parts = [line.split(" ", 1) for line in read(folder / "BGL_2k.log")]
    return divided([rest for _, rest in parts], [label != "-" for label, _ in parts])


def warnings(folder: Path) -> Log:
    """HDFS: the fourth column is the level."""
    parts = [line.split(" ", 4) for line in read(folder / "HDFS_2k.log")]
    return divided([" ".join([*line[:3], line[4]]) for line in parts], [line[3] == "WARN" for line in parts])


LOGS: dict[str, Callable[[Path], Log]] = {
    "BGL": labeled,
    "HDFS": warnings,
}


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def area(scores: list[float], alerts: list[bool]) -> float:
    """Area under the ROC curve from the ranks of the scores; equal scores share the mean of their ranks."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    ranks = [0.0] * len(scores)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        for i in order[start:end]:
            ranks[i] = (start + end + 1) / 2
        start = end
    n = sum(alerts)
    rank_sum = sum(rank for rank, alert in zip(ranks, alerts, strict=True) if alert)
    return (rank_sum - n * (n + 1) / 2) / (n * (len(alerts) - n))


def masked(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def rarities(log: Log) -> list[list[float]]:
    """Bits of each word of each line by its share of the words of the baseline, with one added to each count."""
    counts = Counter(word for line in log.baseline for word in line.split())
    total = counts.total() + len(counts) + 1
    return [[math.log2(total / (counts[word] + 1)) for word in line.split()] for line in log.lines]


def cached(log: Log, tokenizer: Any, vocab_size: int) -> list[list[float]]:
    """Bits of each word by the context cache alone: its model gives all tokens the same probability."""
    import numpy as np

    from xlcli.kernels.mixture import read
    from xlcli.memory.context_cache import N_READ, ContextCache, new_index, new_learned
    from xlcli.online.mixture import line_end_of

    cache = ContextCache({}, new_learned(vocab_size), new_index(int(CACHE)))
    line_end = line_end_of(tokenizer)

    def bits(line: str) -> list[float]:
        ids = tokenizer.encode(f"{line}\n".encode())
        texts = np.array(([tokenizer.start_id, *ids[:-1]], ids), np.int64)
        log_p = np.full((len(ids), vocab_size), -math.log(vocab_size))
        read(cache.index, cache.learned, line_end, texts, log_p)
        nats = -log_p[np.arange(len(ids)), ids]
        return by_word([tokenizer.decode(ids[i : i + 1]) for i in range(len(ids))], (nats / math.log(2)).tolist())

    for line in log.baseline:
        bits(line)
    found = []
    baseline = cache.snapshot()
    for line in log.lines:
        n_before = int(cache.index.sizes[N_READ])
        found.append(bits(line))
        cache.go_back(baseline, int(cache.index.sizes[N_READ]) - n_before)
    return found


def surprisals(model: Any, log: Log, options: dict[str, Any]) -> tuple[list[list[float]], float]:
    """Bits of each word by the model, and seconds for a line."""
    import xlcli
    from xlcli.events import LineScore

    states: list[Any] = []
    normal = "".join(f"{line}\n" for line in log.baseline)
    for _ in xlcli.stream(model, normal, save=states.append, emit="none", **options):
        pass
    started = time.process_time()
    text = "".join(f"{line}\n" for line in log.lines)
    events = xlcli.stream(model, text, state=states[-1], frozen=True)
    scores = [event for event in events if isinstance(event, LineScore)]
    if len(scores) != len(log.lines):
        raise SystemExit(f"{len(log.lines)} lines were read, {len(scores)} were scored")
    seconds = (time.process_time() - started) / len(scores)
    return [by_word([text for text, _ in score.spans], [bits for _, bits in score.spans]) for score in scores], seconds


def by_word(texts: list[bytes], bits: list[float]) -> list[float]:
    """Sums of the bits of tokens by word: a token that begins with a blank begins one."""
    words: list[float] = []
    for text, token_bits in zip(texts, bits, strict=True):
        if text[:1].isspace() or not words:
            words.append(0.0)
        words[-1] += token_bits
    return words


def areas(words: list[list[float]], log: Log) -> dict[str, float]:
    scores = {
        "per byte": [sum(bits) / (len(line.encode()) + 1) for bits, line in zip(words, log.lines, strict=True)],
        "sum": [sum(line) for line in words],
        "mean": [sum(line) / max(1, len(line)) for line in words],
        "largest": [max(line, default=0.0) for line in words],
    }
    return {name: area(found, log.alerts) for name, found in scores.items()}


def measured(log: Log, model: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """The areas of each score, by its name."""
    forms = {"": log, ", digits masked": Log([*map(masked, log.baseline)], [*map(masked, log.lines)], log.alerts)}
    for form, text in forms.items():
        yield f"rarity of words{form}", areas(rarities(text), log)
        loaded = model.loaded
        yield f"cache alone{form}", areas(cached(text, loaded.tokenizer, loaded.config.model.vocab_size), log)
    for name, options in READINGS.items():
        for form, text in forms.items():
            words, seconds = surprisals(model, text, options)
            yield f"{name}{form}", areas(words, log) | {"ms per line": 1000 * seconds}


def table(result: dict[str, Any]) -> str:
    """Markdown table: a row for each score, a column for each log, with the areas of each form."""
    logs = result["logs"]
    heads = [f"{name} ({log['alerts']} of {log['lines']:,})" for name, log in logs.items()]
    lines = [
        f"| score: per byte / sum / mean of a word / largest word | {' | '.join(heads)} |",
        "|---" * (len(logs) + 1) + "|",
    ]
    for name in next(iter(logs.values()))["areas"]:
        cells = [" / ".join(shown(log["areas"][name].get(kind)) for kind in SHOWN) for log in logs.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(found: float | None) -> str:
    return "–" if found is None else f"{found:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--log", choices=LOGS, action="append")
    parser.add_argument("--model", default="books")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "anomalies.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.folder is None:
        parser.error("name the folder of the logs")
    os.environ["OMP_NUM_THREADS"] = "1"
    import xlcli

    model = xlcli.load(options.model, threads=1, device="cpu")
    result: dict[str, Any] = {"machine": machine(), "model": options.model, "logs": {}}
    for name in options.log or LOGS:
        log = LOGS[name](options.folder)
        found: dict[str, dict[str, float]] = {}
        for score, row in measured(log, model):
            found[score] = row
            print(name, score, {kind: round(value, 3) for kind, value in row.items()}, flush=True)
        counts = {"baseline": len(log.baseline), "lines": len(log.lines), "alerts": sum(log.alerts)}
        result["logs"][name] = counts | {"areas": found}
        save(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
