"""The folder of a run on disk: written when the run begins, and restored from a checkpoint when it continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xlcli.events import Notice
from xlcli.files import write_atomic
from xlcli.store import layout
from xlcli.store.layout import DOCUMENTS, HELD_OUT, write_config
from xlcli.training import checkpoint
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun


def write_new(folder: Path, ready: Prepared, run: TrainingRun, record: dict[str, Any]) -> Path:
    """Writes a run at step 0 and returns its checkpoint. It can be resumed as soon as `config.json` exists."""
    ready.tokenizer.save(folder)
    _write_held_out(folder, ready)
    layout.trim_metrics(folder, -1, validated=False)
    layout.write_record(folder, record | {"finished": False})
    write_config(folder, ready.config, encoding=ready.config.train.weights)
    return checkpoint.save(run, folder, seconds=0.0, corpus=ready.identity)


def restore(
    point: Path, run: TrainingRun, ready: Prepared, folder: Path, *, allow_data_change: bool
) -> Iterator[Notice]:
    """Restores run and folder from a checkpoint."""
    warnings = checkpoint.load(
        run, point, folder, ready.tokenizer, corpus=ready.identity, allow_data_change=allow_data_change
    )
    yield from (Notice(warning, "warning") for warning in warnings)
    if not run.ranks.is_first:
        return
    if allow_data_change:
        _write_held_out(folder, ready)
    layout.trim_metrics(folder, run.step, validated=run.validated_step == run.step)
    write_config(folder, ready.config, encoding=ready.config.train.weights)


def _write_held_out(folder: Path, ready: Prepared) -> None:
    for name, part in (("valid", ready.parts.valid), ("test", ready.parts.test)):
        if part.n_bytes:
            write_atomic(folder / HELD_OUT[name], part.read())
        else:
            (folder / HELD_OUT[name]).unlink(missing_ok=True)
        if part.n_bytes and ready.config.train.reset_on_document:
            write_atomic(folder / DOCUMENTS[name], (b"%d\n" % start for start in part.documents))
        else:
            (folder / DOCUMENTS[name]).unlink(missing_ok=True)
