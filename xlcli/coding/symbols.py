"""Arithmetic coding of tokens with the predictions of a session, one token per call of the model.

The range coder of constriction turns the probabilities of all tokens into integer counts of at least 1 in 2^24. Encoder
and decoder make the same calls in the same order, so their counts are equal where the same calls give the same
floating-point numbers. `check_hash` recognizes machines where they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import constriction
import numpy as np

from xlcli.config import OnlineConfig
from xlcli.online import not_finite

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from xlcli.events import Notice
    from xlcli.inference import InferenceSession


class InvalidWordsError(ValueError):
    """Words that no token has with the probabilities of this machine."""


N_CHECKED = 24
"""Number of predictions that `check_hash` compares."""
MOST_READ = 1024
"""Maximum number of tokens that it reads before them."""


class TokenCoder:
    """Predictions for the tokens of one text in order.

    Args:
        session: A session at the start of a text.

    Attributes:
        bits: Sum of the surprisals of the tokens so far.
    """

    def __init__(self, session: InferenceSession) -> None:
        self.bits = 0.0
        self._session = session

    def _probabilities(self) -> NDArray[np.float64]:
        """Probabilities (v) of the next token."""
        logits = self._session.predict()[0].double().cpu().numpy()
        if not np.isfinite(logits).all():
            raise not_finite(self._session.model.name, self._session.options)
        weights = np.exp(logits - logits.max())
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities

    def _observe(self, token: int, probabilities: NDArray[np.float64]) -> None:
        self.bits -= float(np.log2(max(probabilities[token], 2.0**-1074)))
        self._session.observe(token)

    @staticmethod
    def _counts(probabilities: NDArray[np.float64]) -> constriction.stream.model.Categorical:
        """Entropy model of one token; `lazy` because each is used once."""
        return constriction.stream.model.Categorical(probabilities, lazy=True)


class TokenEncoder(TokenCoder):
    """Turns tokens into words of 32 bits.

    Attributes:
        n_tokens: Number of tokens since the last `finish`.
    """

    def __init__(self, session: InferenceSession) -> None:
        super().__init__(session)
        self.n_tokens = 0
        self._coder = constriction.stream.queue.RangeEncoder()

    def add(self, token: int) -> None:
        """Codes the next token."""
        probabilities = self._probabilities()
        self._coder.encode(token, self._counts(probabilities))
        self._observe(token, probabilities)
        self.n_tokens += 1

    def finish(self) -> bytes:
        """Words, little-endian, of the tokens since the last call."""
        words: bytes = self._coder.get_compressed().astype("<u4").tobytes()
        self._coder.clear()
        self.n_tokens = 0
        return words


class TokenDecoder(TokenCoder):
    """Turns words of 32 bits into the tokens that an `TokenEncoder` was given."""

    def tokens(self, words: bytes, n_tokens: int) -> Iterator[int]:
        """The next tokens, from the words of one `TokenEncoder.finish`."""
        coder = constriction.stream.queue.RangeDecoder(np.frombuffer(words, "<u4").astype(np.uint32))
        for _ in range(n_tokens):
            probabilities = self._probabilities()
            try:
                token = int(coder.decode(self._counts(probabilities)))
            except AssertionError:  # of constriction: no token has these words
                raise InvalidWordsError from None
            self._observe(token, probabilities)
            yield token


def check_hash(session: InferenceSession) -> Generator[Notice, None, str]:
    """Hash, 16 hexadecimal digits, of the logits before each of `N_CHECKED` fixed tokens, to the bit.

    Before them the session reads as many tokens as its memory or a block of adaptation holds, at most `MOST_READ`.

    Args:
        session: A session at the start of a text, which is used up.

    Yields:
        Notices about kernels.
    """
    hashed, options, vocab_size = hashlib.sha256(), session.options, session.model.tokenizer.vocab_size
    ids = np.array([(31 * i * i + 7 * i) % vocab_size for i in range(MOST_READ + N_CHECKED)], np.int32)
    block = options.adapt_block or MOST_READ if isinstance(options, OnlineConfig) and options.adapt else 0
    n_read = min(max(session.state.span.longest, block) + 1, MOST_READ)
    session.read(ids[:n_read], lambda: False)
    for token in ids[n_read : n_read + N_CHECKED].tolist():
        if notice := session.compilation():
            yield notice
        hashed.update(session.predict()[0].double().cpu().numpy().astype("<f8").tobytes())
        session.observe(token)
    return hashed.hexdigest()[:16]
