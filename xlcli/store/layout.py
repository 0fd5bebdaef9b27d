"""What lies where in a model folder, and its configuration. Imports no torch.

    config.json         the whole configuration, with its format number
    model.safetensors   the weights kept; metadata ties them to the configuration and the tokenizer by fingerprint
    tokenizer.*         written and read by `xlcli.text.tokenizers.registry`
    record.json         corpus, recipe, scores               metrics.jsonl   the curve
    valid.txt test.txt  held-out text                        checkpoints/    to resume from, see `xlcli.store.commit`

Nothing in a model folder is a symbolic link, a script or a pickle.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from xlcli import config as settings
from xlcli.config import Config
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import read_json, write_atomic

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
HELD_OUT = {"valid": "valid.txt", "test": "test.txt"}
"""File of each held-out part."""


def is_model(folder: Path) -> bool:
    """Whether this folder holds a configuration and weights."""
    try:
        return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
    except OSError:
        return False


def held_out(folder: Path, split: Literal["valid", "test"]) -> Path | None:
    """The model's own held-out text, if it has any."""
    path = folder / HELD_OUT[split]
    return path if path.is_file() and not path.is_symlink() else None


def write_config(folder: Path, config: Config) -> None:
    """Writes `config.json`."""
    tree = {"schema": settings.SCHEMA, **config.model_dump(mode="json")}
    write_atomic(folder / CONFIG, json.dumps(tree, indent=2, sort_keys=True).encode() + b"\n")


def read_config(folder: Path) -> Config:
    """The model's configuration; `CheckpointError` when it is damaged, illegal or of a newer format."""
    path = folder / CONFIG
    tree = read_json(path)
    schema = tree.pop("schema", None)
    if type(schema) is not int or schema < 1:
        raise CheckpointError(f"{path} does not say its format.", "Restore the file from a copy.")
    if schema > settings.SCHEMA:
        raise CheckpointError(
            f"{path} has format {schema}; this xlcli reads up to {settings.SCHEMA}.", "Install a newer xlcli."
        )
    try:
        return settings.validate(Config, tree)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} is not a configuration: {error.message}", "Restore the file from a copy."
        ) from None


def config_fingerprint(config: Config) -> str:
    """SHA-256 of the part of the configuration that decides what the weights mean."""
    return hashlib.sha256(json.dumps(settings.meaning(config.model), sort_keys=True).encode()).hexdigest()
