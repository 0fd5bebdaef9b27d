import json
import os

import pytest

from xlcli.errors import CheckpointError
from xlcli.store.layout import METRICS, append_metrics, numbers, read_metrics, read_record, trim_metrics, write_record


def test_record(tmp_path):
    assert read_record(tmp_path) == {}
    record = {"corpus": "b\u00fccher", "bits_per_byte": 1.7, "parts": {"train": [0, 10]}}
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"record\.json"):
        read_record(tmp_path)


def test_rows_in_order(tmp_path):
    assert read_metrics(tmp_path) == []
    trim_metrics(tmp_path, 0, validated=False)
    assert not (tmp_path / METRICS).exists()
    rows = [{"step": step, "nats": 1 / step} for step in range(1, 6)]
    for row in rows:
        append_metrics(tmp_path, row)
    assert read_metrics(tmp_path) == rows


def test_a_torn_row_costs_one_row_wherever_it_is_torn(tmp_path):
    rows = [{"step": step, "nats": 0.5, "text": "\u00e9"} for step in (1, 2, 3)]
    for row in rows:
        append_metrics(tmp_path, row)
    whole = (tmp_path / METRICS).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole)):
        (tmp_path / METRICS).write_bytes(whole[:length])
        assert read_metrics(tmp_path) == rows[: 3 if length == len(whole) - 1 else 2]
        trim_metrics(tmp_path, 3, validated=False)
        append_metrics(tmp_path, {"step": 4})
        assert read_metrics(tmp_path) == [*rows[: 3 if length == len(whole) - 1 else 2], {"step": 4}]


def test_a_resumed_run_writes_no_row_twice(tmp_path):
    for step in range(1, 8):
        append_metrics(tmp_path, {"step": step})
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step": 8, "na')
    trim_metrics(tmp_path, 5, validated=False)
    append_metrics(tmp_path, {"step": 6})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len((tmp_path / METRICS).read_bytes().splitlines()) == 6


@pytest.mark.parametrize("validated", [True, False])
def test_a_validation_that_is_repeated_has_one_row(tmp_path, validated):
    rows = [{"step": 1}, {"step": 1, "validation_bits_per_byte": 3.0}, {"step": 2}]
    rows.append({"step": 2, "validation_bits_per_byte": 2.0})
    for row in rows:
        append_metrics(tmp_path, row)
    trim_metrics(tmp_path, 2, validated=validated)
    assert read_metrics(tmp_path) == rows[: 4 if validated else 3]


def test_other_peoples_lines_do_no_harm(tmp_path):
    lines = [
        b"",
        b"[1]",
        b"null",
        b"[" * 60_000,
        b'{"step": "x"}',
        b'{"step": 1.0}',
        b'{"step": true}',
        b'{"nats": 1.0}',
        b'{"step": -1}',
        b'{"step": 9223372036854775808}',
        b'{"step": ' + b"9" * 5000 + b"}",
        b"\xff",
        b"x" * 200_000,
    ]
    (tmp_path / METRICS).write_bytes(b"\n".join(lines) + b"\n" + json.dumps({"step": 1}).encode())
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        append_metrics(tmp_path, {"step": 1, "nats": float("nan")})
    with pytest.raises(ValueError, match=r"\b70,\d"):
        append_metrics(tmp_path, {"step": 1, "text": "x" * 70_000})
    assert read_metrics(tmp_path) == []


def test_the_numbers_of_a_row():
    row = {"step": 2, "nats": "x", "lr": None, "ok": True, "seconds": 1.5, "tokens": 10**400, "steps": [1], "n": -3}
    assert numbers(row) == {"step": 2.0, "seconds": 1.5, "n": -3.0}


def test_links_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / METRICS)
    with pytest.raises(CheckpointError, match="pipe"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_row_with_a_number_that_is_not_finite_is_left_out(tmp_path, number):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "nats": 2.5}}\n{{"step": 2, "nats": {number}}}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "nats": 2.5}]
    trim_metrics(tmp_path, 9, validated=False)
    assert read_metrics(tmp_path) == [{"step": 1, "nats": 2.5}]
