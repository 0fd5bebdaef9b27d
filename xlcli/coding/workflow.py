"""`compress` and `decompress`: generators of the bytes of the result and of events, one token per call of the model.

The range coder of constriction turns the probabilities of all tokens into integer counts of at least 1 in 2^24. Encoder
and decoder make the same calls in the same order, so their counts are equal where the same calls give the same
floating-point numbers. `check_hash` recognizes machines where they do not.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib.metadata import version

import numpy as np
import torch
from constriction import stream

from xlcli import __version__
from xlcli.coding import FRAME_TOKENS, End, FileReader, Frame, Header, Output
from xlcli.config import OnlineConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import Coded, Notice, ProgressMeter, StoppedEarlyError
from xlcli.files import as_utf8
from xlcli.inference import InferenceSession, compile_cache
from xlcli.online import not_finite
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.text.formats import LineEnds
from xlcli.text.pretokenize import whole_words

N_CHECKED = 24
"""Number of predictions that `check_hash` compares."""
MOST_READ = 1024
"""Maximum number of tokens that it reads before them."""


class Predictions:
    """Predictions of the tokens of one text, in order, by a session at its start.

    Attributes:
        bits: Sum of the surprisals of the tokens so far.
        n_tokens: Number of these tokens.
    """

    def __init__(self, session: InferenceSession) -> None:
        self.bits, self.n_tokens = 0.0, 0
        self._session = session

    def next(self) -> stream.model.Categorical:
        """Distribution of the next token, for `constriction`; `observe` comes after it."""
        logits = self._session.predict()[0].double().cpu().numpy()
        if not np.isfinite(logits).all():
            raise not_finite(self._session.model.name, self._session.options)
        weights = np.exp(logits - logits.max())
        self._probabilities = weights / weights.sum()
        return stream.model.Categorical(self._probabilities, lazy=True)

    def observe(self, token: int) -> None:
        """Reads the next token."""
        self.bits -= float(np.log2(max(self._probabilities[token], 2.0**-1074)))
        self.n_tokens += 1
        self._session.observe(token)


class _Encoder:
    """Codes the tokens of a text.

    Attributes:
        predictions: Of these tokens.
        n_waiting: Number of tokens since the last frame.
    """

    def __init__(self, session: InferenceSession) -> None:
        self.predictions = Predictions(session)
        self.n_waiting = 0
        self._coder = stream.queue.RangeEncoder()

    def add(self, token: int) -> None:
        self._coder.encode(token, self.predictions.next())
        self.predictions.observe(token)
        self.n_waiting += 1

    def frame(self) -> bytes:
        """The tokens since the last frame; nothing without any."""
        if not self.n_waiting:
            return b""
        words, n_tokens = self._coder.get_compressed().astype("<u4").tobytes(), self.n_waiting
        self._coder.clear()
        self.n_waiting = 0
        return Frame(n_tokens, words).encode()


def check_hash(session: InferenceSession, stop: Callable[[], bool]) -> Generator[Notice, None, str]:
    """Hash, 16 hexadecimal digits, of the logits before each of `N_CHECKED` fixed tokens, to the bit.

    Before them the session, which is at the start of a text, reads as many tokens as its memory holds, at most
    `MOST_READ`; with adaptation always so many.

    Yields:
        Notices about kernels.

    Raises:
        StoppedEarlyError: `stop` became true while they were compiled.
    """
    yield from compile_cache(session.options, stop)
    yield from session.compile(N_CHECKED, stop)
    if stop():
        raise StoppedEarlyError
    hashed, options, vocab_size = hashlib.sha256(), session.options, session.model.tokenizer.vocab_size
    ids = np.array([(31 * i * i + 7 * i) % vocab_size for i in range(MOST_READ + N_CHECKED)], np.int32)
    n_read = MOST_READ if options.learning.adapt else min((session.state.span.max_distance() or 0) + 1, MOST_READ)
    session.read(ids[:n_read], lambda: False)
    for token in ids[n_read : n_read + N_CHECKED].tolist():
        hashed.update(session.predict()[0].double().cpu().numpy().astype("<f8").tobytes())
        session.observe(token)
    return hashed.hexdigest()[:16]


BLOCK_BYTES = 2**16
"""Number of bytes tokenized at a time."""


def compress(
    model: LoadedModel,
    portions: Iterable[bytes | None],
    options: OnlineConfig,
    runtime: Runtime,
    *,
    size: int | None = None,
    crlf: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Output]:
    """Compresses a text, which comes divided anywhere; the RAM it takes does not depend on its length.

    The result contains the options. `size` is the number of bytes of the text, if it is known. `crlf` codes CR LF as
    LF; the text must have no other line ends (`ends_in_crlf`). `stop` is called before every token.

    Yields:
        The bytes of the compressed text in order, notices and progress, and `Coded` last.

    Raises:
        ConfigError: An option does not apply to the model, or its vocabulary cannot represent every text.
        DataError: The text changed since `ends_in_crlf`, or has a byte without a token.
        StoppedEarlyError: `stop` became true.
    """
    if model.tokenizer.id_sizes is None:
        raise ConfigError(
            f"model {model.name} cannot restore a text: it has a word vocabulary or none.",
            "Use a model with a subword or byte vocabulary.",
        )
    started = time.monotonic()
    check = yield from check_hash(InferenceSession.open(model, runtime, options, None), stop)
    header = _header(model, options, runtime, check, crlf=crlf)
    yield (start := header.encode())
    encoder, hashed = _Encoder(InferenceSession.open(model, runtime, options, None)), hashlib.sha256()
    meter = ProgressMeter("compressing", size, "bytes")
    n_bytes, n_written, n_lines, line_ends = 0, len(start), 0, LineEnds()
    text = filter(None, portions)
    splitter = model.tokenizer.splitter
    for words in whole_words(map(line_ends.feed, text) if crlf else text, BLOCK_BYTES, splitter=splitter):
        hashed.update(header.restored(words))
        n_lines += words.count(b"\n")
        ids, sizes = model.tokenizer.tokens(words, n_bytes)
        for token, n in zip(ids.tolist(), sizes.tolist(), strict=True):
            if stop():
                raise StoppedEarlyError
            encoder.add(token)
            n_bytes += n
            if encoder.n_waiting == FRAME_TOKENS:
                n_written += len(frame := encoder.frame())
                yield frame
            yield from meter.report(n_bytes)
    if stop():
        raise StoppedEarlyError
    if crlf and (line_ends.held or n_lines != line_ends.replaced):
        raise DataError("the text changed while it was compressed.", "Wait until nothing writes to it, or copy it.")
    n_bytes += line_ends.replaced
    yield (end := encoder.frame() + End(n_bytes, hashed.digest()).encode())
    coded = encoder.predictions
    yield Coded(n_bytes, n_written + len(end), coded.n_tokens, coded.bits, time.monotonic() - started)


def _header(model: LoadedModel, options: OnlineConfig, runtime: Runtime, check: str, *, crlf: bool) -> Header:
    return Header(
        model=as_utf8(model.name),
        fingerprint=model_fingerprint(model),
        settings=options,
        threads=runtime.threads,
        device=runtime.device.type,
        dtype=runtime.dtype_name,
        software=software(),
        check=check,
        crlf=crlf,
    )


def decompress(
    model: LoadedModel,
    header: Header,
    reader: FileReader,
    runtime: Runtime,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Output]:
    """Restores a text from `reader`, after its header was read; the RAM it takes does not depend on its length.

    `stop` is called before every token.

    Yields:
        The bytes of the text in order, notices and progress, and `Coded` last.

    Raises:
        DataError: The file is damaged, or was made with another model, or where the model computes other numbers. A
            fault may be found after bytes of the text; only with `Coded` the text is confirmed.
        StoppedEarlyError: `stop` became true.
    """
    _check_maker(header, reader.name, model, runtime)
    started = time.monotonic()
    check = yield from check_hash(InferenceSession.open(model, runtime, header.settings, None), stop)
    if check != header.check:
        raise DataError(
            f"{reader.name} was compressed where the model computes different numbers: with {header.software}; "
            f"here are {software()}.",
            "Decompress it with the same versions on a processor of the same type.",
        )
    predictions, hashed = Predictions(InferenceSession.open(model, runtime, header.settings, None)), hashlib.sha256()
    meter, n_bytes = ProgressMeter("decompressing", None, "bytes"), 0
    not_restored = DataError(
        f"{reader.name} was not restored: the result differs from the text that was compressed.",
        "Decompress it on the machine that compressed it.",
    )
    for frame in reader.frames():
        if isinstance(frame, End):
            if (frame.n_bytes, frame.digest) != (n_bytes, hashed.digest()):
                raise not_restored
            break
        coder = stream.queue.RangeDecoder(np.frombuffer(frame.words, "<u4").astype(np.uint32))
        for _ in range(frame.n_tokens):
            try:
                token = int(coder.decode(predictions.next()))
            except AssertionError:  # with the probabilities of this machine no token has these words
                raise not_restored from None
            predictions.observe(token)
            text = header.restored(model.tokenizer.decode([token]))
            hashed.update(text)
            n_bytes += len(text)
            yield text
            yield from meter.report(n_bytes)
            if stop():
                raise StoppedEarlyError
    yield Coded(n_bytes, reader.n_read, predictions.n_tokens, predictions.bits, time.monotonic() - started)


def _check_maker(header: Header, name: str, model: LoadedModel, runtime: Runtime) -> None:
    """`DataError` if a file was not compressed with this model on such a machine."""
    if header.fingerprint != model_fingerprint(model):
        raise DataError(
            f"{name} was not compressed with model {model.name} but with {header.model} "
            f"(fingerprint {header.fingerprint[:12]}).",
            "Give the folder of that model: -m FOLDER.",
        )
    here = runtime.device.type, runtime.dtype_name, runtime.threads
    if here != (header.device, header.dtype, header.threads):
        raise DataError(
            f"{name} was compressed on {header.device} in {header.dtype} with {header.threads} threads, not on "
            f"{here[0]} in {here[1]} with {here[2]}.",
            f"Give --device {header.device} --threads {header.threads} --set runtime.dtype={header.dtype}.",
        )


def model_fingerprint(model: LoadedModel) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the model's fingerprints."""
    return hashlib.sha256(json.dumps(sorted(model.fingerprints.items())).encode()).hexdigest()[:16]


def software() -> str:
    """Versions and processor that the predictions depend on."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"xlcli {__version__}, torch {torch.__version__}, numba {version('numba')}, {processor}"
