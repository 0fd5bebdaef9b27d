"""Finding and listing models: by name, the newest in `./models`, or bundled with xlcli. Imports no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xlcli.errors import CheckpointError
from xlcli.files import read_header
from xlcli.files.plain import TEMPORARY
from xlcli.presets import models_folder
from xlcli.store.encodings import ENCODINGS, n_weights
from xlcli.store.layout import CHECKPOINTS, CONFIG, WEIGHTS, is_model
from xlcli.store.records import RECORD, read_record

LOCAL = "models"
"""Folder of the user's models inside the working folder."""
VARIABLE = "XLCLI_MODEL"
"""Environment variable that names the model."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One row of `xlcli models`. Values that could not be read are None, and `problem` is the reason.

    Attributes:
        name: Name of the folder.
        folder: The model folder.
        bundled: Whether the model came with xlcli.
        bytes: Size of the weights file.
        modified: Time of its last change in seconds since 1970.
        encoding: Encoding of the weights, a key of `ENCODINGS`.
        parameters: Number of stored weights.
        corpus: Name of the training text.
        bits_per_byte: Score on the validation text at the end of training.
        problem: Error message, or None.
    """

    name: str
    folder: Path
    bundled: bool
    bytes: int
    modified: float
    encoding: str | None
    parameters: int | None
    corpus: str | None
    bits_per_byte: float | None
    problem: str | None


def find(name: str | None, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Path:
    """Folder of the model `name`, else of `XLCLI_MODEL`, else of the newest in `./models`, else of the bundled model.

    A plain name is searched in `./models`, then as a folder, then among the bundled models.

    Raises:
        CheckpointError: There is no such model. The remedy names similar ones.
    """
    env = os.environ if env is None else env
    cwd = Path.cwd() if cwd is None else cwd
    wanted = name or env.get(VARIABLE)
    local, bundled = _models(cwd / LOCAL), _models(models_folder())
    if wanted:
        return _named(wanted, "" if name else f" (from {VARIABLE})", cwd, (*local, *bundled))
    if local:
        return max(local, key=_modified)
    if bundled:
        return bundled[0]
    raise CheckpointError("there is no model yet.", "Train one: xlcli train FILE.")


def local_models(cwd: Path | None = None) -> tuple[ModelSummary, ...]:
    """Models in `./models`, newest first."""
    found = _models((Path.cwd() if cwd is None else cwd) / LOCAL)
    return tuple(summarize(folder) for folder in sorted(found, key=_modified, reverse=True))


def bundled_models() -> tuple[ModelSummary, ...]:
    """Models that came with xlcli, in alphabetical order."""
    return tuple(summarize(folder, bundled=True) for folder in _models(models_folder()))


def summarize(folder: Path, *, bundled: bool = False) -> ModelSummary:
    """Summary of a model, read from its record and the header of its weights."""
    encoding: str | None = None
    parameters: int | None = None
    corpus: str | None = None
    score: float | None = None
    problem: str | None = None
    try:
        tensors, metadata = read_header(folder / WEIGHTS)
        parameters = n_weights(tensors)
        encoding = metadata["encoding"] if metadata.get("encoding") in ENCODINGS else None
        record = read_record(folder)
        corpus = str(record["corpus"]) if isinstance(record.get("corpus"), str) else None
        score = float(record["bits_per_byte"]) if isinstance(record.get("bits_per_byte"), int | float) else None
    except CheckpointError as error:
        problem = error.message
    except OverflowError:
        problem = f"{folder / RECORD} has a number that is too large"
    try:
        size = (folder / WEIGHTS).stat().st_size
    except OSError:
        size = 0
    return ModelSummary(
        folder.resolve().name, folder, bundled, size, _modified(folder), encoding, parameters, corpus, score, problem
    )


def _named(wanted: str, source: str, cwd: Path, known: Iterable[Path]) -> Path:
    plain = Path(wanted).name == wanted and wanted not in (".", "..")
    places = [cwd / LOCAL / wanted, cwd / wanted, models_folder() / wanted] if plain else [cwd / wanted]
    for place in places:
        if is_model(place):
            return place
    for place in places:
        if _is_folder(place / CHECKPOINTS):
            raise CheckpointError(
                f"{place} has been trained too little to hold a model yet{source}.",
                "Continue it with xlcli train --resume.",
            )
    for place in places:
        if _is_folder(place):
            missing = WEIGHTS if (place / CONFIG).is_file() else CONFIG
            raise CheckpointError(f"{place} is not a model: it has no {missing}{source}.", _choices(wanted, known))
    raise CheckpointError(f"there is no model '{wanted}'{source}.", _choices(wanted, known))


def _choices(wanted: str, known: Iterable[Path]) -> str:
    names = sorted({folder.name for folder in known})
    near = difflib.get_close_matches(Path(wanted).name, names, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"There are: {', '.join(names[:12])}." if names else "Train one: xlcli train FILE."


def _models(folder: Path) -> tuple[Path, ...]:
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(TEMPORARY)]
        return tuple(sorted(path for path in paths if is_model(path)))
    except OSError:
        return ()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _modified(folder: Path) -> float:
    try:
        return (folder / WEIGHTS).stat().st_mtime
    except OSError:
        return 0.0
