"""Scores of evaluations and streams as text, and rows of tables of them. Model text must be escaped for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

from xlcli import events
from xlcli.cli.objects import fields
from xlcli.cli.quantities import (
    approximate_count,
    compact_number,
    decimals_or_blank,
    format_bytes,
    format_duration,
    number_or_blank,
)
from xlcli.cli.terminal import table
from xlcli.config import ModelConfig
from xlcli.errors import named, shortened


def score_table(score: events.Score, model: ModelConfig) -> str:
    """An evaluation as text: metrics, set-up, loss by context."""
    metrics = {
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "bits per character": decimals_or_blank(score.bits_per_char, 4),
        "perplexity per token": decimals_or_blank(score.perplexity, 3),
        "perplexity per word": decimals_or_blank(score.word_perplexity, 2),
        "mean steps": decimals_or_blank(score.mean_steps, 2),
        "correct": decimals_or_blank(score.correct, 3),
        "  from (95 %)": decimals_or_blank(score.correct_low, 3),
        "  to": decimals_or_blank(score.correct_high, 3),
        "  by chance": decimals_or_blank(score.correct_by_chance, 3),
        "correct, per byte": decimals_or_blank(score.correct_per_byte, 3),
    }
    recurrence = describe_context(model, score.mem_len, score.segment_len, score.stride)
    if score.mem_len:
        if model.zero_memory:
            recurrence += ", full of zeros at first"
        if model.effective_mem_len(score.mem_len) is not None:
            recurrence += f", span {score.span}"
        recurrence += f", batch {score.batch_size}"
    recurrence += describe_learning(adapt=score.adapt, context_cache=score.context_cache)
    title = f"{score.model} on {score.file}"
    if score.partial:
        title += ", PARTIAL: stopped before the end"
    size = f"{approximate_count(score.bytes, 'byte')}, {approximate_count(score.tokens, 'token')}"
    if score.documents > 1:
        size += f" in {score.documents:,} {_unit(score)}, each scored alone"
    speed = f"{compact_number(score.tokens_per_second)} tokens/s, {format_duration(score.seconds)}"
    machine = f"{score.device} {score.dtype}{rounding(score.weight_dtype, score.memory_dtype)}"
    text = f"{title}\n{size}; {recurrence}\n\n"
    for name, value in metrics.items():
        if value:
            text += f"  {name:22}{value:>10}\n"
    text += f"\n{speed}, peak RAM {format_bytes(score.peak_rss_bytes)}, {machine}\n"
    if score.by_context:
        heading = ("context seen", "tokens", "bits per byte", "± (95 %)")
        text += "\n" + table([heading, *map(context_cells, score.by_context)])
    return text


def rounding(weight_dtype: str, memory_dtype: str) -> str:
    """Number types of rounded weights and memory: `, int8 weights`."""
    text = ""
    if weight_dtype != "float32":
        text += f", {weight_dtype} weights"
    if memory_dtype != "float32":
        text += f", {memory_dtype} memory"
    return text


def describe_context(model: ModelConfig, mem_len: int, segment_len: int, stride: int | None = None) -> str:
    """Context of a token in words: memory, or windows or segments without one."""
    if stride == 1:
        return f"no memory: each token from the {approximate_count(segment_len, 'token')} before it"
    if stride is not None:
        return f"no memory: windows of {approximate_count(segment_len, 'token')} with a stride of {stride}"
    if not mem_len:
        segments = f"independent segments of {approximate_count(segment_len, 'token')}"
        return f"no memory: {segments}, and the result depends on that length"
    effective = model.effective_mem_len(mem_len)
    if effective is None:
        return "memory of all tokens read"
    sinks = f" and the first {model.n_sinks} of the text" if model.n_sinks else ""
    return f"memory of {approximate_count(effective, 'token')}{sinks}"


def describe_learning(*, adapt: bool, context_cache: int | None) -> str:
    """What a model learns while it reads, to put behind its context in words; empty if nothing."""
    text = ""
    if adapt:
        text += ", weights adapted while reading"
    if context_cache:
        text += f", cache of {context_cache:,} tokens"
    return text


def context_cells(context: events.ContextBin) -> tuple[str, str, str, str]:
    """Tokens of context, as `1` or `2 to 3`, number of tokens, bits per byte and margin of a bin."""
    seen = str(context.start)
    if context.stop > context.start + 1:
        seen += f" to {context.stop - 1}"
    return seen, str(context.tokens), f"{context.bits_per_byte:.4f}", number_or_blank(context.margin, ".4f") or "-"


FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {  # columns of a table: heading, field of `Score`, style
    "bits/byte": ("bits_per_byte", partial(decimals_or_blank, digits=4)),
    "perplexity": ("perplexity", partial(decimals_or_blank, digits=3)),
    "tokens/s": ("tokens_per_second", compact_number),
    "correct": ("correct", partial(decimals_or_blank, digits=3)),
    "by chance": ("correct_by_chance", partial(decimals_or_blank, digits=3)),
    "mean steps": ("mean_steps", partial(decimals_or_blank, digits=2)),
}
COMMON = "position", "attention", "parameters", "mem_len"  # fields of `Score` that models with other seeds share
LONGEST_NAME = 60  # number of characters of the columns of a row that name a document
SPREAD = {  # figures of a table of intervals: field of `Spread`, heading
    "bits_per_byte": "bits/byte",
    "bits_per_byte_low": "from",
    "bits_per_byte_high": "to",
    "document_mean": "mean",
    "document_mean_low": "from",
    "document_mean_high": "to",
}


def over_seeds(scores: Sequence[events.Score]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) of the figures of models whose training differs in its seed only."""
    means, deviations = {}, {}
    for key, _ in FIGURES.values():
        values = [getattr(score, key) for score in scores]
        if None not in values and max(values) < math.inf:
            means[key] = fmean(values)
            deviations[key] = stdev(values)
    common = {key: getattr(scores[0], key) for key in COMMON}
    return {"models": [score.model for score in scores], **common, "mean": means, "sd": deviations}


def seed_rows(seeds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a table, named in place of models, for results of `over_seeds`."""
    for group in seeds:
        common = {key: group[key] for key in COMMON}
        name = seeds_name(group["models"])
        yield {"model": f"mean of {name}", **common, **group["mean"]}
        yield {"model": f"standard deviation of {name}", **common, **group["sd"]}


seeds_name = partial(named, most=2)
"""Models that differ in their seeds, in words: `xl-1, xl-2 and 3 more`."""


def sweep_text(
    scores: Sequence[events.Score], n_scores: int, width: int | None = None, seeds: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Scores of several models or memory lengths as a table, of `n_scores` asked for; `seeds`: see `over_seeds`."""
    first = scores[0]
    n_models = len({score.model for score in scores})
    title = first.model
    # One model has its name above the table, and its figures are compared by memory length.
    left_out = {"model", "position", "attention", "params"}
    if n_models > 1:
        title = f"{n_models} models"
        left_out = {"perplexity"}
    if len({score.train_steps for score in scores}) == 1:
        left_out.add("steps")
    title += f" on {first.file}, span {first.span}{rounding(first.weight_dtype, first.memory_dtype)}"
    if len(scores) < n_scores:
        title += f", PARTIAL: {len(scores)} of {n_scores} evaluations"

    rows = []
    for score in scores:
        unfinished = "" if score.finished else " (unfinished)"
        rows.append(_sweep_row(score.model + unfinished, fields(score)))
    for values in seed_rows(seeds):
        rows.append(_sweep_row(values["model"], values))
    # Columns without any cell are left out; those of texts, which come before the memory, are flush left.
    heading = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
    n_texts = heading.index("memory")
    cells = [heading, *([row[name] for name in heading] for row in rows)]
    return f"{title}\n\n{table(cells, width, left=range(n_texts or 1))}"


def _sweep_row(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a model, or of what several have in common, by heading."""
    row = {"model": name, "position": values["position"], "attention": values["attention"]}
    row |= {"params": compact_number(values["parameters"]), "memory": str(values["mem_len"])}
    row["steps"] = number_or_blank(values.get("train_steps"), ",")
    for heading, (key, style) in FIGURES.items():
        row[heading] = style(values.get(key))
    return row


def spread_text(
    scores: Sequence[events.Score], comparisons: Sequence[events.Comparison | None], width: int | None = None
) -> str:
    """Returns a table of intervals of scores, and of differences to the first one; empty for a single document."""
    first = scores[0].spread
    if first is None:
        return ""
    names = _labels(scores)
    rows = []
    for name, score in zip(names, scores, strict=True):
        if score.spread is not None:
            rows.append(_spread_row(name, score.spread, ".4f"))
    for name, comparison in zip(names[1:], comparisons, strict=True):
        if comparison is not None and comparison.spread is not None:
            rows.append(_spread_row(f"{name} - {names[0]}", comparison.spread, "+.4f"))
    unit = _unit(scores[0])
    counted = f"{first.documents:,} {unit}"
    if scores[0].each_line:
        counted += " that are not blank"
    about = f"95 % intervals over {counted}, taken as independent"
    if first.bits_per_byte_low is None:
        about = f"{counted} are too few for 95 % intervals"
    return f"\n{about}; mean: over {unit}\n\n{table([('', *SPREAD.values()), *rows], width)}"


def seeds_text(scores: Sequence[events.Score], seeds: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """Returns a table of the differences of groups of seeds; without groups a remark on intervals, or nothing."""
    figure = "share" if scores[0].pairs else "bits_per_byte"
    rows = []
    for group in seeds:
        difference = group["difference"]
        if difference is None:  # this group is what the others are compared with
            continue
        name = f"{seeds_name(group['models'])} - {seeds_name(difference['to'])}, memory {group['mem_len']}"
        rows.append([name, *(f"{difference[key]:+.4f}" for key in (figure, "low", "high"))])
    if rows:
        about = "Means over training seeds, which other intervals do not cover: differences with 95 % intervals (Welch)"
        heading = ["", "share" if scores[0].pairs else "bits/byte", "from", "to"]
        return f"\n{about}\n\n{table([heading, *rows], width)}"
    has_one_model = len({score.model for score in scores}) == 1
    spread = scores[0].spread
    has_intervals = bool(scores[0].pairs) or (spread is not None and spread.bits_per_byte_low is not None)
    if has_one_model or not has_intervals:
        return ""
    remark = "Intervals do not cover chance in training: another seed can make as large a difference."
    return f"\n{remark} Two or more seeds of each kind of model have an interval over seeds.\n"


def documents_text(scores: Sequence[events.Score], width: int | None = None) -> str:
    """Table of the documents of the text by one or several models, the least predictable one first; empty if none."""
    names = [document_name(row) for row in scores[0].by_document[::2]]  # rows and their documents stand by turns
    by_model = [score.by_document[1::2] for score in scores]
    has_one_model = len(scores) == 1
    shows_characters = has_one_model and any(document.characters != document.bytes for document in by_model[0])
    rows = []
    for name, *documents in zip(names, *by_model, strict=True):
        first = documents[0]
        cells = [name or str(first.document), str(first.bytes), number_or_blank(first.words, "")]
        if has_one_model:
            cells.append(decimals_or_blank(first.word_perplexity, 2))
        cells += [f"{document.bits_per_byte:.4f}" for document in documents]
        if shows_characters:
            cells.append(decimals_or_blank(first.bits_per_char, 4))
        models = [score.model for score, each in zip(scores, documents, strict=True) if each.columns.get("trained_on")]
        cells.append(", ".join(dict.fromkeys(models)))
        rows.append((-first.bits_per_byte, cells))
    if not rows:
        return ""
    heading = ["document", "bytes", "words"]
    heading += ["perplexity per word", "bits/byte"] if has_one_model else _labels(scores)
    if shows_characters:
        heading.append("bits/char")
    heading.append("training text of")
    columns = zip(heading, *(cells for _, cells in sorted(rows)), strict=True)
    filled = [column for column in columns if any(column[1:])]  # words may be unknown, and no document trained on
    return f"\n{table([*zip(*filled, strict=True)], width)}"


def document_name(row: events.Row) -> str:
    """The file of a document, or the columns of its row, in one text that is not too long; empty without columns."""
    name = ", ".join(str(value) for value in row.fields.values() if value is not None)
    return shortened(name, LONGEST_NAME)


def _unit(score: events.Score) -> str:
    return "lines" if score.each_line else "documents"


def _spread_row(name: str, spread: events.Spread, style: str) -> list[str]:
    return [name, *(number_or_blank(getattr(spread, key), style) or "-" for key in SPREAD)]


def _labels(scores: Sequence[events.Score]) -> list[str]:
    """Names of evaluations: their models, and memory lengths if there are several of a model."""
    names = [score.model for score in scores]
    if len(set(names)) < len(names):
        names = [f"{score.model} {score.mem_len}" for score in scores]
    return names


def pairs_text(
    scores: Sequence[events.Score],
    shape: ModelConfig,
    width: int | None = None,
    comparisons: Sequence[events.Comparison | None] = (),
    seeds: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns a table of shares of pairs, with a row for each group of pairs and columns for each model.

    One model has its context above, which depends on its `shape`. Two have columns of the pairs that one of them alone
    gets right. `seeds` are results of `over_seeds`.
    """
    first = scores[0]
    names = _labels(scores)
    has_one_model = len(scores) == 1
    meaning = f"Share of pairs whose first text is more probable, in {first.file}\n"
    if has_one_model:
        meaning = f"{first.model}; {describe_context(shape, first.mem_len, first.segment_len, first.stride)}\n{meaning}"
    # Columns of cells below their headings; each has a cell for each group of pairs.
    columns = [
        ["group", *("all" if pair.group is None else pair.group for pair in first.pairs)],
        ["pairs", *(str(pair.pairs) for pair in first.pairs)],
    ]
    for name, score in zip(names, scores, strict=True):
        columns.append(["share" if has_one_model else name, *(f"{pair.share:.3f}" for pair in score.pairs)])
        columns.append(["95 %", *(f"{pair.low:.3f} to {pair.high:.3f}" for pair in score.pairs)])
        if any(pair.ties for pair in score.pairs):
            columns.append(["ties", *(str(pair.ties) for pair in score.pairs)])
    if has_one_model:
        columns.append(["per token", *(f"{pair.share_per_token:.3f}" for pair in first.pairs)])
    for group in seeds:
        columns += _seed_columns(scores, group)
    if len(scores) == 2 and comparisons and comparisons[0] is not None:
        compared = comparisons[0].pairs
        columns.append([f"only {names[0]}", *(str(pair.only_other) for pair in compared)])
        columns.append([f"only {names[1]}", *(str(pair.only_model) for pair in compared)])
        columns.append(["p", *(f"{pair.p:.2g}" for pair in compared)])
        meaning += "only: pairs in which one of them alone prefers the first text; p: exact McNemar test\n"
    return f"{meaning}\n{table([*zip(*columns, strict=True)], width)}"


def _seed_columns(scores: Sequence[events.Score], group: Mapping[str, Any]) -> list[list[str]]:
    """Columns of means and standard deviations of the shares of models that differ in their seed only."""
    of_seeds = [score for score in scores if score.model in group["models"] and score.mem_len == group["mem_len"]]
    means, deviations = [f"mean of {seeds_name(group['models'])}"], ["SD"]
    for pairs in zip(*(score.pairs for score in of_seeds), strict=True):  # those of a group of pairs
        shares = [pair.share for pair in pairs]
        means.append(f"{fmean(shares):.3f}")
        deviations.append(f"{stdev(shares):.3f}")
    return [means, deviations]


def score_rows(score: events.Score) -> list[dict[str, Any]]:
    """Rows of a table of all figures: one, or one for each group of pairs."""
    if score.pairs:
        return [{"model": score.model, "mem_len": score.mem_len, **fields(pair)} for pair in score.pairs]
    row = fields(score, "by_context", "pairs", "spread")
    for key in SPREAD:
        if key != "bits_per_byte":
            row[key] = getattr(score.spread, key, None)
    return [row]


def stats_line(stats: events.StreamStats) -> str:
    """Totals of a stream in one line."""
    units = approximate_count(stats.records, "record") if stats.records else approximate_count(stats.lines, "line")
    if stats.skipped:
        units += f" ({approximate_count(stats.skipped, 'line')} left out)"
    size = f"{units}, {format_bytes(stats.bytes)}"
    if stats.bits_per_byte is None:
        return f"nothing to score: {size}"
    tokens = f"{approximate_count(stats.tokens, 'token')}, {stats.bits_per_byte:.4f} bits per byte"
    texts_per_second = f"{compact_number(stats.lines_per_second)} lines/s"
    if stats.records:
        texts_per_second = f"{compact_number(stats.records / stats.busy_seconds)} records/s"
    speed = f"{texts_per_second}, {compact_number(stats.tokens_per_second)} tokens/s"
    time = f"busy {format_duration(stats.busy_seconds)} of {format_duration(stats.seconds)}"
    return f"{size}, {tokens}, {speed}, {time}"
