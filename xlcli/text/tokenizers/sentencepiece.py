"""A learned vocabulary of word pieces (sentencepiece, byte-pair encoding), made lossless for any bytes.

What sentencepiece would lose is kept from it. Tab, line end and carriage return, which its trainer strips or refuses,
are shown to it as their Unicode pictures. A word whose pieces do not give its bytes back (invalid UTF-8, U+2581, the
pictures themselves) is spelled in byte pieces <0xNN> where needed. Each word is tokenized alone and remembered, which is
fast and keeps the ids independent of how the text was cut. A line end is a piece of its own: were ":" and a line end
one piece, a prompt ending in ":" could not be continued as the text of training was.

Byte-pair encoding rather than the unigram model: on the same text and vocabulary it gave more bytes a token, trained
in a tenth of the time, and has no running float sum that could depend on the length of the text.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text.pretokenize import stable_prefix_len, whole_words, words
from xlcli.text.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

FILE = "tokenizer.model"
LARGEST_FILE = 2**25
"""A sentencepiece model of 2^20 pieces takes less than this many bytes."""

SMALLEST_VOCABULARY = 300

_SPACE = "\u2581"
_PICTURES = {"\t": "\u2409", "\n": "\u240a", "\r": "\u240d"}
_SHOW = str.maketrans(_PICTURES)
_HIDE = {picture: char for char, picture in _PICTURES.items()} | {_SPACE: " "}
_UNHIDE = str.maketrans(_HIDE)
_UNTRAINABLE = frozenset({*_HIDE, "\u2585", "\0"})
"""Characters with a meaning of their own, here or in the trainer; a word with one of them is left out of training."""
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_FIXED_PIECES = 257
"""256 byte pieces and <unk>, which no text ever becomes."""
_COVERAGE = 0.9995
"""A character outside the most frequent ones that make up this share of the text is spelled in byte pieces."""
_REMEMBERED_WORDS = 2**15
_REMEMBERED_BYTES = 48
_REMEDY = "Copy the model folder again from where it came."


class SentencePieceTokenizer(Tokenizer):
    """Word pieces with byte fallback.

    Args:
        proto: a serialized sentencepiece model with all 256 byte pieces.
        name: where it came from, for error messages.

    Raises:
        CheckpointError: `proto` is not a model that can spell any bytes.
    """

    kind = "sentencepiece"

    def __init__(self, proto: bytes, name: str = FILE) -> None:
        from sentencepiece import SentencePieceProcessor

        if len(proto) > LARGEST_FILE:
            raise CheckpointError(f"{name} has {len(proto)} bytes, more than any vocabulary needs.", _REMEDY)
        model = SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(proto)
            pieces = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        except (RuntimeError, ValueError, OSError):
            raise CheckpointError(f"{name} is not a sentencepiece model, or is damaged.", _REMEDY) from None
        self._model: SentencePieceProcessor = model
        self._proto = proto
        self._name = name
        self.vocab_size = len(pieces)
        self.fingerprint = sha256(b"sentencepiece" + proto).hexdigest()
        self._text: list[bytes] = []
        byte_ids: dict[int, int] = {}
        for i, piece in enumerate(pieces):
            if model.IsByte(i) and _BYTE_PIECE.fullmatch(piece):
                byte_ids[int(piece[3:5], 16)] = i
                self._text.append(bytes([int(piece[3:5], 16)]))
            elif model.IsUnknown(i) or model.IsControl(i):
                self._text.append(b"")
            else:
                self._text.append(piece.translate(_UNHIDE).encode())
        if len(byte_ids) != 256:
            raise CheckpointError(
                f"{name} has no byte pieces, so it cannot spell every text.", "Train it with byte fallback."
            )
        self._byte_ids = [byte_ids[value] for value in range(256)]
        self.id_sizes = np.array([len(text) for text in self._text], np.int32)
        self._remembered = _Words(self)
        self.start_id = int(self.encode(b"\n")[0])

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, which begins at a word border. Any bytes; `decode` gives exactly them back."""
        return np.frombuffer(b"".join(map(self._remembered.__getitem__, words(data))), np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text each of `ids`, the tokens of `data`, stands for; their sum is `len(data)`."""
        return self.id_sizes[np.asarray(ids, np.intp)]

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes that `ids` stand for; of each token alone, whatever its neighbors."""
        return b"".join([self._text[i] for i in ids])

    def stable_prefix_len(self, data: bytes) -> int:
        """Length of the longest prefix of `data` that tokenizes alone as it does within the whole; 0 if none."""
        return stable_prefix_len(data)

    def files(self) -> dict[str, bytes]:
        """Contents of the files to save, by name."""
        return {FILE: self._proto}

    @classmethod
    def load(cls, folder: Path) -> SentencePieceTokenizer:
        """The vocabulary saved in `folder`.

        Raises:
            CheckpointError: the file is missing, too large, damaged or not a lossless vocabulary.
        """
        from xlcli.files import read_bounded

        return cls(read_bounded(folder / FILE, LARGEST_FILE), str(folder / FILE))

    @classmethod
    def train(
        cls, chunks: Iterable[bytes], vocab_size: int, *, model: Literal["bpe", "unigram"] = "bpe"
    ) -> SentencePieceTokenizer:
        """Learn a vocabulary of about `vocab_size` pieces (fewer where the text has no more to offer).

        The result depends on the chunks and the size alone. Time and memory grow with the chunks, so give it a sample.

        Raises:
            ConfigError: `vocab_size` has no room beside the byte pieces.
            DataError: the chunks are empty.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"a sentencepiece vocabulary of {vocab_size} has no room beside its 256 byte pieces.",
                f"Give --vocab-size {SMALLEST_VOCABULARY} or more, or --tokenizer bytes.",
            )
        counts: Counter[bytes] = Counter()
        for portion in whole_words(chunks):
            counts.update(words(portion))
        if not counts:
            raise DataError("there is no text to learn a vocabulary from: it is empty.", "Give a file with text in it.")
        return cls(_train(counts, vocab_size, model))

    def _encode_word(self, word: bytes) -> bytes:
        try:
            ids = self._pieces(word.decode())
        except UnicodeDecodeError:
            ids = []
        if self.decode(ids) != word:
            ids = list(self._spell(word))
        return np.array(ids, np.int32).tobytes()

    def _pieces(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._model.EncodeAsIds(text.translate(_SHOW))
        except (RuntimeError, OSError):
            raise CheckpointError(f"{self._name} fails on text; it is damaged.", _REMEDY) from None
        return ids

    def _spell(self, word: bytes) -> Iterator[int]:
        """Pieces for the stretches of `word` that survive them, byte pieces for the rest."""
        stretch = ""
        for char in word.decode(errors="surrogateescape") + "\ud800":
            if char in _HIDE or "\ud800" <= char <= "\udfff":
                if stretch:
                    ids = self._pieces(stretch)
                    if self.decode(ids) != (text := stretch.encode()):
                        ids = [self._byte_ids[value] for value in text]
                    yield from ids
                    stretch = ""
                if char != "\ud800":
                    yield from (self._byte_ids[value] for value in char.encode(errors="surrogateescape"))
            else:
                stretch += char


class _Words(dict[bytes, bytes]):
    """Ids of words met before, as the bytes of int32; forgets all when full, so that memory stays flat."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        super().__init__()
        self._encode = tokenizer._encode_word

    def __missing__(self, word: bytes) -> bytes:
        ids = self._encode(word)
        if len(word) <= _REMEMBERED_BYTES:
            if len(self) >= _REMEMBERED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _train(counts: Counter[bytes], vocab_size: int, model: str) -> bytes:
    from sentencepiece import SentencePieceTrainer

    texts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        text = word.decode(errors="ignore")
        if _UNTRAINABLE.isdisjoint(text):
            text = text.translate(_SHOW)
            body = text.removesuffix(_PICTURES["\n"]).removesuffix(_PICTURES["\r"])
            texts[body] += count
            texts[text[len(body) :]] += count
            for char in text:
                characters[char] += count
    kept = _frequent(characters, most=(vocab_size - _FIXED_PIECES) // 2)
    rare = str.maketrans(dict.fromkeys(characters.keys() - kept, "\n"))
    stretches: Counter[str] = Counter()
    for text, count in texts.items():
        for stretch in text.translate(rare).split("\n"):
            stretches[stretch] += count
    del stretches[""]
    rows = sorted(stretches.items(), key=lambda row: (-row[1], row[0])) or [(_PICTURES["\n"], 1)]
    proto = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(f"{text}\t{count}" for text, count in rows),
        input_format="tsv",
        model_writer=proto,
        model_type=model,
        vocab_size=vocab_size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        hard_vocab_limit=False,
        max_sentence_length=2**20,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=4,
    )
    return proto.getvalue()


def _frequent(characters: Counter[str], most: int) -> set[str]:
    """The characters worth a piece: the most frequent ones, up to `_COVERAGE` of the text and `most` in number."""
    kept: set[str] = set()
    rest = characters.total() * (1 - _COVERAGE)
    missing = characters.total()
    for char, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if missing <= rest or len(kept) >= most:
            break
        kept.add(char)
        missing -= count
    return kept
