"""State files: the state of an inference session in one safetensors file, tied to its model by fingerprints.

Tensors `state.*` are the memory of the model, tensors `session.*` unread text, scored tokens and the random-number
generator; counters are metadata. docs/format.md lists the names.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.errors import CheckpointError, StateError
from xlcli.files import as_utf8
from xlcli.files.tensors import read_header, read_tensors, with_prefix, write_tensors
from xlcli.store.discover import find
from xlcli.store.layout import SCHEMA, is_model
from xlcli.text.follow import FilePosition

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from xlcli.state import State
    from xlcli.store.folder import LoadedModel
    from xlcli.text.tokenizers import Tokenizer

_REMEDY = "Start without this state."
_COUNTERS = ("n_lines", "n_bytes", "n_tokens", "line_start", "n_shown")
"""Counters of a stream, saved as metadata."""
_PLACE = ("device", "inode", "offset", "modified")
"""Numbers of the place in a file that is followed, saved as metadata."""


@dataclass(frozen=True)
class PendingText:
    """Text that the model has not read yet.

    Its beginning may be tokenized already. Those tokens are saved, because text cut between tokens could be tokenized
    differently.

    Attributes:
        ids: Tokens (n) of its first `n_tokenized` bytes.
        n_tokenized: Number of bytes of text of `ids`.
        documents: Ascending offsets in `data` before which the memory is to be cleared.
    """

    data: bytes
    ids: NDArray[np.int32]
    n_tokenized: int
    documents: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplerState:
    """Seed and state (n, uint8) of a random-number generator, and the latest tokens, for the repetition penalty."""

    seed: int
    generator: Tensor
    recent: tuple[int, ...]


@dataclass(frozen=True)
class StreamPosition:
    """Complete lines, bytes and tokens scored of a stream, with the sum of their surprisals, and its unfinished line.

    Attributes:
        line_start: Offset in bytes of the unfinished line.
        scored: Text and surprisal in bits of each token scored but not yet output.
        n_shown: Number of lines and tokens output.
        recent: Latest scores of what is output (`lines` or `tokens`), with which the next one is compared.
    """

    n_lines: int
    n_bytes: int
    n_tokens: int
    bits: float
    line_start: int
    scored: tuple[tuple[bytes, float], ...]
    n_shown: int = 0
    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionState:
    """State of an inference session as a value. A session that continues it equals one that never stopped.

    Attributes:
        last_token: Token that has been scored or sampled, but not read by the model.
        pending: Unread text, which comes before any new text.
        source: Place in the file that the text was taken from, if it is followed.
    """

    model_state: State
    last_token: int
    pending: PendingText
    sampler: SamplerState | None = None
    stream: StreamPosition | None = None
    source: FilePosition | None = None

    def fork(self) -> SessionState:
        """Copy that shares no tensor of the memory, so that both can be continued."""
        return replace(self, model_state=self.model_state.fork())


def is_state_file(path: Path) -> bool:
    """True if a file is a state file, by its header. Imports no torch."""
    try:
        return "state.memory" in read_header(path.resolve())[1]
    except CheckpointError:
        return False


def saved_model(path: Path) -> Path:
    """Folder of the model that made a state file. Imports no torch.

    Raises:
        CheckpointError: There is no such model.
    """
    metadata = read_header(path)[1]
    folder = Path(metadata.get("model.folder", ""))
    return folder if is_model(folder) else find(metadata.get("model.name", ""))


def save_state(path: Path, session: SessionState, *, model: LoadedModel) -> None:
    """Writes a state file atomically."""
    tensors, scalars = _pack(session)
    state = session.model_state
    write_tensors(
        path,
        {f"state.{name}": t for name, t in state.tensors().items()}
        | {f"session.{name}": t for name, t in tensors.items()},
        {"schema": str(SCHEMA), "model.name": as_utf8(model.name), "model.folder": as_utf8(str(model.folder.resolve()))}
        | {f"model.{name}": value for name, value in model.fingerprints.items()}
        | {f"state.{name}": value for name, value in state.describe().items()}
        | {f"session.{name}": value for name, value in scalars.items()},
    )


def load_state(path: Path, *, model: LoadedModel, device: str) -> SessionState:
    """The content of a state file, verified, with the memory on `device`.

    Raises:
        StateError: The file is missing, damaged, of another format or of another model.
    """
    from xlcli.state import State

    try:
        tensors, metadata = read_tensors(path, expected=None)
    except CheckpointError as error:
        raise StateError(error.message, _REMEDY) from None
    if metadata.get("schema") != str(SCHEMA) or "state.memory" not in metadata:
        raise StateError(f"{path} is not a state file of format {SCHEMA}.", "Give a file that --state-out wrote.")
    _check_model(path, metadata, model)
    memory = {name: t.to(device) for name, t in with_prefix("state.", tensors).items()}
    state = State.restore(memory, with_prefix("state.", metadata))
    if not model.network.is_compatible(state):
        raise StateError(f"{path} does not have the shape of model {model.name}.", _REMEDY)
    try:
        return _unpack(state, with_prefix("session.", tensors), with_prefix("session.", metadata), model.tokenizer)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StateError(f"{path} is damaged: {reason}.", _REMEDY) from None


def _check_model(path: Path, metadata: Mapping[str, str], model: LoadedModel) -> None:
    for name, here in model.fingerprints.items():
        there = metadata.get(f"model.{name}", "")
        if there != here:
            own = metadata.get("model.name", "")
            maker, remedy = f"model {own}, not {model.name}", f"Give that model (-m {shlex.quote(own)})"
            if own == as_utf8(model.name):
                maker, remedy = f"another version of model {own}", "Give that version (-m)"
            raise StateError(
                f"{path} was made with {maker} ({name} {there[:12] or 'unknown'}, not {here[:12]}).",
                f"{remedy}, or start without this state.",
            )


def _pack(session: SessionState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and scalars of the session, without the memory."""
    import numpy as np
    import torch

    pending, sampler, stream, source = session.pending, session.sampler, session.stream, session.source
    scalars: dict[str, object] = {"last_token": session.last_token, "pending.n_tokenized": pending.n_tokenized}
    tensors = {
        "pending.text": torch.from_numpy(np.frombuffer(pending.data, np.uint8).copy()),
        "pending.ids": torch.tensor(pending.ids, dtype=torch.int32),
    }
    if pending.documents:
        tensors["pending.documents"] = torch.tensor(pending.documents, dtype=torch.int64)
    if sampler is not None:
        scalars["sampler.seed"] = sampler.seed
        tensors["sampler.generator"] = sampler.generator
        tensors["sampler.recent"] = torch.tensor(sampler.recent, dtype=torch.int32)
    if stream is not None:
        scalars |= {f"stream.{name}": getattr(stream, name) for name in (*_COUNTERS, "bits")}
        texts = [text for text, _ in stream.scored]
        tensors["stream.scored_text"] = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).copy())
        tensors["stream.scored_sizes"] = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        tensors["stream.scored_bits"] = torch.tensor([bits for _, bits in stream.scored], dtype=torch.float64)
        for kind, recent in stream.recent.items():
            tensors[f"stream.recent_{kind}"] = torch.tensor(recent, dtype=torch.float64)
    if source is not None:
        scalars |= {f"source.{name}": getattr(source, name) for name in _PLACE}
        tensors["source.tail"] = torch.from_numpy(np.frombuffer(source.tail, np.uint8).copy())
    return tensors, {name: str(value) for name, value in scalars.items()}


def _unpack(
    model_state: State, tensors: Mapping[str, Tensor], scalars: Mapping[str, str], tokenizer: Tokenizer
) -> SessionState:
    """The inverse of `_pack`; `KeyError`, `ValueError` or `RuntimeError` when an entry is missing or malformed."""
    import torch

    n_tokenized, ids = _count(scalars, "pending.n_tokenized"), _token_ids(tensors, "pending.ids", tokenizer)
    pending = PendingText(_array(tensors, "pending.text", "uint8").tobytes(), ids, n_tokenized, _documents(tensors))
    sizes = tokenizer.sizes(ids, pending.data[:n_tokenized])
    is_text = tokenizer.kind == "words" or tokenizer.decode(ids) == pending.data[:n_tokenized]
    if len(sizes) != len(ids) or int(sizes.sum()) != n_tokenized or not is_text:
        raise ValueError("unread text and its tokens do not fit together")
    last_token = _count(scalars, "last_token")
    if last_token >= tokenizer.vocab_size:
        raise ValueError(f"token {last_token} is not in the vocabulary")
    sampler = stream = source = None
    if "sampler.seed" in scalars:
        recent = _token_ids(tensors, "sampler.recent", tokenizer).tolist()
        generator = torch.from_numpy(_array(tensors, "sampler.generator", "uint8"))
        torch.Generator().set_state(generator)
        sampler = SamplerState(_count(scalars, "sampler.seed"), generator, tuple(recent))
    if "stream.bits" in scalars:
        bits = float(scalars["stream.bits"])
        if not math.isfinite(bits):
            raise ValueError("'stream.bits' is not finite")
        counters = {name: _count(scalars, f"stream.{name}") for name in _COUNTERS}
        latest = with_prefix("stream.recent_", tensors)
        recent = {kind: tuple(_array(latest, kind, "float64").tolist()) for kind in latest}
        if not all(map(math.isfinite, itertools.chain(*recent.values()))):
            raise ValueError("a latest score is not finite")
        stream = StreamPosition(**counters, bits=bits, scored=_scored(tensors), recent=recent)
    if "source.offset" in scalars:
        device, inode, offset, modified = (_count(scalars, f"source.{name}", 2**64) for name in _PLACE)
        source = FilePosition(device, inode, offset, modified, _array(tensors, "source.tail", "uint8").tobytes())
        if not len(source.tail) <= source.offset < 2**63:
            raise ValueError("'source.tail' does not fit")
    return SessionState(model_state, last_token, pending, sampler, stream, source)


def _documents(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Offsets in the unread text at which documents begin."""
    if "pending.documents" not in tensors:
        return ()
    starts = tuple(_array(tensors, "pending.documents", "int64").tolist())
    within = (-1, *starts, len(tensors["pending.text"]) + 1)
    if any(b <= a for a, b in itertools.pairwise(within)):
        raise ValueError("'pending.documents' is not in order")
    return starts


def _scored(tensors: Mapping[str, Tensor]) -> tuple[tuple[bytes, float], ...]:
    """Text and bits of each token of the unfinished line."""
    text = _array(tensors, "stream.scored_text", "uint8").tobytes()
    sizes = _array(tensors, "stream.scored_sizes", "int32").tolist()
    bits = _array(tensors, "stream.scored_bits", "float64").tolist()
    stops = [*itertools.accumulate(sizes)]
    if min(sizes, default=1) < 1 or (stops or [0])[-1] != len(text) or not all(map(math.isfinite, bits)):
        raise ValueError("scored text and its tokens do not fit together")
    return tuple((text[stop - size : stop], own_bits) for stop, size, own_bits in zip(stops, sizes, bits, strict=True))


def _count(scalars: Mapping[str, str], name: str, end: int = 2**63) -> int:
    if not 0 <= (value := int(scalars[name])) < end:
        raise ValueError(f"'{name}' is {value}")
    return value


def _array(tensors: Mapping[str, Tensor], name: str, dtype: str) -> NDArray[Any]:
    if (str(tensors[name].dtype), tensors[name].ndim) != (f"torch.{dtype}", 1):
        raise ValueError(f"'{name}' is not a vector of {dtype}")
    return tensors[name].numpy()


def _token_ids(tensors: Mapping[str, Tensor], name: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    ids = _array(tensors, name, "int32")
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(f"'{name}' holds a token that is not in the vocabulary")
    return ids
