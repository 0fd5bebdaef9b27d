"""Progress of a long call in a line of the terminal or notebook, which is erased at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from xlcli.events import Progress, ProgressMeter, Step

FIRST_SECONDS, FIRST_SHARE = 1.0, 0.01  # time and share of the text before which nothing is shown


class ProgressLine:
    """A context that draws on stderr how far a text or a run is, if stderr is a terminal or in a notebook.

    `n_bytes` is the size of the text; 0 of a run. Nothing is drawn unless it is `wanted`.
    """

    def __init__(self, n_bytes: int, *, wanted: bool) -> None:
        is_seen = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
        self._is_drawn = wanted and is_seen
        self._meter = ProgressMeter("reading", n_bytes, "bytes")
        self._n_read = 0
        self._line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._line:
            self._draw("")
            sys.stderr.write("\r")

    def read(self, n_bytes: int) -> None:
        """Counts bytes that were read, and draws the line if that is due."""
        self._n_read += n_bytes
        for event in self._meter.report(self._n_read):
            self.show(event)

    def show(self, event: Progress) -> None:
        """Draws the line of an event with a rate and a total."""
        if not (self._is_drawn and event.rate and event.total):
            return
        share, seconds = event.done / event.total, event.done / event.rate
        if share >= FIRST_SHARE and seconds >= FIRST_SECONDS:
            self._draw(f"{100 * share:.0f} % read, {seconds / share - seconds:.0f} s left")

    def show_step(self, step: Step) -> None:
        """Draws the line of a step of training."""
        if self._is_drawn:
            self._draw(f"step {step.step} of about {step.last_step}, {step.bits_per_byte:.3f} bits/byte")

    def _draw(self, line: str) -> None:
        """Writes a line over the one before."""
        sys.stderr.write("\r" + line.ljust(len(self._line)))
        sys.stderr.flush()
        self._line = line
