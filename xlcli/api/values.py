"""Values of the Python interface: the score of a text, and the state after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xlcli.errors import StateError
from xlcli.events import TokenScore, WordScore
from xlcli.inference import SaveState
from xlcli.metrics import LN2, bits_per, perplexity
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import SessionState


@dataclass(frozen=True)
class TextScore:
    """Score of one text: its tokens with their surprisal in bits; sums and means over the text."""

    tokens: tuple[TokenScore, ...]
    """Tokens in text order; `byte` is the offset from the start of the text."""
    words: tuple[WordScore, ...] = ()
    """Words in text order, as rows of a table: `pandas.DataFrame(score.words)`."""

    @property
    def bytes(self) -> int:
        return sum(len(token.text) for token in self.tokens)

    @property
    def bits(self) -> float:
        return math.fsum(token.bits for token in self.tokens)

    @property
    def nats(self) -> float:
        return self.bits * LN2

    @property
    def bits_per_byte(self) -> float:
        """Bits divided by bytes; 0 for an empty text."""
        return bits_per(self.nats, self.bytes)

    @property
    def perplexity(self) -> float:
        """Perplexity per token; 1 for an empty text."""
        return perplexity(self.nats, len(self.tokens))


@dataclass(frozen=True, eq=False, repr=False)
class TextState:
    """State after a text: memory of every layer, last token, and the unread end of the text.

    Immutable: no call changes it. Only the model that made it accepts it.
    """

    session: SessionState
    fingerprints: Mapping[str, str]

    def __repr__(self) -> str:
        return f"TextState({self.n_bytes} bytes, mem_len={self.mem_len})"

    @property
    def mem_len(self) -> int:
        return self.session.model_state.span.mem_len

    @property
    def n_lines(self) -> int:
        """Line ends since the start, those of the unread end included."""
        return self.session.stream.n_lines + self.session.pending.data.count(b"\n")

    @property
    def n_bytes(self) -> int:
        """Bytes of text since the start, the unread end included."""
        return self.session.stream.n_bytes + len(self.session.pending.data)


def resumed(state: TextState | None, model: LoadedModel) -> SessionState | None:
    """A copy of the session of a state, because inference consumes the one it is given.

    Raises:
        StateError: The state belongs to another model.
    """
    if state is None:
        return None
    if state.fingerprints != model.fingerprints:
        raise StateError(f"the state belongs to a different model, not {model.name}.", "Read the text again.")
    return state.session.fork()


def saving(save: Callable[[TextState], None] | None, model: LoadedModel) -> SaveState | None:
    """Function that calls `save` with a copy of a session as a state; None without one."""
    if save is None:
        return None
    return lambda session: save(TextState(session.fork(), model.fingerprints))
