"""Plot of `xlcli eval --plot`: loss by context length. Matplotlib is optional and checked before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.events import Score

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(name: str) -> None:
    """Checks that the plot can be drawn; `ConfigError` otherwise."""
    path = Path(name)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {name} is not a picture file.", "Try --plot loss.png.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib.", 'Install it: pip install "xlcli[plot]".')


def draw(name: str, scores: Sequence[Score]) -> None:
    """Draws bits per byte over context length in tokens with 95 % confidence intervals, a line per memory length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for score in scores:
        middles = [(each.start + each.stop) / 2 for each in score.by_context]
        values = [each.bits_per_byte for each in score.by_context]
        errors = [each.margin or 0.0 for each in score.by_context]
        axes.errorbar(
            middles, values, errors, marker="o", capsize=3, label=f"memory {score.mem_len}: {score.bits_per_byte:.4f}"
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of context seen", ylabel="bits per byte", title=f"{scores[0].model} on {scores[0].file}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(name, dpi=150)
