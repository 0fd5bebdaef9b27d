"""Whole words, counted as the published word-level benchmarks (Penn Treebank, WikiText-2) count them.

A line is `line.split()` and then `<eos>`; a word outside the vocabulary is `<unk>`. Blanks belong to the token after
them, so the bytes of the tokens add up to the text; which blanks they were is lost.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text import pretokenize
from xlcli.text.tokenizers.base import Tokenizer

FILE = "tokenizer.words"
LARGEST_FILE = 2**26
LARGEST_VOCABULARY = 2**18
"""Words kept when no size is given."""

_UNKNOWN, _END = b"<unk>", b"<eos>"
_SPLIT = re.compile(rb"\s*\S+")
_MANY = 2**22


class WordsTokenizer(Tokenizer):
    """A closed list of words.

    Args:
        vocabulary: distinct words without blanks, `<unk>` and `<eos>` first.
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
        """Ids of `data`, which begins at a word border; unknown words become `<unk>`."""
        return np.array([self._ids.get(word, 0) for word, _ in _tokens(data)], np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text, blanks before it included, of each of the tokens `ids` of `data`; sums to `len(data)`."""
        return np.array([size for _, size in _tokens(data)], np.int32)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Each word with a blank after it, `<eos>` as a line end."""
        return b"".join([b"\n" if i == self.start_id else self._vocabulary[i] + b" " for i in ids])

    def stable_prefix_len(self, data: bytes) -> int:
        """Length of the longest prefix of `data` that tokenizes alone as it does within the whole; 0 if none."""
        return pretokenize.stable_prefix_len(data)

    def files(self) -> dict[str, bytes]:
        """Contents of the files to save, by name."""
        return {FILE: b"".join(word + b"\n" for word in self._vocabulary)}

    @classmethod
    def load(cls, folder: Path) -> WordsTokenizer:
        """The vocabulary saved in `folder`.

        Raises:
            CheckpointError: the file is missing, too large or not a list of distinct words.
        """
        from xlcli.files import read_bounded

        vocabulary = read_bounded(folder / FILE, LARGEST_FILE).removesuffix(b"\n").split(b"\n")
        proper = all(len(word.split()) == 1 for word in vocabulary) and len(set(vocabulary)) == len(vocabulary)
        if vocabulary[:2] != [_UNKNOWN, _END] or not proper:
            raise CheckpointError(
                f"{folder / FILE} is not a list of distinct words that begins with <unk> and <eos>.",
                "Copy the model folder again from where it came.",
            )
        return cls(vocabulary)

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> WordsTokenizer:
        """The `vocab_size` most frequent words of the text (`<unk>` and `<eos>` among them), frequent ones first.

        Raises:
            ConfigError: `vocab_size` has no room for a word.
            DataError: the text has no words.
        """
        if vocab_size is not None and vocab_size < 3:
            raise ConfigError(
                f"a vocabulary of {vocab_size} has no room for a word.", "Give --vocab-size 1000 or more."
            )
        counts: Counter[bytes] = Counter()
        for portion in pretokenize.whole_words(chunks):
            counts.update(portion.split())
            if len(counts) > _MANY:
                counts = Counter({word: count for word, count in counts.items() if count > 1})
        for special in (_UNKNOWN, _END):
            counts.pop(special, None)
        if not counts:
            raise DataError("there are no words to learn a vocabulary from.", "Give a file with text in it.")
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([_UNKNOWN, _END, *ranked[: (vocab_size or LARGEST_VOCABULARY) - 2]])


def _tokens(data: bytes) -> list[tuple[bytes, int]]:
    """Each token of `data` and the bytes it stands for."""
    result: list[tuple[bytes, int]] = []
    for word in pretokenize.words(data):
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
