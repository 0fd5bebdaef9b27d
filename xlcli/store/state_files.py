"""State files: the state of an inference session in one safetensors file, tied to its model by fingerprints.

Tensors `state.*` are the memory of the model, tensors `session.*` unread text, the random-number generator, and all
other values as JSON. docs/developers/format.md lists the names.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Base64Bytes, Field, TypeAdapter, ValidationError
from torch import Tensor

from xlcli.errors import CheckpointError, StateError
from xlcli.files import as_utf8, linked
from xlcli.files.tensors import prefixed, read_tensors, with_prefix, write_tensors
from xlcli.state import State
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import SCHEMA
from xlcli.text.base import Tokenizer
from xlcli.text.follow import LogPosition
from xlcli.text.json_rows import check_depth

_REMEDY = "Start without this state."
Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(gt=-1e300, lt=1e300)]


@dataclass(frozen=True)
class PendingText:
    """Text that the model has not read yet. Tokens of its beginning are saved: cut text could have other ones."""

    data: bytes
    ids: NDArray[np.int32]  # tokens (n) of its beginning
    sizes: NDArray[np.int32]  # bytes of text of each (n)
    documents: tuple[int, ...] = ()  # ascending offsets in `data` before which the memory is to be cleared

    @property
    def n_tokenized(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True)
class SamplerState:
    """Seed and state of a random-number generator, and the latest tokens, for the repetition penalty."""

    seed: Count
    generator: Base64Bytes
    recent: tuple[Count, ...]


@dataclass
class WordPosition:
    """Place between the words of a text."""

    document: Count = 0  # number of documents that have begun
    # Other columns of the row that the present document is.
    fields: dict[str, Any] = field(default_factory=dict)
    # Ascending offsets at which further ones begin, with their fields.
    starts: deque[tuple[Count, dict[str, Any]]] = field(default_factory=lambda: deque([(0, {})]))
    line: Count = 0  # line of the unfinished word
    number: Count = 0  # number of words of this line so far
    text: Base64Bytes = b""  # text of the unfinished word, with the white space before it
    bits: Finite = 0.0  # surprisal of its tokens in bits
    tokens: Count = 0  # number of its tokens
    before: Finite = 0.0  # log2 of the probability that the word before it ended
    entropy: Finite = 0.0  # entropy in bits of the prediction of its first token
    last: Base64Bytes = b"\n"  # text of the token before; a line end after a word that has ended

    @property
    def n_begun(self) -> int:
        """Number of documents that have begun, or will at one of `starts`."""
        return self.document + len(self.starts)

    def begin(self, byte: int, fields: Mapping[str, Any]) -> None:
        """Adds a document that begins at this byte, after all others; two at one byte: the first has no text."""
        self.starts.append((byte, dict(fields)))

    def copy(self) -> WordPosition:
        return replace(self, starts=deque(self.starts))


@dataclass(frozen=True)
class RecordPosition:
    """A record that was not output yet."""

    start: Count  # offset in bytes at which its text begins
    line: Count  # line of the input at which it begins
    row: str  # all fields of its row, with the text, as JSON
    key: str  # the key of the text in `row`
    is_joined: bool = False  # text of later rows was added to it
    ends_line: bool = False  # the text of the last of these rows ends with a line end, as Docker writes it


@dataclass(frozen=True)
class StreamPosition:
    """Lines, bytes and tokens scored of a stream, with the sum of their surprisals, and its unfinished line."""

    n_lines: Count = 0
    n_bytes: Count = 0
    n_tokens: Count = 0
    bits: Finite = 0.0
    line_start: Count = 0  # offset in bytes of the unfinished line
    # Text and surprisal in bits of each token scored but not yet output; 0 bits if it began in the line before.
    scored: tuple[tuple[Annotated[Base64Bytes, Field(min_length=1)], Finite], ...] = ()
    # Latest scores of what is output (`lines`, `words` or `tokens`), with which the next one is compared.
    recent: Mapping[str, tuple[Finite, ...]] = field(default_factory=dict)
    words: WordPosition | None = None  # place between the words, if they are output
    line_tokens: Count = 0  # number of tokens of `scored` that began in this line
    story: str | None = None  # value of the column `reset_on_change` in the last row that arrived
    # Records of the text that waits, in order; the first one may have been scored in part.
    records: tuple[RecordPosition, ...] = ()
    input_line: Count = 0  # line of the input at which the last row that arrived begins
    stream: str | None = None  # stream of the container that wrote the last row, or None
    unfinished: str | None = None  # this stream if its line goes on in a later row, else None
    # Options that say what of the input is the text; None if no stream of text in lines or rows saved it.
    reads: str | None = None


@dataclass(frozen=True)
class SessionState:
    """State of an inference session as a value. A session that continues it equals one that never stopped."""

    model_state: State
    last_token: int  # token that has been scored or sampled, but not read by the model
    pending: PendingText  # unread text, which comes before any new text
    sampler: SamplerState | None = None
    stream: StreamPosition = field(default_factory=StreamPosition)
    source: LogPosition | None = None  # place in the log that the text was taken from, if it is followed

    def fork(self) -> SessionState:
        """Copy that shares no tensor of the memory, so that both can be continued."""
        return replace(self, model_state=self.model_state.fork())


@dataclass(frozen=True)
class _Values:
    """What a state file has as JSON."""

    last_token: Count
    documents: tuple[Count, ...]
    sampler: SamplerState | None
    stream: StreamPosition | None
    source: LogPosition | None


def save_state(path: Path, session: SessionState, *, model: LoadedModel) -> None:
    state, folder = session.model_state, model.folder.resolve()
    tensors = prefixed("state.", state.tensors()) | prefixed("session.", _pack(session))
    metadata = {"schema": str(SCHEMA), "model.name": as_utf8(model.name), "model.folder": as_utf8(str(folder))}
    metadata |= prefixed("model.", model.fingerprints) | prefixed("state.", state.describe())
    write_tensors(linked(path), tensors, metadata)


def load_state(path: Path, *, model: LoadedModel, device: str) -> SessionState:
    """The content of a state file; `StateError` if it is missing, damaged, or of another format or another model."""
    try:
        tensors, metadata = read_tensors(path, expected=None)
    except CheckpointError as error:
        raise StateError(error.message, _REMEDY) from None
    is_state = "state.memory" in metadata
    if not is_state or metadata.get("schema") != str(SCHEMA):
        kind = "no state file"
        if is_state:
            kind = f"of format {metadata.get('schema', '?')[:9]}"
        remedy = "Move it away, and begin a new state."
        raise StateError(f"{path} is {kind}; this version reads states of format {SCHEMA}.", remedy)
    _check_model(path, metadata, model)
    memory = {name: t.to(device) for name, t in with_prefix("state.", tensors).items()}
    state = State.restore(memory, with_prefix("state.", metadata))
    if not model.network.is_compatible(state):
        raise StateError(f"{path} does not have the shape of model {model.name}.", _REMEDY)
    try:
        return _unpack(state, with_prefix("session.", tensors), model.tokenizer)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StateError(f"{path} is damaged: {reason}.", _REMEDY) from None


def _check_model(path: Path, metadata: Mapping[str, str], model: LoadedModel) -> None:
    """`StateError` if another model made the state, which its remedy names."""
    for name, here in model.fingerprints.items():
        there = metadata.get(f"model.{name}", "")
        if there == here:
            continue
        model_name = metadata.get("model.name", "")
        if model_name == as_utf8(model.name):
            maker = f"another version of model {model_name}"
            remedy = "It may have been trained further: give that version (-m)"
        else:
            maker = f"model {model_name}, not {model.name}"
            remedy = f"Give that model (-m {shlex.quote(model_name)})"
        difference = f"{name} {there[:12] or 'unknown'}, not {here[:12]}"
        raise StateError(f"{path} was made with {maker} ({difference}).", f"{remedy}, or start without this state.")


def _pack(session: SessionState) -> dict[str, Tensor]:
    """Tensors of the session, without the memory."""
    pending = session.pending
    values = _Values(session.last_token, pending.documents, session.sampler, session.stream, session.source)
    return {
        "text": _as_tensor(pending.data),
        "values": _as_tensor(TypeAdapter(_Values).dump_json(values)),
        "ids": torch.tensor(pending.ids, dtype=torch.int32),
        "sizes": torch.tensor(pending.sizes, dtype=torch.int32),
    }


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _unpack(model_state: State, tensors: Mapping[str, Tensor], tokenizer: Tokenizer) -> SessionState:
    """Makes a session of a memory and the tensors of `_pack`; `KeyError`, `ValueError` or `RuntimeError` for damage."""
    types = {"text": torch.uint8, "values": torch.uint8, "ids": torch.int32, "sizes": torch.int32}
    for name, tensor in tensors.items():
        if tensor.dtype != types[name] or tensor.ndim != 1:
            raise ValueError(f"'{name}' is not a vector of {types[name]}")
    data, ids, sizes = tensors["text"].numpy().tobytes(), tensors["ids"].numpy(), tensors["sizes"].numpy()
    try:
        values = TypeAdapter(_Values).validate_json(tensors["values"].numpy().tobytes())
    except ValidationError as error:
        raise ValueError(f"'{'.'.join(map(str, error.errors()[0]['loc']))}' has no legal value") from None
    sampler = values.sampler
    tokens = np.append(ids, values.last_token)
    if sampler is not None:
        tokens = np.append(tokens, np.array(sampler.recent, np.int64))
        torch.Generator().set_state(torch.tensor([*sampler.generator], dtype=torch.uint8))  # raises if it is malformed
    if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
        raise ValueError("a token is not in the vocabulary")
    pending = PendingText(data, ids, sizes, values.documents)
    _check_pending(pending, tokenizer)
    if values.source is not None:
        _check_log(values.source)
    stream = values.stream or StreamPosition()
    for record in stream.records:
        _check_row(record.row)
    return SessionState(model_state, values.last_token, pending, sampler, stream, values.source)


def _check_row(row: str) -> None:
    """`ValueError` if this is no JSON object, or one that nests too deeply."""
    try:
        fields = json.loads(row)
        check_depth(fields, len(row))
    except RecursionError:
        raise ValueError("a record nests too deeply") from None
    is_object = isinstance(fields, dict)
    if not is_object:
        raise ValueError("a record is no JSON object")


def _check_pending(pending: PendingText, tokenizer: Tokenizer) -> None:
    """Checks that unread text, the tokens of its beginning and its documents fit together, else `ValueError`."""
    ids, sizes, n_tokenized = pending.ids, pending.sizes, pending.n_tokenized
    fit_together = len(sizes) == len(ids) and not (sizes < 0).any() and n_tokenized <= len(pending.data)
    if fit_together and tokenizer.id_sizes is not None:
        # A byte that has no token is one stand-in, so stand-ins and their bytes are left out of the comparison.
        is_stand_in = (ids == tokenizer.stand_in) & (sizes == 1)
        starts = np.cumsum(sizes) - sizes  # of the tokens in the text
        text = np.delete(np.frombuffer(pending.data, np.uint8, n_tokenized), starts[is_stand_in]).tobytes()
        have_right_sizes = (tokenizer.id_sizes[ids] == sizes)[~is_stand_in].all()
        fit_together = have_right_sizes and tokenizer.decode(ids[~is_stand_in]) == text
    if not fit_together:
        raise ValueError("unread text and its tokens do not fit together")
    before_text, after_text = -1, len(pending.data) + 1
    for earlier, later in itertools.pairwise((before_text, *pending.documents, after_text)):
        if later <= earlier:
            raise ValueError("documents are not in order")


def _check_log(log: LogPosition) -> None:
    """`ValueError` if a position in a log is impossible."""
    for place in log.files:
        least_tail = min(place.offset, 1)  # of a file of which anything was read
        if not least_tail <= len(place.tail) <= place.offset:
            raise ValueError("a place in the log does not fit")
    if b"\0" in log.path:
        raise ValueError("a path of the log does not fit")
