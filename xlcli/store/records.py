"""What a training run writes down beside its weights: `record.json`, once, and `metrics.jsonl`, row by row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xlcli.files import append_line, read_json, write_atomic
from xlcli.files.plain import open_regular

RECORD = "record.json"
METRICS = "metrics.jsonl"
_LINE_LIMIT = 2**16


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replaces the record: what the model was made of, from and how. `xlcli models` shows `corpus`, `bits_per_byte`."""
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomic(folder / RECORD, text.encode() + b"\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The record; empty when there is none, `CheckpointError` when it is damaged."""
    path = folder / RECORD
    return read_json(path) if os.path.lexists(path) else {}


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Adds one row to the curve."""
    line = json.dumps(row, allow_nan=False).encode()
    if len(line) >= _LINE_LIMIT:
        raise ValueError(f"a row of {len(line):,} bytes could not be read again")
    append_line(folder / METRICS, line)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of the curve in order; a line torn by a crash is left out."""
    return list(_rows(folder / METRICS))


def trim_metrics(folder: Path, step: int) -> None:
    """Drops torn lines and rows later than `step`, so that a run resumed there does not write them twice."""
    rows = read_metrics(folder)
    kept = [row for row in rows if row.get("step", 0) <= step]
    if os.path.lexists(folder / METRICS):
        write_atomic(folder / METRICS, (json.dumps(row, allow_nan=False).encode() + b"\n" for row in kept))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not os.path.lexists(path):
        return
    with open_regular(path) as (descriptor, _), os.fdopen(os.dup(descriptor), "rb") as file:
        while line := file.readline(_LINE_LIMIT):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step", 0), int | float):
                yield row
