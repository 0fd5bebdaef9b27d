"""Finding models: by name, of a saved state, the newest in `./models`, bundled ones; lists. Imports no torch."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable
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

LOCAL = "models"
"""Folder of the user's models inside the working folder."""
CARD = "README.md"
"""Description of a bundled model."""
_FOREIGN = {b"GGUF": "a GGUF file", b"PK": "a PyTorch checkpoint", b"\x80": "a pickle, such as a PyTorch checkpoint"}
"""First bytes of models of other programs."""
_HUB = re.compile(r"hf:.*|(?!models/|\.)[\w.-]+/[\w.-]+|(distil)?gpt2.*|(bert|llama|opt|pythia|t5|transfo-xl)-.+", re.I)
"""Names of models on a hub."""
ORIGINAL = "model.pt"
"""Weights of the original code of Transformer-XL, in a folder of their own."""
VARIABLE = "XLCLI_MODEL"
"""Environment variable that names the model."""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One row of `xlcli models`. Values that could not be read are None, and `problem` is the reason.

    Attributes:
        bytes: Size of the weights file.
        modified: Time of its last change in seconds since 1970.
        encoding: Encoding of the weights, a key of `layout.ENCODINGS`.
        parameters: Number of stored weights.
        position, attention: Kinds of the position encoding and of the attention.
        corpus: Name of the training text.
        bits_per_byte: Score of the model on the text `scored`.
        finished: False if its training was stopped or still runs.
    """

    name: str
    folder: Path
    bundled: bool
    bytes: int = 0
    modified: float = 0.0
    encoding: str | None = None
    parameters: int | None = None
    position: str | None = None
    attention: str | None = None
    corpus: str | None = None
    bits_per_byte: float | None = None
    scored: ScoredText | None = None
    finished: bool = True
    problem: str | None = None


def find(name: str | None) -> Path:
    """Folder of the model that `choose` chooses."""
    return choose(name)[0]


def choose(name: str | None) -> tuple[Path, str | None, list[str]]:
    """A model folder, the reason for choosing it if the user did not name it, and what was passed over as damaged.

    It is the model `name`, else the one that `XLCLI_MODEL` names, else the newest in `./models` whose training has
    finished, else the bundled one. A plain name is searched in `./models`, then as a folder, then among the bundled
    models.

    Raises:
        CheckpointError: There is no such model. The remedy names similar ones.
    """
    local, bundled = _local(), _bundled()
    if name == "":
        raise CheckpointError("the name of a model is empty.", "Type a name; xlcli models lists them.")
    if name is not None:
        return _named(name, "", (*local, *bundled)), None, []
    if wanted := os.environ.get(VARIABLE):
        return _named(wanted, f" (from {VARIABLE})", (*local, *bundled)), VARIABLE, []
    unfinished, damaged = "", []
    for folder in local:
        try:
            read_config(folder)
            read_header(folder / WEIGHTS)
        except CheckpointError as error:
            damaged.append(f"model {folder.name} is passed over: {error.message}")
        else:
            if _is_finished(folder):
                return folder, f"the newest in {LOCAL}/", damaged[:MAX_NAMED]
            unfinished = unfinished or f"; {folder.name} is unfinished"
    if bundled:
        return bundled[0], f"bundled{unfinished or f'; {LOCAL}/ here has no model'}", damaged[:MAX_NAMED]
    raise CheckpointError("there is no model yet.", "Train one: xlcli train FILE.")


def is_state_file(path: Path) -> bool:
    """True if a file is a saved state (`xlcli.store.state_files`), by its header."""
    with suppress(CheckpointError):
        return "state.memory" in read_header(path)[1]
    return False


def saved_model(path: Path) -> Path:
    """Folder of the model that made a saved state.

    Raises:
        CheckpointError: There is no such model.
    """
    metadata = read_header(path)[1]
    folder = Path(metadata.get("model.folder", ""))
    if is_model(folder):
        return folder
    try:
        return find(metadata.get("model.name", ""))
    except CheckpointError as error:
        remedy = f"{error.remedy} If it lies elsewhere, give its folder: -m FOLDER."
        raise CheckpointError(f"{path} names its model, but {error.message}", remedy) from None


def local_models() -> tuple[ModelSummary, ...]:
    """Models in `./models`, newest first."""
    return tuple(map(summarize, _local()))


def bundled_models() -> tuple[ModelSummary, ...]:
    """Models bundled with xlcli, in alphabetical order."""
    return tuple(map(summarize, _bundled()))


def is_bundled(folder: Path) -> bool:
    """True if a model is bundled with xlcli: it lies beside the presets.

    In a checkout models of the user lie there, too; then a bundled model is one with a card.
    """
    place = models_folder().resolve()
    return folder.parent.resolve() == place and (Path(LOCAL).resolve() != place or (folder / CARD).is_file())


def summarize(folder: Path) -> ModelSummary:
    """Summary of a model, read from its record and the header of its weights."""
    found: dict[str, Any] = {}
    try:
        tensors, metadata = read_header(folder / WEIGHTS)
        found["parameters"] = layout.n_weights(tensors)
        found["encoding"] = metadata["encoding"] if metadata.get("encoding") in layout.ENCODINGS else None
        record = read_record(folder)
        found["corpus"] = record["corpus"] if isinstance(record.get("corpus"), str) else None
        score = record.get("bits_per_byte")
        found["bits_per_byte"] = score if isinstance(score, float) else None
        found["scored"] = scored_text(record)
        found["finished"] = record.get("finished") is not False
        shape = read_config(folder).model
        found |= {"position": shape.position.kind, "attention": shape.attention.kind}
    except CheckpointError as error:
        found["problem"] = error.message
    with suppress(OSError):
        status = (folder / WEIGHTS).stat()
        found |= {"bytes": status.st_size, "modified": status.st_mtime}
    return ModelSummary(folder.resolve().name, folder, is_bundled(folder), **found)


def _named(wanted: str, source: str, known: Iterable[Path]) -> Path:
    plain = Path(wanted).name == wanted and wanted not in (".", "..")
    cwd = Path.cwd()
    places = [cwd / LOCAL / wanted, cwd / wanted, models_folder() / wanted] if plain else [cwd / wanted]
    shown = (folder for folder in known if as_utf8(folder.name) == wanted)  # as a saved state names its model
    if found := next(filter(is_model, places), None) or next(shown, None):
        return found
    # os.path.isdir is False where the name is impossible.
    if begun := next((place for place in places if os.path.isdir(place / CHECKPOINTS)), None):  # noqa: PTH112
        raise CheckpointError(
            f"{begun} has been trained too little to hold a model yet{source}.",
            "Continue it with xlcli train --resume.",
        )
    if other := next((place for place in places if os.path.isfile(place)), None):  # noqa: PTH113
        with open_regular(other) as (file, _):
            head = file.read(4)
        kind = next((kind for mark, kind in _FOREIGN.items() if head.startswith(mark)), "a file")
        remedy = f"Give its folder: -m {Path(wanted).parent}." if is_model(other.parent) else _choices(wanted, known)
        if "PyTorch" in kind or "GGUF" in kind:
            remedy = f"To use it, type xlcli import {shlex.quote(wanted)}."
        raise CheckpointError(f"{other} is {kind}, not an xlcli model folder{source}.", remedy)
    if other := next((place for place in places if os.path.isdir(place)), None):  # noqa: PTH112
        missing = CONFIG
        if (other / CONFIG).is_file():
            read_config(other)
            missing = WEIGHTS
        is_original = (other / ORIGINAL).is_file()
        remedy = f"To import it, type xlcli import {shlex.quote(wanted)}." if is_original else _choices(wanted, known)
        raise CheckpointError(f"{other} is not a model: it has no {missing}{source}.", remedy)
    if _HUB.fullmatch(wanted):
        problem = f"there is no model '{wanted}'{source}, and xlcli downloads no models from a hub."
        raise CheckpointError(problem, "Download it, and type xlcli import FOLDER.")
    raise CheckpointError(f"there is no model '{wanted}'{source}.", _choices(wanted, known))


def _choices(wanted: str, known: Iterable[Path]) -> str:
    names = list(dict.fromkeys(folder.name for folder in known))
    near = difflib.get_close_matches(Path(wanted).name, names, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    more = " (xlcli models)" if len(names) > MAX_NAMED else ""
    return f"Available: {named(names)}{more}." if names else "Train one: xlcli train FILE."


def _local() -> list[Path]:
    """Models of the user, newest first."""
    found = [folder for folder in _models(Path.cwd() / LOCAL) if not is_bundled(folder)]
    return sorted(found, key=_modified, reverse=True)


def _bundled() -> tuple[Path, ...]:
    return tuple(folder for folder in _models(models_folder()) if is_bundled(folder))


def _models(folder: Path) -> tuple[Path, ...]:
    with suppress(OSError):
        paths = [path for path in folder.iterdir() if not path.name.startswith(TEMPORARY)]
        return tuple(sorted(path for path in paths if is_model(path)))
    return ()


def _is_finished(folder: Path) -> bool:
    """True if the training of a model has ended; a model without a readable record counts as finished."""
    with suppress(CheckpointError):
        return read_record(folder).get("finished") is not False
    return True


def _modified(folder: Path) -> float:
    with suppress(OSError):
        return (folder / WEIGHTS).stat().st_mtime
    return 0.0
