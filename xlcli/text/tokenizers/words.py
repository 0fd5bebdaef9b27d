"""Word tokenizer of the published word-level benchmarks (Penn Treebank, WikiText-2).

A line becomes `line.split()` and `<eos>`; a word that is not in the vocabulary becomes `<unk>`. White space counts as
part of the next token, so that the sizes of the tokens add up to the text, but decoding does not restore it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text import pretokenize
from xlcli.text.tokenizers.base import Tokenizer

FILE = "tokenizer.words"
LARGEST_FILE = 2**26
LARGEST_VOCABULARY = 2**18
"""Default maximum number of words."""

_UNKNOWN, _END = b"<unk>", b"<eos>"
_SPLIT = re.compile(rb"\s*\S+")
_MAX_COUNTED = 2**22


class WordsTokenizer(Tokenizer):
    """Closed vocabulary of words.

    Args:
        vocabulary: Distinct words without white space, `<unk>` and `<eos>` first.
    """

    kind = "words"
    start_id = 1
    id_sizes = None

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = list(vocabulary)
        self._ids = {word: i for i, word in enumerate(self._vocabulary)}
        self.vocab_size = len(self._vocabulary)
        self.fingerprint = sha256(b"words" + b"\n".join(self._vocabulary)).hexdigest()

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, which starts at a word boundary; unknown words become `<unk>`."""
        return np.array([self._ids.get(word, 0) for word, _ in _tokens(data)], np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text of each token of `data`, with the white space before it; their sum is `len(data)`."""
        return np.array([size for _, size in _tokens(data)], np.int32)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Each word followed by a space, `<eos>` as a line end."""
        return b"".join([b"\n" if i == self.start_id else self._vocabulary[i] + b" " for i in ids])

    def files(self) -> dict[str, bytes]:
        """The vocabulary, one word per line."""
        return {FILE: b"".join(word + b"\n" for word in self._vocabulary)}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer saved in `folder`.

        Raises:
            CheckpointError: The file is missing, too large or not a list of distinct words.
        """
        from xlcli.files import read_bounded

        vocabulary = read_bounded(folder / FILE, LARGEST_FILE).removesuffix(b"\n").split(b"\n")
        is_valid = all(len(word.split()) == 1 for word in vocabulary) and len(set(vocabulary)) == len(vocabulary)
        if vocabulary[:2] != [_UNKNOWN, _END] or not is_valid:
            raise CheckpointError(
                f"{folder / FILE} is not a list of distinct words that begins with <unk> and <eos>.",
                "Copy the model folder again from its source.",
            )
        return cls(vocabulary)

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """The most frequent words of a text, by frequency; `vocab_size` (None: 2^18) counts `<unk>` and `<eos>`.

        Raises:
            ConfigError: `vocab_size` is less than 3.
            DataError: The text has no words.
        """
        if vocab_size is not None and vocab_size < 3:
            raise ConfigError(
                f"a vocabulary of {vocab_size} is too small for a word.", "Give --vocab-size 1000 or more."
            )
        counts: Counter[bytes] = Counter()
        for portion in pretokenize.whole_words(chunks):
            counts.update(portion.split())
            if len(counts) > _MAX_COUNTED:
                counts = Counter({word: count for word, count in counts.items() if count > 1})
        for special in (_UNKNOWN, _END):
            counts.pop(special, None)
        if not counts:
            raise DataError("the text to train the tokenizer on has no words.", "Give a file with text in it.")
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([_UNKNOWN, _END, *ranked[: (vocab_size or LARGEST_VOCABULARY) - 2]])


def _tokens(data: bytes) -> list[tuple[bytes, int]]:
    """Each token of `data` and its size in bytes."""
    result: list[tuple[bytes, int]] = []
    for word in pretokenize.split_words(data):
        taken = 0
        for match in _SPLIT.findall(word):
            result.append((match.lstrip(), len(match)))
            taken += len(match)
        if word.endswith(b"\n"):
            result.append((_END, len(word) - taken))
        elif taken == 0:
            result.append((_UNKNOWN, len(word)))
        elif taken < len(word):
            last, size = result[-1]
            result[-1] = (last, size + len(word) - taken)
    return result


def n_unknown(ids: NDArray[Any]) -> int:
    """Number of ids that are `<unk>`; reads a mapped file in blocks."""
    return sum(int(np.count_nonzero(ids[at : at + 2**20] == 0)) for at in range(0, len(ids), 2**20))
