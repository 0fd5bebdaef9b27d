"""Values of the Python interface: the score of a text, and the state after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xlcli.errors import StateError, counted, plural_noun
from xlcli.events import TokenScore, WordScore
from xlcli.inference import SaveState
from xlcli.markup import BACKGROUNDS, INK, Part, by_token, color_step, colored, legend
from xlcli.metrics import LN2, bits_per, perplexity
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import SessionState

SHOWN_BYTES = 2**14  # text that a notebook shows of a score: about 300 kB of HTML, which it saves


@dataclass(frozen=True, repr=False)
class TextScore:
    """Score of one text: its tokens with their surprisal in bits; sums and means over the text.

    A notebook shows the text with its words in the colors of `xlcli eval --html`, which mean the same in all texts.
    """

    tokens: tuple[TokenScore, ...]
    """Tokens in text order; `byte` is the offset from the start of the text."""
    words: tuple[WordScore, ...] = ()
    """Words in text order, as rows of a table: `pandas.DataFrame(score.words)`."""

    def __repr__(self) -> str:
        return f"TextScore({self.figures})"

    def _repr_html_(self) -> str:
        """The text in color below a legend, as HTML for IPython. The pointer shows the bits of a word."""
        return _LEGEND + _colored_text(self, SHOWN_BYTES)

    @property
    def figures(self) -> str:
        """Sizes and sums in words, as a notebook shows them."""
        sizes = (self.bytes, "byte"), (len(self.words), "word"), (len(self.tokens), "token")
        size = ", ".join(f"{number:,} {plural_noun(number, unit)}" for number, unit in sizes)
        return f"{size}, {self.bits:.1f} bits, {self.bits_per_byte:.3f} bits/byte"

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


class TextScores(list[TextScore]):
    """Scores of several texts, in their order. A notebook shows the texts in color, below one legend."""

    def __getitem__(self, place: Any) -> Any:
        """The score at a place, or the `TextScores` of a slice."""
        found = super().__getitem__(place)
        return TextScores(found) if isinstance(place, slice) else found

    def _repr_html_(self) -> str:
        """The texts as HTML for IPython, up to `SHOWN_BYTES` in all."""
        shown = _LEGEND
        left = SHOWN_BYTES
        for number, score in enumerate(self):
            if left <= 0:
                return f"{shown}<div>... and {counted(len(self) - number, 'more text')}</div>"
            shown += _colored_text(score, left)
            left -= score.bytes
        return shown


def _colored_text(score: TextScore, most_bytes: int) -> str:
    """HTML of the figures and of the beginning of the text: whole tokens, up to the one with this byte."""
    text = bytearray()
    tokens = []
    for token in score.tokens:
        if len(text) >= most_bytes:
            break
        tokens.append((len(text), token.bits))
        text += token.text
    words = []
    first_byte = score.tokens[0].byte if score.tokens else 0  # below 0 if the first token began in the state
    for word in score.words:
        start = max(0, word.byte - first_byte)
        if start < len(text):
            words.append(Part(start, word.byte - first_byte + len(word.word.encode()), word.bits))
    about = score.figures
    if len(text) < score.bytes:
        about += f"; the first {len(text):,} bytes"
    shown = colored(text, by_token(text, words, tokens), _paint)
    return f'<div>{about}</div><pre lang="" style="{_TEXT_STYLE}">{shown}</pre>'


def _paint(html: str, bits: float) -> str:
    """HTML of a word in the color of its bits."""
    step = color_step(bits)
    color = f"background:{BACKGROUNDS[step - 1]};color:{INK}" if step else ""
    return f'<span title="{bits:.2f} bits" style="{color}">{html}</span>'


_TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext"
_LEGEND = f'<div style="font-size:smaller">bits of a word {legend(_paint)}</div>'


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
    """A copy of the session of a state, which inference consumes; `StateError` if it is of another model."""
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
