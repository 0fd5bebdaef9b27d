"""Format of a model folder (docs/developers/format.md), which holds no script and no pickle. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlcli import config as settings
from xlcli.config import BaseConfig, Config, ModelConfig, TextConfig, TrainConfig, Tree
from xlcli.config.position import AxialPositionConfig
from xlcli.errors import CheckpointError, ConfigError
from xlcli.events import ScoredText
from xlcli.files import append_line, as_utf8, json_digest, open_regular, parse_json, read_json, sha256, write_atomic
from xlcli.files.tensors import TensorInfo

SCHEMA = 2  # version of `config.json`, `model.safetensors`, checkpoints and state files. A reader refuses any other
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step-(\d{8,18})(~?)")  # folder name of a checkpoint, with its step; one with `~` is being replaced
KEPT = "kept"  # folder of the models of `train.keep_at`
MANIFEST = "manifest.json"
LATEST = "LATEST"
CHECKPOINT_FILES = (  # files of every checkpoint
    "weights.safetensors",
    "optimizer.safetensors",
    "memory.safetensors",
    "random.safetensors",
    "state.json",
)
BEST = "best.safetensors"  # a copy of the weights file of the model. A checkpoint can be used without it
HELD_OUT = {"valid": "valid.txt", "test": "test.txt"}  # file of the validation text and of the test text
DOCUMENTS = {"valid": "valid.documents", "test": "test.documents"}  # offsets at which its documents begin, if separate
TENSORBOARD = "tensorboard"  # a folder that 0.1.0 wrote
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer.words", "vocabulary.json")
"""Files of a tokenizer: its description and, depending on the kind, its vocabulary."""
CHECKED = (*TOKENIZER, *HELD_OUT.values(), *DOCUMENTS.values())  # files whose checksums `config.json` has
ENCODINGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int8": "I8"}
"""Name in `config.json` to safetensors type of matrices and, except for int8, of all floating-point tensors."""
SCALE = ":scale"  # suffix of the name of the scales of an int8 tensor
SMALLEST_STORED = 2**25
"""Number of weights from which on rounded matrices stay in RAM as they are stored: 128 MiB in float32.

Below it RAM matters less than the 0.03 ms by which looking up their rows delays a token."""

_KEYS = {"schema", "model", "text", "train", "weights", "files", "adapted_from", "sha256"}
_RESTORE = "Restore the file from a copy."
_NEWER = "Install a newer xlcli."


class SavedConfig(BaseConfig):
    """Sections of the configuration that are stored with a model."""

    model: ModelConfig
    text: TextConfig
    train: TrainConfig


@dataclass(frozen=True)
class ConfigFile:
    """Content of `config.json`."""

    config: SavedConfig  # sections model, text and train
    fingerprint: str  # SHA-256 of the model section as stored and of the schema number
    encoding: str  # encoding of the weights, a key of `ENCODINGS`
    files: Mapping[str, str]  # SHA-256 of tokenizer files and held-out texts by file name


def kept_model(folder: Path, n_tokens: int) -> Path:
    """Folder of the model of a run after this many tokens (`train.keep_at`), such as `kept/5M`."""
    name = str(n_tokens)
    for size, letter in ((10**3, "k"), (10**6, "M"), (10**9, "G")):
        if n_tokens % size == 0:
            name = f"{n_tokens // size}{letter}"
    return folder / KEPT / name


def is_model(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
    return False


def n_weights(infos: Mapping[str, TensorInfo]) -> int:
    """Number of weights in a file with these tensors; scales are not counted."""
    return sum(math.prod(info.shape) for name, info in infos.items() if not name.endswith(SCALE))


def read_config(folder: Path) -> SavedConfig:
    """Sections model, text and train of a model. Raises `CheckpointError` as `read_config_file` does."""
    return read_config_file(folder).config


def read_config_file(folder: Path, *, strict: bool = False) -> ConfigFile:
    """The content of `config.json`; `CheckpointError` if it is missing, damaged, invalid or of another format.

    Unknown keys of text and train are ignored, so that a new training option of a later release does not make its
    models unreadable; `strict` refuses them, as resuming a run requires.
    """
    path = folder / CONFIG
    tree = _read_tree(path)
    if tree["adapted_from"] is not None:
        raise CheckpointError(f"{path} describes an adaptation of another model, which is not supported.", _NEWER)
    weights, files = tree["weights"], tree["files"]
    encoding = weights.get("encoding") if isinstance(weights, dict) else None
    if not isinstance(encoding, str) or encoding not in ENCODINGS or len(weights) != 1:
        problem = f"{path}: the weights are encoded as {encoding!r}; this xlcli reads {', '.join(ENCODINGS)}."
        raise CheckpointError(problem, _NEWER)
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: 'files' is not a table of checksums.", _RESTORE)
    return ConfigFile(_sections(path, tree, strict=strict), _fingerprint(tree["model"]), encoding, files)


def write_config(folder: Path, config: Config | SavedConfig, *, encoding: str = "float32") -> None:
    """Writes `config.json`, with checksums of the tokenizer files and held-out texts that are in `folder` now."""
    present = [name for name in CHECKED if (folder / name).is_file() and not (folder / name).is_symlink()]
    tree: Tree = {
        "schema": SCHEMA,
        "model": _model_section(folder, config.model),
        "text": config.text.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "weights": {"encoding": encoding},
        "files": {name: sha256(folder / name) for name in present},
        "adapted_from": None,
    }
    tree["sha256"] = json_digest(tree)  # of all other keys
    write_atomic(folder / CONFIG, json.dumps(tree, indent=2, sort_keys=True).encode() + b"\n")


def config_fingerprint(folder: Path, model: ModelConfig) -> str:
    """The fingerprint of the configuration that `write_config` would store in `folder`."""
    return _fingerprint(_model_section(folder, model))


def verify_file(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Raises `CheckpointError` unless the file has the checksum listed in `files`."""
    if sha256(folder / name) != files[name]:
        raise CheckpointError(f"{folder / name} does not match its checksum in {CONFIG}.", _RESTORE)


def _read_tree(path: Path) -> Tree:
    """All keys of `config.json`, with schema and checksum verified."""
    tree = read_json(path)
    if tree.keys() & {"model_type", "architectures"}:
        command = f"xlcli import {shlex.quote(str(path.parent))}"
        raise CheckpointError(f"{path.parent} is a Hugging Face model.", f"To use it, type {command}.")
    schema = tree.get("schema")
    if type(schema) is not int or schema < 1:
        raise CheckpointError(f"{path} does not say its format.", _RESTORE)
    if schema != SCHEMA:
        remedy = _NEWER if schema > SCHEMA else "Train the model again."
        raise CheckpointError(f"{path} has format {schema}; this xlcli reads format {SCHEMA}.", remedy)
    wrong_keys = tree.keys() ^ _KEYS
    if wrong_keys:
        first = min(wrong_keys)
        what = "no" if first in _KEYS else "an unknown"
        raise CheckpointError(f"{path} has {what} key '{first}'.", _NEWER)
    sealed = dict(tree)
    if sealed.pop("sha256") != json_digest(sealed):
        raise CheckpointError(f"{path} does not match its checksum.", _RESTORE)
    return tree


def _sections(path: Path, tree: Tree, *, strict: bool) -> SavedConfig:
    sections: Tree = {"model": tree["model"], "text": tree["text"], "train": tree["train"]}
    if not strict:
        for name, kind in (("text", TextConfig), ("train", TrainConfig)):
            if isinstance(tree[name], dict):
                sections[name] = {key: value for key, value in tree[name].items() if key in kind.model_fields}
    try:
        return settings.validate(SavedConfig, sections)
    except ConfigError as error:
        raise CheckpointError(f"{path} is not a configuration of this xlcli: {error.message}", _NEWER) from None


def _model_section(folder: Path, model: ModelConfig) -> Tree:
    """Model section to store, with derived sizes filled in, so that a changed default does not change a saved model.

    A stored section that validates to the same configuration is kept as it is: another release may have written it with
    fewer keys, and its fingerprint ties weights and states to it.
    """
    tree = model.model_dump(mode="json")
    tree["attention"]["head_dim"] = model.head_dim
    tree["feedforward"]["ffn_dim"] = model.ffn_dim
    if isinstance(model.position, AxialPositionConfig):
        tree["position"]["dims"] = list(model.position.widths(model.dim))
    with suppress(CheckpointError):
        stored = _read_tree(folder / CONFIG)
        if _sections(folder / CONFIG, stored, strict=False).model == settings.validate(ModelConfig, tree):
            return stored["model"]  # type: ignore[no-any-return]
    return tree


def _fingerprint(model: Tree) -> str:
    return json_digest({"schema": SCHEMA, "model": model})


# Records of a training run

RECORD = "record.json"
METRICS = "metrics.jsonl"
_STEP_LIMIT = 2**63
_LINE_LIMIT = 2**16  # maximum size of a row in bytes


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replaces `record.json`. `xlcli models` shows `corpus` and `bits_per_byte`; resuming uses `preset`, `runtime`."""
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomic(folder / RECORD, as_utf8(text).encode() + b"\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The content of `record.json`, empty if the file is missing; `CheckpointError` if it is damaged."""
    path = folder / RECORD
    record = read_json(path) if os.path.lexists(path) else {}
    if path.is_symlink() and "finished" not in record:  # it has no checksum, and copies of the model have its content
        raise CheckpointError(f"{path} is a symbolic link to a file that is not the record of a model.", _RESTORE)
    return record


def scored_text(record: Mapping[str, Any]) -> ScoredText | None:
    """The text that `bits_per_byte` belongs to; None if the record does not say it, or has impossible numbers."""
    match record.get("scored"):
        case {"bytes": int(n_bytes), "of_bytes": int(of_bytes), "mem_len": int(mem_len)}:
            is_possible = 0 <= n_bytes <= of_bytes < 2**63 and 0 <= mem_len < 2**31
            if is_possible:
                return ScoredText(n_bytes, of_bytes, mem_len)
    return None


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    line = json.dumps(row, allow_nan=False).encode()
    if len(line) >= _LINE_LIMIT:
        raise ValueError(f"a row of {len(line):,} bytes could not be read again")
    append_line(folder / METRICS, line)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` in order, each with an integer step, without lines that a crash left incomplete."""
    rows: list[dict[str, Any]] = []
    if not os.path.lexists(folder / METRICS):
        return rows
    with open_regular(folder / METRICS) as (file, _):
        while True:
            line = file.readline(_LINE_LIMIT)
            if not line:
                return rows
            try:
                row = parse_json(line)
            except ValueError:
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is int and 0 <= step < _STEP_LIMIT:
                rows.append(row)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row by their keys."""
    figures: dict[str, float] = {}
    for key, value in row.items():
        is_number = type(value) in (int, float)  # no bool
        if is_number and abs(value) <= sys.float_info.max:
            figures[key] = float(value)
    return figures


def trim_metrics(folder: Path, step: int, *, validated: bool) -> None:
    """Removes incomplete lines, and the rows that a run resumed after `step` steps will write again.

    Its validation at this step is one of them, unless it is `validated`.
    """
    lines: list[bytes] = []
    for row in read_metrics(folder):
        is_validation_of_step = row["step"] == step and "validation_bits_per_byte" in row
        is_undone = row["step"] > step or (is_validation_of_step and not validated)
        if not is_undone:
            lines.append(json.dumps(row, allow_nan=False).encode() + b"\n")
    if os.path.lexists(folder / METRICS):
        write_atomic(folder / METRICS, lines)
