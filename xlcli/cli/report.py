"""Events as text and as JSON; numbers, sizes and durations as text. Model text must be escaped for a terminal."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from xlcli import events
from xlcli.cli.terminal import table
from xlcli.config import ModelConfig
from xlcli.errors import named
from xlcli.files import as_utf8
from xlcli.store.commit import place_of_run

_BARS = "▁▂▃▄▅▆▇█"


def amount(value: float) -> str:
    """A number with three significant digits: `1.2k`, `34M`, `6.61B`."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            figure = value / scale
            return f"{figure:.0f}{suffix}" if figure >= 100 else f"{figure:.3g}{suffix}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def optional(value: float | None, style: str) -> str:
    """A number in this style; nothing for None."""
    return "" if value is None else format(value, style)


def counted(number: int, noun: str) -> str:
    """A number of things: `1 line`, `1.2k tokens`."""
    return f"{amount(number)} {noun}" + "s" * (number != 1)


def size(n_bytes: float) -> str:
    """A number of bytes: `3.4 MiB`."""
    for scale, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {suffix}"
    return f"{n_bytes:.0f} byte" + "s" * (round(n_bytes) != 1)


def time(seconds: float) -> str:
    """A duration: `4.2 s`, `3:21`, `1:02:03`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 60:
        return f"{seconds:.{seconds < 10:d}f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def averaged(values: Sequence[float], n: int) -> list[float]:
    """Means of consecutive values, at most `n`."""
    n = min(n, len(values))
    parts = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """A row of at most `width` bars, each the mean of consecutive values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    means = averaged(finite, width)
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def age(seconds: float) -> str:
    """An age in its largest unit: `3 minutes`, `2 days`."""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {unit}" + "s" * (number > 1)
    return "just now"


def progress_line(progress: events.Progress) -> str:
    """Fraction done, rate and time left."""

    def quantity(number: float) -> str:
        return size(number) if progress.unit == "B" else f"{amount(number)} {progress.unit}"

    parts = [progress.stage, quantity(progress.done)]
    if progress.total:
        done = parts.pop().removesuffix(f" {progress.unit}")
        parts.append(f"{100 * progress.done / progress.total:.0f} %")
        parts.append(f"{done} of {quantity(progress.total)}")
    if progress.rate:
        parts.append(f"{quantity(progress.rate)}/s")
        if progress.total and progress.total > progress.done:
            parts.append(f"{time((progress.total - progress.done) / progress.rate)} left")
    return "  ".join(parts)


def step_line(step: events.Step, history: Sequence[float] = ()) -> str:
    """A training step in one line, the most important first; `history` is drawn at its end."""
    parts = [
        f"step {step.step}",
        f"{100 * step.fraction:.0f} %",
        f"{time(step.eta_seconds)} left",
        f"{step.bits_per_byte:.3f} bits/byte",
        f"{amount(step.tokens_per_second)} tokens/s",
        optional(step.mean_steps, ".2f") and f"{step.mean_steps:.2f} steps/token",
        sparkline(history),
    ]
    return "  ".join(filter(None, parts))


def plan_text(plan: events.Plan) -> str:
    """The plan of a training run."""
    parts = f"train {size(plan.train_bytes)}"
    if plan.train_tokens:
        parts += f" = {counted(plan.train_tokens, 'token')}"
    parts += "; " + "from its end: " * plan.valid_from_end
    parts += f"valid {size(plan.valid_bytes)}, test {size(plan.test_bytes)}"
    machine = (
        f"{plan.device} {plan.dtype}, {counted(plan.threads, 'thread')}; needs about {size(plan.needed_bytes)} of "
    )
    machine += {"cpu": "RAM"}.get(plan.device, "GPU memory")
    if plan.available_bytes is not None:
        machine += f"; {size(plan.available_bytes)} available"
    budget = plan.budget + f", resuming at step {plan.resumed_at}" * (plan.resumed_at > 0)
    source = f"preset {plan.preset}" if plan.init is None else f"from {plan.init}"
    rows = [
        ("model", f"{plan.folder} ({source}, {amount(plan.parameters)} parameters)"),
        ("weights", f"{size(plan.weights_bytes)} on disk in {plan.weights}"),
        ("corpus", plan.corpus),
        ("text", parts + " (estimated from a sample)" * plan.estimated),
        ("tokens", f"{plan.tokenizer}, vocabulary of {plan.vocab_size}"),
        ("machine", machine),
        ("budget", budget),
    ]
    if plan.left_out:
        rows.insert(3, ("left out", f"{named(plan.left_out, most=3)} (named by --valid or --test)"))
    if plan.n_ranks > 1:
        here = "on this machine" if plan.n_local_ranks == plan.n_ranks else f"({plan.n_local_ranks} on this machine)"
        rows.append(("ranks", f"{plan.n_ranks:,} processes {here}, {counted(plan.rows or 0, 'sequence')} each"))
    return "".join(f"{name:8} {text}\n" for name, text in rows)


def scored(text: events.ScoredText) -> str:
    """Text and memory length of a score in words."""
    part = f"first {amount(text.bytes)} of " * (text.bytes < text.of_bytes)
    return f"{part}{counted(text.of_bytes, 'byte')} of validation text, memory {text.mem_len}"


def trained_text(event: events.Trained) -> str:
    """The end of a run: score, sample, and the two commands to run next."""
    lines = [f"model     {event.folder}"]
    if event.bits_per_byte is not None:
        start = {None: "", 0: " (the weights that the run started from: no step was better)"}
        best = start.get(event.best_step, f" (step {event.best_step})")
        lines.append(f"valid     {event.bits_per_byte:.4f} bits per byte{best}")
        if event.scored:
            lines.append(f"          of the {scored(event.scored)}")
            lines.append("          (the values during training are quick estimates)")
    lines.append(f"training  {counted(event.step, 'step')}, {counted(event.tokens, 'token')}, {time(event.seconds)}")
    if event.sample.strip():
        lines += ["sample", *(f"  {line}" for line in event.sample.strip("\n").split("\n"))]
    folder = shlex.quote(str(event.folder))
    generate = f"xlcli generate -m {folder}\n"
    if event.stopped:
        own = f"To try it as it is: {generate}" * (event.best_step is not None)
        if place_of_run(event.folder) != event.folder:
            own = f"Give it in place of --overwrite. The earlier model stays in {folder} until the first validation.\n"
        return "\n".join(lines) + f"\n\nStopped and saved. To continue, run the same command with --resume.\n{own}"
    text = "FILE " * (event.bits_per_byte is None)
    return "\n".join(lines) + f"\n\nNext:\n  xlcli eval {text}-m {folder}\n  {generate}"


def score_table(score: events.Score, model: ModelConfig) -> str:
    """An evaluation as text: metrics, set-up, loss by context."""
    rows = {
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "bits per character": _decimals(score.bits_per_char, 4),
        "perplexity per token": _decimals(score.perplexity, 3),
        "perplexity per word": _decimals(score.word_perplexity, 2),
        "mean steps": _decimals(score.mean_steps, 2),
        "correct": _decimals(score.correct, 3),
        "correct, per byte": _decimals(score.correct_per_byte, 3),
    }
    recurrence = context(model, score.mem_len, score.segment_len, score.stride)
    if score.mem_len:
        span = f", span {score.span}" * (model.effective_mem_len(score.mem_len) is not None)
        recurrence += ", full of zeros at first" * model.zero_memory + f"{span}, batch {score.batch_size}"
    if score.adapt:
        recurrence += ", weights adapted while reading"
    if score.context_cache:
        recurrence += f", cache of {score.context_cache:,} tokens"
    parts = "lines" if score.each_line else "documents"
    documents = f" in {score.documents:,} {parts}, each scored alone" * (score.documents > 1)
    lines = [
        f"{score.model} on {score.file}" + ", PARTIAL: stopped before the end" * score.partial,
        f"{counted(score.bytes, 'byte')}, {counted(score.tokens, 'token')}{documents}; {recurrence}",
        "",
        *(f"  {name:22}{value:>10}" for name, value in rows.items() if value),
        "",
        f"{amount(score.tokens_per_second)} tokens/s, {time(score.seconds)}, peak RAM {size(score.peak_rss_bytes)}, "
        f"{score.device} {score.dtype}{rounding(score.weight_dtype, score.memory_dtype)}",
    ]
    if score.rounding_cost is not None:
        tokens = f"{min(events.ROUNDING_TOKENS, score.tokens):,} tokens"
        lines.append(f"Cost of rounding: {_signed(score.rounding_cost)} bits per byte over the first {tokens}")
    text = "\n".join(lines) + "\n"
    if score.by_context:
        heading = ("context seen", "tokens", "bits per byte", "± (95 %)")
        text += "\n" + table([heading, *map(context_cells, score.by_context)])
    return text


def rounding(weight_dtype: str, memory_dtype: str) -> str:
    """Number types of rounded weights and memory: `, int8 weights`."""
    dtypes = {"weights": weight_dtype, "memory": memory_dtype}
    return "".join(f", {dtype} {name}" for name, dtype in dtypes.items() if dtype != "float32")


def context(model: ModelConfig, mem_len: int, segment_len: int, stride: int | None = None) -> str:
    """Context of a token in words: memory, or windows or segments without one."""
    if stride is not None:
        return f"no memory: windows of {counted(segment_len, 'token')} with a stride of {stride}"
    if not mem_len:
        segments = f"independent segments of {counted(segment_len, 'token')}"
        return f"no memory: {segments}, and the result depends on that length"
    effective = model.effective_mem_len(mem_len)
    return "memory of all tokens read" if effective is None else f"memory of {counted(effective, 'token')}"


def _decimals(value: float | None, digits: int) -> str:
    """A number with that many decimals, a large one as a power of ten; nothing for None."""
    return optional(value, f".{digits}f" if (value or 0) < 1e6 else ".3g")


def _signed(value: float | None) -> str:
    """A difference with four decimals and its sign: `+0.0012`; zero is never negative. Nothing for None."""
    return "" if value is None else f"{round(value, 4) + 0.0:+.4f}"


def context_cells(context: events.ContextBin) -> tuple[str, str, str, str]:
    """Tokens of context, as `1` or `2 to 3`, number of tokens, bits per byte and margin of a bin."""
    last = context.stop - 1
    seen = f"{context.start} to " * (last != context.start) + str(last)
    return seen, str(context.tokens), f"{context.bits_per_byte:.4f}", optional(context.margin, ".4f") or "-"


FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "bits/byte": ("bits_per_byte", lambda value: _decimals(value, 4)),
    "perplexity": ("perplexity", lambda value: _decimals(value, 3)),
    "tokens/s": ("tokens_per_second", amount),
    "correct": ("correct", lambda value: _decimals(value, 3)),
    "rounding": ("rounding_cost", _signed),
    "mean steps": ("mean_steps", lambda value: _decimals(value, 2)),
}
"""Figures of a table of evaluations: heading, field of `Score`, style."""
COMMON = "position", "attention", "parameters", "mem_len"
"""Fields of `Score` that models have in common if they differ in their seed only."""
SPREAD = {
    "bits_per_byte": "bits/byte",
    "bits_per_byte_low": "from",
    "bits_per_byte_high": "to",
    "document_mean": "mean",
    "document_mean_low": "from",
    "document_mean_high": "to",
}
"""Figures of a table of intervals: field of `Spread`, heading."""


def over_seeds(scores: Sequence[events.Score]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) of the figures of models whose training differs in its seed only."""
    values = {key: [getattr(score, key) for score in scores] for key, _ in FIGURES.values()}
    known = {key: found for key, found in values.items() if None not in found and max(found) < math.inf}
    mean, sd = ({key: of(found) for key, found in known.items()} for of in (fmean, stdev))
    common = {key: getattr(scores[0], key) for key in COMMON}
    return {"models": [score.model for score in scores], **common, "mean": mean, "sd": sd}


def seed_rows(seeds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a table, named in place of models, for results of `over_seeds`."""
    for each in seeds:
        for name, key in ((f"mean of {len(each['models'])} seeds", "mean"), ("standard deviation", "sd")):
            yield {"model": name, **{common: each[common] for common in COMMON}, **each[key]}


def sweep_text(
    scores: Sequence[events.Score], n_scores: int, width: int | None = None, seeds: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Evaluations of several models or memory lengths as a table, of `n_scores` that were asked for.

    `seeds` are results of `over_seeds`.
    """
    first = scores[0]
    n_models = len({score.model for score in scores})
    title = f"{n_models} models" if n_models > 1 else first.model
    rows = [
        [
            score.model + " (unfinished)" * (not score.finished),
            score.position,
            score.attention,
            amount(score.parameters),
            str(score.mem_len),
            *(style(getattr(score, key)) for key, style in FIGURES.values()),
        ]
        for score in scores
    ]
    for row in seed_rows(seeds):
        cells = (style(row.get(figure)) for figure, style in FIGURES.values())
        about = row["model"], row["position"], row["attention"], amount(row["parameters"]), str(row["mem_len"])
        rows.append([*about, *cells])
    heading = ["model", "position", "attention", "params", "memory", *FIGURES]
    left_out = {"perplexity"} if n_models > 1 else {*heading[:4]}
    kept = [i for i, name in enumerate(heading) if name not in left_out and any(row[i] for row in rows)]
    stopped = f", PARTIAL: {len(scores)} of {n_scores} evaluations" * (len(scores) < n_scores)
    dtypes = rounding(first.weight_dtype, first.memory_dtype)
    place = f"{title} on {first.file}, span {first.span}{dtypes}{stopped}\n\n"
    shown = [[row[i] for i in kept] for row in (heading, *rows)]
    return place + table(shown, width, left=range(kept.index(4) or 1))


def spread_text(
    scores: Sequence[events.Score], comparisons: Sequence[events.Comparison | None], width: int | None = None
) -> str:
    """Table of intervals over documents, of scores and of the differences of all to the first one.

    Empty for a single document. Too few documents have a dash for each interval.
    """
    names, first = _labels(scores), scores[0].spread
    rows = [(name, score.spread, ".4f") for name, score in zip(names, scores, strict=True)]
    compared = zip(names[1:], comparisons, strict=True)
    rows += [(f"{name} - {names[0]}", each.spread, "+.4f") for name, each in compared if each is not None]
    cells = [(name, *(optional(getattr(of, key), style) or "-" for key in SPREAD)) for name, of, style in rows if of]
    if first is None:
        return ""
    unit = "lines" if scores[0].each_line else "documents"
    about = f"95 % intervals over {first.documents:,} {unit}"
    if first.bits_per_byte_low is None:
        about = f"{first.documents} {unit} are too few for 95 % intervals"
    return f"\n{about}; mean: over {unit}\n\n{table([('', *SPREAD.values()), *cells], width)}"


def _labels(scores: Sequence[events.Score]) -> list[str]:
    """Names of evaluations: their models, and memory lengths if there are several of a model."""
    is_sweep = len({score.model for score in scores}) < len(scores)
    return [score.model + f" {score.mem_len}" * is_sweep for score in scores]


def pairs_text(
    scores: Sequence[events.Score],
    shape: ModelConfig,
    width: int | None = None,
    comparisons: Sequence[events.Comparison | None] = (),
    seeds: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Shares of pairs by group, of one model of this shape with intervals, or of several in columns.

    Of two, also the pairs that one of them alone gets right. `seeds` are results of `over_seeds`.
    """
    first = scores[0]
    kept = context(shape, first.mem_len, first.segment_len, first.stride)
    meaning = f"Share of pairs whose first text is more probable, in {first.file}\n"
    rows = [["all" if pair.group is None else pair.group, str(pair.pairs)] for pair in first.pairs]
    if len(scores) == 1:
        heading, about = ["share", "95 %", "per token"], f"{first.model}; {kept}\n"
        cells = [
            [f"{pair.share:.3f}", f"{pair.low:.3f} to {pair.high:.3f}", f"{pair.share_per_token:.3f}"]
            for pair in first.pairs
        ]
    else:
        names, about = _labels(scores), ""
        heading = names + ["mean", "SD"] * len(seeds)
        columns = [[f"{pair.share:.3f}" for pair in score.pairs] or ["-"] * len(rows) for score in scores]
        for each in seeds:
            own = [score for score in scores if score.model in each["models"] and score.mem_len == each["mem_len"]]
            shares = [*zip(*([pair.share for pair in score.pairs] for score in own), strict=True)]
            columns += [[f"{of(group):.3f}" for group in shares] for of in (fmean, stdev)]
        if len(scores) == 2 and (compared := next(iter(comparisons), None)):
            heading += [*(f"only {name}" for name in names), "p"]
            found = [(str(each.only_other), str(each.only_model), f"{each.p:.2g}") for each in compared.pairs]
            columns += map(list, zip(*found, strict=True))
            meaning += "only: pairs in which one of them alone prefers the first text; p: exact McNemar test\n"
        cells = [list(row) for row in zip(*columns, strict=True)]
    heading, rows = ["group", "pairs", *heading], [row + more for row, more in zip(rows, cells, strict=True)]
    return f"{about}{meaning}\n{table([heading, *rows], width)}"


def score_rows(score: events.Score) -> list[dict[str, Any]]:
    """Rows of a table of all figures: one, or one for each group of pairs."""
    if score.pairs:
        return [{"model": score.model, "mem_len": score.mem_len, **fields(pair)} for pair in score.pairs]
    spread = {key: getattr(score.spread, key, None) for key in SPREAD if key != "bits_per_byte"}
    return [fields(score, "by_context", "pairs", "spread") | spread]


class Shown(NamedTuple):
    """A token or a word: its text, made safe for a terminal, its size in bytes and its bits."""

    text: str
    n_bytes: int
    bits: float


def by_word(tokens: Iterable[Shown]) -> Iterator[Shown]:
    """Tokens joined to words. A word begins with the token that begins with a blank, or ends the line."""
    word: list[Shown] = []
    for token in tokens:
        if token.text[:1] in (" ", "\t", "\n") and any(part.text.strip() for part in word):
            yield joined(word)
            word = []
        word.append(token)
    if word:
        yield joined(word)


def joined(tokens: Sequence[Shown]) -> Shown:
    """One word of these tokens."""
    texts, sizes, bits = zip(*tokens, strict=True)
    return Shown("".join(texts), sum(sizes), sum(bits))


def stats_line(stats: events.StreamStats) -> str:
    """Totals of a stream in one line."""
    return (
        f"{counted(stats.lines, 'line')}, {size(stats.bytes)}, {counted(stats.tokens, 'token')}, "
        f"{stats.bits_per_byte:.4f} bits per byte, {amount(stats.lines_per_second)} lines/s, "
        f"{amount(stats.tokens_per_second)} tokens/s, {time(stats.seconds)}"
    )


def to_json(value: Any) -> str:
    """One line of JSON. NaN and infinity become null, bytes of file names that are not UTF-8 U+FFFD."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, events.TokenLogprob):
        return _plain(fields(value, *([] if value.best else ["best"])))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(fields(value))
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | Path):
        return as_utf8(str(value))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def fields(event: Any, *without: str) -> dict[str, Any]:
    """Name and value of each attribute of a dataclass, but for some, and for those that its text leaves out, too."""
    names = (field.name for field in dataclasses.fields(event) if field.name not in without and field.repr)
    return {name: getattr(event, name) for name in names}


def text_object(event: events.LineScore | events.TokenScore) -> dict[str, Any]:
    """The JSON object of a token, with its prediction if it was asked for, or of a line without its line end.

    `base64` has the bytes of a text that is not UTF-8.
    """
    text = event.text
    if isinstance(event, events.LineScore):
        text = text.removesuffix(b"\r\n").removesuffix(b"\n")
    tree = fields(event, "spans", "prediction") | {"text": text}
    try:
        text.decode()
    except UnicodeDecodeError:
        tree["base64"] = base64.b64encode(text).decode()
    if isinstance(event, events.TokenScore) and event.prediction is not None:
        tree |= event.prediction.columns
    return tree


def score_object(score: events.Score) -> dict[str, Any]:
    """The JSON object of an evaluation."""
    bins = [{"from": each.start, "to": each.stop} | fields(each, "start", "stop") for each in score.by_context]
    return {**fields(score), "by_context": bins}


def generated_object(event: events.Generated, *, without_prompt: bool) -> dict[str, Any]:
    """The JSON object of a finished sample; `logprobs` only if they were asked for."""
    return fields(event, "sample", *["logprobs"] * (event.logprobs is None), *["prompt"] * without_prompt)
