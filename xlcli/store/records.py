"""Records of a training run: `record.json` with data, hardware and scores, `metrics.jsonl` with one row per step."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xlcli.events import ScoredText
from xlcli.files import append_line, as_utf8, open_regular, read_json, sync_file, write_atomic

RECORD = "record.json"
METRICS = "metrics.jsonl"
_STEP_LIMIT = 2**63
_LINE_LIMIT = 2**16
"""Maximum size of a row in bytes."""


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replaces `record.json`. `xlcli models` shows `corpus` and `bits_per_byte`; resuming uses `preset`, `runtime`."""
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomic(folder / RECORD, as_utf8(text).encode() + b"\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The content of `record.json`, empty if the file is missing; `CheckpointError` if it is damaged."""
    path = folder / RECORD
    return read_json(path) if os.path.lexists(path) else {}


def scored_text(record: Mapping[str, Any]) -> ScoredText | None:
    """The text that `bits_per_byte` belongs to; None if the record does not say it, or has impossible numbers."""
    found = record.get("scored")
    names = ("bytes", "of_bytes", "mem_len")
    if not isinstance(found, dict) or not all(type(found.get(name)) is int for name in names):
        return None
    scored = ScoredText(*(found[name] for name in names))
    return scored if 0 <= scored.bytes <= scored.of_bytes < 2**63 and 0 <= scored.mem_len < 2**31 else None


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to `metrics.jsonl`."""
    line = json.dumps(row, allow_nan=False).encode()
    if len(line) >= _LINE_LIMIT:
        raise ValueError(f"a row of {len(line):,} bytes could not be read again")
    append_line(folder / METRICS, line)


def sync_metrics(folder: Path) -> None:
    """Makes the rows appended so far durable."""
    sync_file(folder / METRICS)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` in order, each with an integer step, without lines that a crash left incomplete."""
    return list(_rows(folder / METRICS))


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row by their keys."""
    largest = sys.float_info.max
    return {key: float(x) for key, x in row.items() if type(x) in (int, float) and abs(x) <= largest}


def trim_metrics(folder: Path, step: int, *, validated: bool) -> None:
    """Removes incomplete lines and the rows that a run resumed after `step` steps will write again.

    These are rows of later steps and, unless the run is `validated` at this step, the row of its validation.
    """

    def is_kept(row: Mapping[str, Any]) -> bool:
        own = row["step"]
        return own < step or (own == step and (validated or "validation_bits_per_byte" not in row))

    kept = [row for row in read_metrics(folder) if is_kept(row)]
    if os.path.lexists(folder / METRICS):
        write_atomic(folder / METRICS, (json.dumps(row, allow_nan=False).encode() + b"\n" for row in kept))


def _parse_row(line: bytes) -> Any:
    """The JSON value of a line; `ValueError` if it is none, or holds a number that is not finite."""

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not finite")
        return value

    return json.loads(line, parse_float=finite, parse_constant=finite)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not os.path.lexists(path):
        return
    with open_regular(path) as (descriptor, _), os.fdopen(os.dup(descriptor), "rb") as file:
        while line := file.readline(_LINE_LIMIT):
            try:
                row = _parse_row(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < _STEP_LIMIT:
                yield row
