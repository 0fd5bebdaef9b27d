"""TensorBoard event files of `xlcli train --tensorboard`: the rows of `metrics.jsonl`. Needs the extra `tensorboard`.

Each process writes its own file, which begins with a session log: readers then drop everything that the folder
holds from step 0 on (the `purge_step` of other writers). All rows so far follow. The same happens at a roll-back. So no
step occurs twice, whether a run is resumed, rolled back or replaced.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xlcli.cli.outputs import Sink
from xlcli.errors import ResourceError
from xlcli.events import Event, Step, Validation
from xlcli.files import cannot_write
from xlcli.store.commit import place_of_run
from xlcli.store.layout import EVENTS, TENSORBOARD, numbers, read_metrics

TAGS = {
    "nats": "train/nats_per_token",
    "bits_per_byte": "train/bits_per_byte",
    "lr": "train/learning_rate",
    "grad_norm": "train/gradient_norm",
    "tokens_per_second": "train/tokens_per_second",
    "mean_steps": "train/steps_per_token",
    "validation_bits_per_byte": "validation/bits_per_byte",
}
"""Key of `metrics.jsonl` to TensorBoard tag."""


class EventFile(Sink):
    """The event file of one process, made with its first event.

    Args:
        model: Model folder.
    """

    def __init__(self, model: Path) -> None:
        self.model = model
        self._writer: Any = None
        self._step = 0

    def add(self, event: Event) -> None:
        """Writes the metrics of a step or validation; ignores other events.

        Raises:
            ResourceError: The file cannot be written, or its folder is a link.
        """
        if not isinstance(event, Step | Validation):
            return
        try:
            if self._writer is None or event.step < self._step + isinstance(event, Step):
                self._start_over(event.seconds)
            else:
                is_step = isinstance(event, Step)
                row = asdict(event) if is_step else {"validation_bits_per_byte": event.bits_per_byte}
                self._write({**row, "step": event.step}, time.time())
            self._step = event.step
            self._writer.flush()
        except OSError as error:
            raise cannot_write(self.model / TENSORBOARD, error) from error

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()

    discard = close

    def _start_over(self, seconds: float) -> None:
        """Writes all rows of `metrics.jsonl`, which include the present event, after `seconds` of training."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._writer is None:
            folder = self.model / TENSORBOARD
            if folder.is_symlink():
                raise ResourceError(f"{folder} is a link, which is not followed.", "Remove the link.")
            folder.mkdir(exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"{EVENTS}{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
            self._writer = RecordWriter((folder / name).open("xb"))
            self._writer.write(Record(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        start = SessionLog(status=SessionLog.START)
        self._writer.write(Record(wall_time=time.time(), step=0, session_log=start).SerializeToString())
        started, at = time.time() - seconds, 0.0
        for row in read_metrics(place_of_run(self.model)):
            at = numbers(row).get("seconds", at)
            self._write(row, started + at)

    def _write(self, row: Mapping[str, Any], wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = numbers(row)
        values = [Summary.Value(tag=tag, simple_value=found[key]) for key, tag in TAGS.items() if key in found]
        record = Record(wall_time=wall_time, step=row["step"], summary=Summary(value=values))
        self._writer.write(record.SerializeToString())
