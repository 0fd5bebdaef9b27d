"""Plots: loss by context and memory length, training curve. Matplotlib is optional."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.cli.outputs import write_output
from xlcli.cli.quantities import averaged
from xlcli.events import Score
from xlcli.files import process_folder
from xlcli.markup import visible
from xlcli.store.layout import numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMOOTHED = 50  # number of means in the smoothed training curve
ENTRY_INCHES = 0.21  # height of a line of the legend below a picture
_TOO_LARGE = 10**18  # numbers of a forged curve with which Matplotlib cannot calculate


def draw_by_context(path: str, scores: Sequence[Score]) -> None:
    """Draws bits per byte over context length in tokens with 95 % intervals, a line per model."""
    figure, axes = _picture()
    for score in scores:
        middles = [(part.start + part.stop) / 2 for part in score.by_context]
        values = [part.bits_per_byte for part in score.by_context]
        # A margin that is not a number has no bar.
        margins = [math.nan if part.margin is None else part.margin for part in score.by_context]
        label = f"{visible(score.model)}, memory {score.mem_len}: {score.bits_per_byte:.4f}"
        axes.errorbar(middles, values, margins, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="tokens of context seen", ylabel="bits per byte")
    _save(figure, f"loss by context on {scores[0].file}", path)


def draw_by_memory(path: str, scores: Sequence[Score]) -> None:
    """Draws bits per byte over memory length, at equal distances since one may be 0, a line per model."""
    figure, axes = _picture()
    lengths = sorted({score.mem_len for score in scores})
    for model in dict.fromkeys(score.model for score in scores):
        points = sorted((score.mem_len, score.bits_per_byte) for score in scores if score.model == model)
        places = [lengths.index(mem_len) for mem_len, _ in points]
        axes.plot(places, [bits for _, bits in points], marker="o", label=visible(model))
    axes.set_xticks(range(len(lengths)), map(str, lengths))
    label = "memory in tokens"
    if lengths[0] == 0:
        label += f" (0: segments of {min(scores, key=lambda score: score.mem_len).segment_len} tokens)"
    axes.set(xlabel=label, ylabel="bits per byte")
    _save(figure, f"loss by memory length on {scores[0].file}", path)


def draw_training(name: str, rows: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Draws bits per byte of training and validation, of rows of `metrics.jsonl`, over tokens; False without any."""
    tokens, losses = _curve(rows, "bits_per_byte")
    valid_tokens, valid_losses = _curve(rows, "validation_bits_per_byte")
    ascending = sorted(losses + valid_losses)
    if not ascending:
        return False
    figure, axes = _picture()
    from matplotlib.ticker import EngFormatter

    if losses:
        axes.plot(tokens, losses, color="C0", alpha=0.25, linewidth=0.8)
        smooth = averaged(losses, _SMOOTHED)
        axes.plot(averaged(tokens, _SMOOTHED), smooth, color="C0", label=f"training: {smooth[-1]:.4f}")
    if valid_losses:
        label = f"validation: {min(valid_losses):.4f} at best"
        axes.plot(valid_tokens, valid_losses, color="C1", marker="o", label=label)
    median = ascending[len(ascending) // 2]
    if ascending[-1] > 2 * median:  # the first steps would take most of the picture
        axes.set_ylim(0.95 * ascending[0], max(2 * median, *(valid_losses or losses[-1:])))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel="tokens", ylabel="bits per byte")
    _save(figure, title, name)
    return True


def _curve(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Tokens and values of this key, of the rows that have both; not numbers too large to draw."""
    tokens, values = [], []
    for row in rows:
        figures = numbers(row)
        x, y = figures.get("tokens", math.inf), figures.get(key, math.inf)
        if abs(x) < _TOO_LARGE and abs(y) < _TOO_LARGE:
            tokens.append(x)
            values.append(y)
    return tokens, values


def _picture() -> tuple[Figure, Axes]:
    """A new picture and its axes. Of settings in files, Matplotlib reads only those that `MATPLOTLIBRC` names."""
    folder = os.environ["MPLCONFIGDIR"] = str(process_folder())
    with contextlib.chdir(folder):  # it would read those of the working folder when it is imported
        from matplotlib.colors import TABLEAU_COLORS
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colors = list(TABLEAU_COLORS)  # the same color returns with another style of line
    axes.set_prop_cycle(linestyle=["-"] * 10 + ["--"] * 10 + [":"] * 10, color=colors * 3)
    return figure, axes


def _save(figure: Figure, title: str, name: str) -> None:
    """Writes a picture, atomically if the file is a regular one."""
    (axes,) = figure.axes
    axes.set_title(visible(title), parse_math=False)
    axes.grid(alpha=0.3)
    legend = figure.legend(loc="outside lower left")  # beside the data, which it could hide
    for label in legend.get_texts():
        label.set_parse_math(False)
    figure.set_figheight(4.5 + ENTRY_INCHES * len(legend.get_texts()))
    path, picture = Path(name), io.BytesIO()
    format_ = path.suffix[1:].lower() or "png"  # a pipe or device may have no suffix
    figure.savefig(picture, dpi=150, format=format_)
    write_output(path, [picture.getvalue()])
