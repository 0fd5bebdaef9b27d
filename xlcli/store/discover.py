"""Finding models: by name, of a saved state, the newest in `./models`, bundled ones; lists. Imports no torch."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlcli.errors import MAX_NAMED, CheckpointError, named
from xlcli.events import ScoredText
from xlcli.files import TEMPORARY, as_utf8, open_regular
from xlcli.files.tensors import read_header
from xlcli.presets import models_folder
from xlcli.store import layout
from xlcli.store.layout import CHECKPOINTS, CONFIG, WEIGHTS, is_model, read_config, read_record, scored_text

LOCAL = "models"  # folder of the user's models inside the working folder
CARD = "README.md"  # description of a bundled model
_FOREIGN = {b"GGUF": "a GGUF file", b"PK": "a PyTorch checkpoint", b"\x80": "a pickle, such as a PyTorch checkpoint"}
"""First bytes of models of other programs."""
_HUB = re.compile(r"hf:.*|(?!models/|\.)[\w.-]+/[\w.-]+|(distil)?gpt2.*|(bert|llama|opt|pythia|t5|transfo-xl)-.+", re.I)
"""Names of models on a hub."""
ORIGINAL = "model.pt"  # weights of the original code of Transformer-XL, in a folder of their own
VARIABLE = "XLCLI_MODEL"  # environment variable that names the model


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One row of `xlcli models`. Values that could not be read are None, and `problem` is the reason."""

    name: str
    folder: Path
    bundled: bool
    bytes: int = 0  # size of the weights file
    modified: float = 0.0  # time of its last change in seconds since 1970
    encoding: str | None = None  # encoding of the weights, a key of `layout.ENCODINGS`
    parameters: int | None = None  # number of stored weights
    # Kinds of the position encoding and of the attention.
    position: str | None = None
    attention: str | None = None
    corpus: str | None = None  # name of the training text
    bits_per_byte: float | None = None  # score of the model on the text `scored`
    scored: ScoredText | None = None
    finished: bool = True  # false if its training was stopped or still runs
    problem: str | None = None


def find(name: str | None) -> Path:
    return choose(name)[0]


def choose(name: str | None) -> tuple[Path, str | None, list[str]]:
    """Chooses the model to use: `name`, else the one that `XLCLI_MODEL` names, else the newest in `./models`.

    Of those in `./models` it takes the newest whose training has finished, and a bundled model if there is none. A
    plain name is searched in `./models`, then as a folder, then among the bundled models. Returns the model folder, the
    reason for this choice if it was not named by `name`, and remarks on damaged models that were passed over.
    `CheckpointError` if there is no such model, with a remedy that names similar ones.
    """
    local, bundled = _local(), _bundled()
    known = (*local, *bundled)
    if name == "":
        raise CheckpointError("the name of a model is empty.", "Type a name; xlcli models lists them.")
    if name is not None:
        return _named(name, "", known), None, []
    name_in_environment = os.environ.get(VARIABLE)
    if name_in_environment:
        return _named(name_in_environment, f" (from {VARIABLE})", known), VARIABLE, []
    unfinished: list[str] = []
    damaged: list[str] = []
    for folder in local:
        try:
            read_config(folder)
            read_header(folder / WEIGHTS)
        except CheckpointError as error:
            damaged.append(f"model {folder.name} is passed over: {error.message}")
            continue
        if _is_finished(folder):
            return folder, f"the newest in {LOCAL}/", damaged[:MAX_NAMED]
        unfinished.append(folder.name)
    if bundled:
        why_no_other = f"{LOCAL}/ here has no model"
        if unfinished:
            why_no_other = f"{unfinished[0]} is unfinished"
        return bundled[0], f"bundled; {why_no_other}", damaged[:MAX_NAMED]
    raise CheckpointError("there is no model yet.", "Train one: xlcli train FILE.")


def is_state_file(path: Path) -> bool:
    """True if a file is a saved state (`xlcli.store.state_files`), by its header."""
    with suppress(CheckpointError):
        return "state.memory" in read_header(path)[1]
    return False


def saved_model(path: Path) -> Path:
    """Folder of the model that made a saved state; `CheckpointError` if it is not found."""
    metadata = read_header(path)[1]
    folder = Path(metadata.get("model.folder", ""))
    if is_model(folder):
        return folder
    try:
        return find(metadata.get("model.name", ""))
    except CheckpointError as error:
        remedy = f"{error.remedy} If it lies elsewhere, give its folder: -m FOLDER."
        raise CheckpointError(f"{path} names its model, but {error.message}", remedy) from None


def model_names() -> list[str]:
    """Names of all models that `find` finds by name: those of the user, newest first, then bundled ones."""
    return list(dict.fromkeys(folder.name for folder in (*_local(), *_bundled())))


def local_models() -> tuple[ModelSummary, ...]:
    return tuple(map(summarize, _local()))


def bundled_models() -> tuple[ModelSummary, ...]:
    """Models bundled with xlcli, in alphabetical order."""
    return tuple(map(summarize, _bundled()))


def is_bundled(folder: Path) -> bool:
    """True if a model lies beside the presets; a checkout has models of the user there, which have no card."""
    presets = models_folder().resolve()
    if folder.parent.resolve() != presets:
        return False
    is_users_place = Path(LOCAL).resolve() == presets
    return not is_users_place or (folder / CARD).is_file()


def summarize(folder: Path) -> ModelSummary:
    """Summary of a model, read from its record and the header of its weights."""
    values: dict[str, Any] = {}
    try:
        tensors, metadata = read_header(folder / WEIGHTS)
        values["parameters"] = layout.n_weights(tensors)
        if metadata.get("encoding") in layout.ENCODINGS:
            values["encoding"] = metadata["encoding"]
        record = read_record(folder)  # without a checksum
        if isinstance(record.get("corpus"), str):
            values["corpus"] = record["corpus"]
        if isinstance(record.get("bits_per_byte"), float):
            values["bits_per_byte"] = record["bits_per_byte"]
        values["scored"] = scored_text(record)
        values["finished"] = record.get("finished") is not False
        shape = read_config(folder).model
        values["position"] = shape.position.kind
        values["attention"] = shape.attention.kind
    except CheckpointError as error:
        values["problem"] = error.message
    with suppress(OSError):
        status = (folder / WEIGHTS).stat()
        values["bytes"] = status.st_size
        values["modified"] = status.st_mtime
    return ModelSummary(folder.resolve().name, folder, is_bundled(folder), **values)


def _named(wanted: str, source: str, known: Sequence[Path]) -> Path:
    """Finds the model that the user has named, as `source` tells in messages; `CheckpointError` says what is there."""
    cwd = Path.cwd()
    places = [cwd / wanted]
    is_plain = Path(wanted).name == wanted and wanted not in (".", "..")
    if is_plain:
        places = [cwd / LOCAL / wanted, cwd / wanted, models_folder() / wanted]
    for folder in places:
        if is_model(folder):
            return folder
    for folder in known:
        if as_utf8(folder.name) == wanted:  # as a saved state names its model
            return folder
    # An unfinished run is more than a file of this name, and a file is more than a folder.
    for place in places:
        if os.path.isdir(place / CHECKPOINTS):  # noqa: PTH112 (False where the name is impossible)
            problem = f"{place} has been trained too little to hold a model yet{source}."
            raise CheckpointError(problem, "Continue it with xlcli train --resume.")
    for place in places:
        if os.path.isfile(place):  # noqa: PTH113
            raise _no_folder(place, wanted, source, known)
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112
            raise _no_model(place, wanted, source, known)
    if _HUB.fullmatch(wanted):
        problem = f"there is no model '{wanted}'{source}, and xlcli downloads no models from a hub."
        raise CheckpointError(problem, "Download it, and type xlcli import FOLDER.")
    raise CheckpointError(f"there is no model '{wanted}'{source}.", _choices(wanted, known))


def _no_folder(file: Path, wanted: str, source: str, known: Sequence[Path]) -> CheckpointError:
    """The error for a file in place of a model folder, which may be a model of another program."""
    with open_regular(file) as (opened, _):
        head = opened.read(4)
    kind = "a file"
    remedy = _choices(wanted, known)
    if is_model(file.parent):
        remedy = f"Give its folder: -m {Path(wanted).parent}."
    for mark, foreign_kind in _FOREIGN.items():
        if head.startswith(mark):
            kind = foreign_kind
            remedy = f"To use it, type xlcli import {shlex.quote(wanted)}."
    return CheckpointError(f"{file} is {kind}, not an xlcli model folder{source}.", remedy)


def _no_model(folder: Path, wanted: str, source: str, known: Sequence[Path]) -> CheckpointError:
    """The error for a folder without configuration or weights; that of its configuration if this is damaged."""
    missing = CONFIG
    if (folder / CONFIG).is_file():
        read_config(folder)
        missing = WEIGHTS
    remedy = _choices(wanted, known)
    if (folder / ORIGINAL).is_file():
        remedy = f"To import it, type xlcli import {shlex.quote(wanted)}."
    return CheckpointError(f"{folder} is not a model: it has no {missing}{source}.", remedy)


def _choices(wanted: str, known: Sequence[Path]) -> str:
    """Remedy that names models with similar names, else some of those that there are."""
    names = list(dict.fromkeys(folder.name for folder in known))
    near = difflib.get_close_matches(Path(wanted).name, names, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if not names:
        return "Train one: xlcli train FILE."
    more = " (xlcli models)" if len(names) > MAX_NAMED else ""
    return f"Available: {named(names)}{more}."


def _local() -> list[Path]:
    """Models of the user, newest first."""
    models = [folder for folder in _models(Path.cwd() / LOCAL) if not is_bundled(folder)]
    return sorted(models, key=_modified, reverse=True)


def _bundled() -> tuple[Path, ...]:
    return tuple(folder for folder in _models(models_folder()) if is_bundled(folder))


def _models(folder: Path) -> tuple[Path, ...]:
    """Model folders in a folder, in alphabetical order, without unfinished ones."""
    models: list[Path] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if is_model(path) and not path.name.startswith(TEMPORARY):
                models.append(path)
    return tuple(sorted(models))


def _is_finished(folder: Path) -> bool:
    """True if the training of a model has ended; a model without a readable record counts as finished."""
    with suppress(CheckpointError):
        return read_record(folder).get("finished") is not False
    return True


def _modified(folder: Path) -> float:
    with suppress(OSError):
        return (folder / WEIGHTS).stat().st_mtime
    return 0.0
