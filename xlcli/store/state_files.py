"""A saved memory: one safetensors file, tied to its model by fingerprints, with what a reader of the text carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.errors import CheckpointError, StateError
from xlcli.files import read_tensors, write_tensors

if TYPE_CHECKING:
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

FORMAT = "2"
"""Version of the file. A reader refuses any other."""

_CARRY = "carry."
_TIE = "model."


def save_state(path: Path, state: State, carry: Mapping[str, str], *, model: LoadedModel) -> None:
    """Writes the state and the texts that go with it, whole or not at all."""
    metadata = {
        "format": FORMAT,
        **state.describe(),
        **{_TIE + name: value for name, value in model.fingerprints.items()},
        **{_CARRY + name: value for name, value in carry.items()},
    }
    write_tensors(path, state.tensors(), metadata)


def load_state(path: Path, *, model: LoadedModel, device: str) -> tuple[State, Mapping[str, str]]:
    """The state in a file and what it carries.

    Raises:
        StateError: The file is damaged, of another format, or of another model; names both sides.
    """
    from xlcli.state import State

    try:
        tensors, metadata = read_tensors(path, expected=None, device=device)
    except CheckpointError as error:
        raise StateError(error.message, "Start without --state-in.") from None
    if metadata.get("format") != FORMAT or "memory" not in metadata:
        raise StateError(f"{path} is not a saved memory of format {FORMAT}.", "Give a file that --state-out wrote.")
    _check_ties(path, metadata, model)
    state = State.restore(tensors, metadata)
    if not model.network.is_compatible(state):
        raise StateError(f"{path} does not have the shape of model {model.name}.", "Start without --state-in.")
    carry = {name.removeprefix(_CARRY): value for name, value in metadata.items() if name.startswith(_CARRY)}
    return state, carry


def _check_ties(path: Path, metadata: Mapping[str, str], model: LoadedModel) -> None:
    for name, here in model.fingerprints.items():
        there = metadata.get(_TIE + name, "")
        if there != here:
            raise StateError(
                f"{path} was made with {name} {there[:12] or 'unknown'}, but {model.name} has {name} {here[:12]}.",
                "Give the model it was made with (-m), or start without --state-in.",
            )
