"""The rows of `metrics.jsonl` for TensorBoard (`xlcli train --tensorboard`). Needs the extra `tensorboard`.

Each process has its own writer, which first makes readers drop everything that the folder holds (`purge_step`), and
then writes all rows so far. The same happens at a roll-back. So no step occurs twice, whether a run is resumed, rolled
back or replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xlcli.cli.outputs import Sink
from xlcli.errors import ResourceError
from xlcli.events import Event, Step, Validation
from xlcli.files import cannot_write
from xlcli.store.commit import place_of_run
from xlcli.store.layout import TENSORBOARD, numbers, read_metrics

FLUSH_SECONDS = 5  # maximum age of what TensorBoard does not show yet
TAGS = {  # key of `metrics.jsonl` to TensorBoard tag
    "nats": "train/nats_per_token",
    "bits_per_byte": "train/bits_per_byte",
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "tokens_per_second": "train/tokens_per_second",
    "mean_steps": "train/steps_per_token",
    "validation_bits_per_byte": "validation/bits_per_byte",
}


class EventFile(Sink):
    """Writes the metrics of a run into its model folder, from the first event on."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._writer: Any = None  # until the first event
        self._step = 0  # of the latest event

    def add(self, event: Event) -> None:
        """Writes the metrics of a step or validation. `ResourceError` if it cannot, or the folder is a link."""
        if isinstance(event, Step):
            metrics = asdict(event)
            is_next = event.step > self._step
        elif isinstance(event, Validation):
            metrics = {"validation_bits_per_byte": event.bits_per_byte}
            is_next = event.step >= self._step
        else:
            return
        try:
            if self._writer is not None and is_next:
                self._write(metrics, event.step, time.time())
            else:  # the first event, or one after a roll-back
                self._start_over(event.seconds)
        except OSError as error:
            raise cannot_write(self.model / TENSORBOARD, error) from error
        self._step = event.step

    def close(self) -> None:
        """Writes what is left, and closes the file; raises `OSError` if the disk is full."""
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        with suppress(OSError):
            self.close()

    def _start_over(self, seconds: float) -> None:
        """Writes all rows of `metrics.jsonl`, which include the present event, after `seconds` of training."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.model / TENSORBOARD
        if folder.is_symlink():
            raise ResourceError(f"{folder} is a link, which is not followed.", "Remove the link.")
        self.close()
        threading.excepthook = _print_no_oserror
        self._writer = SummaryWriter(str(folder), purge_step=0, flush_secs=FLUSH_SECONDS)
        started = time.time() - seconds
        seconds_of_row = 0.0
        for row in read_metrics(place_of_run(self.model)):
            seconds_of_row = numbers(row).get("seconds", seconds_of_row)
            self._write(row, row["step"], started + seconds_of_row)

    def _write(self, row: Mapping[str, Any], step: int, wall_time: float) -> None:
        metrics = numbers(row)
        for key, tag in TAGS.items():
            if key in metrics:
                self._writer.add_scalar(tag, metrics[key], step, wall_time)


def _print_no_oserror(ending: threading.ExceptHookArgs) -> None:
    """Hook for threads that end with an exception: that of the writer prints a traceback of what `add` raises."""
    if not isinstance(ending.exc_value, OSError):
        threading.__excepthook__(ending)
