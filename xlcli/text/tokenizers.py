"""Tokenizers: bytes, words, sentencepiece; choosing, training and loading one. Those of others: `xlcli.text.foreign`.

A tokenizer encodes each word (see `xlcli.text.pretokenize`) independently, so that the ids do not depend on how a text
is cut into calls. There is no begin-of-text token: a text is treated as following a line end, `start_id`.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.events import Notice
from xlcli.files import VOCABULARY_LIMIT, read_bounded, read_json
from xlcli.text.base import FILE, REMEDY, SCHEMA, PieceTokenizer, Tokenizer
from xlcli.text.corpus import Facts
from xlcli.text.foreign import LARGEST_PIECES, IdsTokenizer, TokenizersTokenizer
from xlcli.text.pretokenize import WORDS, whole_words

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

MOST_IDS = 2**24  # maximum number of ids of a vocabulary that comes with a model


class BytesTokenizer(Tokenizer):
    """The id of a token is the value of its byte."""

    kind = "bytes"
    vocab_size = 256
    start_id = 10
    fingerprint = sha256(b"bytes").hexdigest()
    id_sizes = np.ones(256, np.int32)

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ids = np.frombuffer(data, np.uint8).astype(np.int32)
        return ids, np.ones_like(ids)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        return np.asarray(ids, np.uint8).tobytes()

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        return cls()


LARGEST_VOCABULARY = 2**18  # default maximum number of words

_UNKNOWN, _END = b"<unk>", b"<eos>"
_WORD = re.compile(rb"\s*\S+")
_MAX_COUNTED = 2**22


class WordsTokenizer(Tokenizer):
    """Closed vocabulary of distinct words without white space, one per line of its file, with `<unk>` and `<eos>`."""

    kind = "words"
    file = "tokenizer.words"
    id_sizes = None

    def __init__(self, data: bytes, name: str = file) -> None:
        super().__init__(data, name)
        self._vocabulary = data.removesuffix(b"\n").split(b"\n")
        self._ids = {word: i for i, word in enumerate(self._vocabulary)}
        self.vocab_size = len(self._vocabulary)
        self.fingerprint = sha256(b"words" + data.removesuffix(b"\n")).hexdigest()
        is_valid = all(len(word.split()) == 1 for word in self._vocabulary) and len(self._ids) == self.vocab_size
        if not is_valid or not {_UNKNOWN, _END} <= self._ids.keys():
            raise CheckpointError(f"{name} is not a list of distinct words with <unk> and <eos>.", REMEDY)
        self.unknown_id, self.start_id = self._ids[_UNKNOWN], self._ids[_END]
        self.separate_ids = range(self.vocab_size)

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of `data`, unknown words as `<unk>`, and sizes; a word has the white space before it."""
        rows = [(self._ids.get(word, self.unknown_id), size) for word, size in _word_tokens(data)]
        ids, sizes = np.array(rows, np.int32).reshape(-1, 2).T
        return ids, sizes

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The words with blanks between them, `<eos>` as a line end."""
        text = b" ".join([b"\n" if i == self.start_id else self._vocabulary[i] for i in ids])
        return re.sub(rb" ?\n ?", b"\n", text)

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """The most frequent words of a text, by frequency; `vocab_size` (None: 2^18) counts `<unk>` and `<eos>`."""
        if vocab_size is not None and vocab_size < 3:
            problem = f"a vocabulary of {vocab_size} is too small for a word."
            raise ConfigError(problem, "Give --vocab-size 1000 or more.")
        counts: Counter[bytes] = Counter()
        for portion in whole_words(chunks):
            counts.update(portion.split())
            if len(counts) > _MAX_COUNTED:
                counts = Counter({word: count for word, count in counts.items() if count > 1})
        for special in (_UNKNOWN, _END):
            counts.pop(special, None)
        if not counts:
            raise DataError("the text to train the tokenizer on has no words.", "Give a file that contains text.")
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        words = (_UNKNOWN, _END, *ranked[: (vocab_size or LARGEST_VOCABULARY) - 2])
        return cls(b"".join(word + b"\n" for word in words))


def _word_tokens(data: bytes) -> list[tuple[bytes, int]]:
    r"""Each token of `data` and its size in bytes, with the white space before it.

    White space at the end of a word belongs to its line end, else to its last token; alone it is unknown.
    Example: b" a\t\n" gives (b"a", 2), (b"<eos>", 2).
    """
    tokens: list[tuple[bytes, int]] = []
    for word in WORDS.split(data):
        n_rest = len(word)  # bytes of no token yet
        for match in _WORD.findall(word):
            tokens.append((match.lstrip(), len(match)))
            n_rest -= len(match)
        if word.endswith(b"\n"):
            tokens.append((_END, n_rest))
        elif n_rest == len(word):
            tokens.append((_UNKNOWN, n_rest))
        elif n_rest > 0:
            last, size = tokens[-1]
            tokens[-1] = (last, size + n_rest)
    return tokens


class Coverage:
    """How well the vocabulary of a model has the words of a text, whose tokens come in portions."""

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._n_tokens = self._n_bytes = 0
        self._n_spelled = 0  # bytes of tokens that begin or end within a character
        self.n_unknown = 0  # tokens of words that are not in the vocabulary

    def add(self, ids: NDArray[Any], sizes: NDArray[Any]) -> None:
        """Counts the next tokens (t), and the bytes of text of each (t)."""
        self._n_tokens += len(ids)
        self._n_bytes += int(sizes.sum())
        if isinstance(self._tokenizer, PieceTokenizer):
            self._n_spelled += int(sizes[self._tokenizer.cuts_characters[ids]].sum())
        self.n_unknown += n_unknown(ids, self._tokenizer.unknown_id)

    @property
    def is_spelled(self) -> bool:
        """True if the vocabulary has hardly any of the characters as a whole."""
        return self._n_spelled > SPELLED_SHARE * self._n_bytes and self._n_bytes >= LEAST_SPELLED

    def notices(self) -> Iterator[Notice]:
        """Warnings of unknown words, and of a text that is spelled in parts of characters; at the end of the text."""
        if self.n_unknown > 0:
            share = f"{100 * self.n_unknown / self._n_tokens:.1f} % of the words are not in the vocabulary"
            lower = "bits per byte and per character are lower than for a model that spells every word."
            yield Notice(f"{share} and scored as <unk>: {lower}", "warning")
        if self.is_spelled:
            share = f"{self._n_spelled / self._n_bytes:.0%} of the text is spelled in parts of characters"
            yield Notice(f"{share}: the vocabulary of {self._model} has no pieces for its script", "warning")


# `books`: 0.45 of Vietnamese, 0.87 or more of other scripts; SmolLM2: 0.5 of Hindi, 0.65 of Japanese, 0.91 of Thai
SPELLED_SHARE = 0.6
LEAST_SPELLED = 16  # bytes of a text; a sign or two are spelled in any vocabulary


def n_unknown(ids: NDArray[Any], unknown_id: int | None) -> int:
    """Number of ids that are `unknown_id`; reads a mapped file in blocks."""
    return sum(int(np.count_nonzero(ids[at : at + 2**20] == unknown_id)) for at in range(0, len(ids), 2**20))


SMALLEST_VOCABULARY = 300
DEFAULT_VOCABULARY = 2048

_SPACE = "\u2581"
PICTURES = {"\t": "\u2409", "\n": "\u240a", "\r": "\u240d"}
_TO_PICTURES = str.maketrans(PICTURES)
_DECODED = {picture: char for char, picture in PICTURES.items()} | {_SPACE: " "}
FROM_PICTURES = str.maketrans(_DECODED)  # characters of pieces, and the text that they stand for
_UNTRAINABLE = frozenset({*_DECODED, "\u2585", "\0"})  # special here or in the trainer; not in words to train on
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_FIXED_PIECES = 257  # 256 byte pieces and <unk>, which is never used
_COVERAGE = 0.9995  # share of the text covered by characters that have a piece; rarer ones are spelled in byte pieces


class SentencePieceTokenizer(PieceTokenizer):
    """Sentencepiece model with all 256 byte pieces, serialized in its file."""

    kind = "sentencepiece"
    file = "tokenizer.model"
    _special = re.compile(f"([{''.join(_DECODED)}\\ud800-\\udfff])")

    def __init__(self, data: bytes, name: str = file) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__(data, name)
        model = SentencePieceProcessor()
        try:
            if len(data) > LARGEST_PIECES:
                raise ValueError
            model.LoadFromSerializedProto(data)
            pieces = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        except (RuntimeError, ValueError, OSError):
            raise CheckpointError(f"{name} is not a sentencepiece model, or is damaged.", REMEDY) from None
        self._model: SentencePieceProcessor = model
        self.vocab_size = len(pieces)
        self.fingerprint = sha256(b"sentencepiece" + data).hexdigest()
        if not self._set_texts([self._piece_text(i, piece) for i, piece in enumerate(pieces)]):
            problem = f"{name} has no byte pieces, so it cannot encode every text."
            raise CheckpointError(problem, "Train it with byte fallback.")
        self.start_id = int(self.encode(b"\n")[0])

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """Trains a tokenizer of about `vocab_size` pieces (None: 2048) on a sample; equal text gives equal pieces."""
        vocab_size = vocab_size or DEFAULT_VOCABULARY
        if vocab_size < SMALLEST_VOCABULARY:
            problem = f"a sentencepiece vocabulary of {vocab_size} is too small: 256 are byte pieces."
            raise ConfigError(problem, f"Give --vocab-size {SMALLEST_VOCABULARY} or more, or --tokenizer bytes.")
        counts: Counter[bytes] = Counter()
        for portion in whole_words(chunks):
            counts.update(WORDS.split(portion))
        if not counts:
            raise DataError("the text to train the tokenizer on is empty.", "Give a file that contains text.")
        return cls(_train(counts, vocab_size))

    def _piece_text(self, i: int, piece: str) -> bytes:
        if self._model.IsByte(i) and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        if self._model.IsUnknown(i) or self._model.IsControl(i):
            return b""
        return piece.translate(FROM_PICTURES).encode()

    def _find(self, text: str) -> list[int]:
        try:
            return self._model.EncodeAsIds(text.translate(_TO_PICTURES))  # type: ignore[no-any-return]
        except (RuntimeError, OSError):
            raise CheckpointError(f"{self._name} cannot encode text; it is damaged.", REMEDY) from None


def _train(counts: Counter[bytes], vocab_size: int) -> bytes:
    """Serialized model trained on words with these counts."""
    from sentencepiece import SentencePieceTrainer

    # Line ends apart from their words, so that no piece has both.
    texts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        text = word.decode(errors="ignore")
        if not _UNTRAINABLE.isdisjoint(text):
            continue
        text = text.translate(_TO_PICTURES)
        body = text.removesuffix(PICTURES["\n"]).removesuffix(PICTURES["\r"])
        line_end = text[len(body) :]
        texts[body] += count
        texts[line_end] += count
        for char in text:
            characters[char] += count
    # Words are cut at rare characters, which get no pieces.
    frequent = _frequent(characters, most=(vocab_size - _FIXED_PIECES) // 2)
    line_end_if_rare = str.maketrans(dict.fromkeys(characters.keys() - frequent, "\n"))
    stretches: Counter[str] = Counter()
    for text, count in texts.items():
        for stretch in text.translate(line_end_if_rare).split("\n"):
            stretches[stretch] += count
    del stretches[""]
    rows = sorted(stretches.items(), key=lambda row: (-row[1], row[0])) or [(PICTURES["\n"], 1)]
    proto = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(f"{text}\t{count}" for text, count in rows),
        input_format="tsv",
        model_writer=proto,
        model_type="bpe",
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
    """The most frequent characters, up to `_COVERAGE` of the text and `most` in number."""
    frequent: set[str] = set()
    n_uncovered = characters.total()
    most_uncovered = n_uncovered * (1 - _COVERAGE)
    for char, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if n_uncovered <= most_uncovered or len(frequent) >= most:
            break
        frequent.add(char)
        n_uncovered -= count
    return frequent


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "bytes": BytesTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "words": WordsTokenizer,
    "tokenizers": TokenizersTokenizer,
    "ids": IdsTokenizer,
}
SENTENCEPIECE_FROM = 100_000  # bytes of training text from which `auto` is sentencepiece; below, bytes
SAMPLE_BYTES = 8 * 2**20  # maximum bytes of text that a sentencepiece tokenizer is trained on


def choose_tokenizer(kind: str, vocab_size: int | None, facts: Facts, train_bytes: int) -> tuple[str, int | None]:
    """Kind and vocabulary size, chosen by the text if open (`auto`, None); `ConfigError` if bytes are not to be 256."""
    if kind == "auto":
        is_text = facts.n_chars is not None and not facts.has_nul
        has_other_size = vocab_size not in (None, 256)
        has_pieces = is_text and (train_bytes >= SENTENCEPIECE_FROM or has_other_size)
        kind = "sentencepiece" if has_pieces else "bytes"
    if kind == "bytes" and vocab_size not in (None, 256):
        problem = f"the bytes tokenizer has 256 tokens, not {vocab_size}."
        raise ConfigError(problem, "Drop --vocab-size, or add --tokenizer sentencepiece.")
    if kind == "sentencepiece" and vocab_size is None:
        # 512 up to 2 MB, 1024 at 4 MB, 4096 at 40 MB (benchmarks/log); four times as many for text of mostly multi-byte
        # characters.
        doublings = round(0.65 * math.log2(max(train_bytes, 1) / 1e6) - 1.3)
        wide = facts.n_chars is not None and facts.n_bytes > 2 * facts.n_chars
        vocab_size = 2 ** min(max(10 + doublings + 2 * wide, 9), 13)
    return kind, 256 if kind == "bytes" else vocab_size


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer saved in `folder`; `CheckpointError` if it is missing, damaged, changed or unknown."""
    path = folder / FILE
    description = read_json(path)
    if description.get("schema") != SCHEMA:
        problem = f"{path} has format {description.get('schema')!r}, this program reads {SCHEMA}."
        raise CheckpointError(problem, "Update xlcli.")
    if str(description.get("kind")) not in TOKENIZERS:
        problem = f"{path} names an unknown tokenizer, {description.get('kind')!r}."
        raise CheckpointError(problem, f"Known: {', '.join(TOKENIZERS)}.")
    kind = TOKENIZERS[description["kind"]]
    arguments: dict[str, Any] = {key: description.get(key) for key in kind.described}
    for key, value in arguments.items():
        if type(value) is not int or value > MOST_IDS:
            raise CheckpointError(f"{path} has no valid {key}.", REMEDY)
    if kind.file is None:
        tokenizer = kind(**arguments)
    else:
        vocabulary = folder / kind.file
        tokenizer = kind(read_bounded(vocabulary, VOCABULARY_LIMIT), str(vocabulary), **arguments)
    for key in ("vocab_size", "fingerprint"):
        if description.get(key) != getattr(tokenizer, key):
            problem = f"the tokenizer in {folder} differs from the one that {FILE} describes ({key})."
            raise CheckpointError(problem, REMEDY)
    return tokenizer
