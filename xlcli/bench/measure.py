"""Measurement of one task with one memory length, and the figures that follow from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli import config as settings
from xlcli.bench.cost import count_operations, read_bytes
from xlcli.bench.peaks import Peaks
from xlcli.bench.timing import WARMUP, Times, repeat
from xlcli.config import BenchConfig, Config, EvalConfig, MemoryDtype, Sampling, WeightEncoding
from xlcli.errors import ResourceError
from xlcli.evaluation.lengths import Lengths, choose_lengths
from xlcli.evaluation.passes import init_state, token_nats
from xlcli.evaluation.text import TokenizedText
from xlcli.events import Notice, Progress, Speed, StoppedEarlyError
from xlcli.inference import InferenceSession, check_memory, describe_decoding
from xlcli.metrics import TextCounts
from xlcli.online import FixedModel
from xlcli.runtime import Runtime, peak_rss_bytes
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store.folder import LoadedModel
from xlcli.text.corpus import Corpus, Part
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults, memory
from xlcli.training.run import make_training_run

SLOW = 10.0
"""Time to read a window, in multiples of the time for a figure, from which on recomputing it is not measured."""

LEAST_FOR_P99 = 100
"""Minimum number of calls for their 99th percentile."""
Stop = Callable[[], bool]
Measurement = Generator[Progress | Notice, None, Speed]


def check_decoding(model: LoadedModel, options: BenchConfig, runtime: Runtime) -> None:
    """Compares the memory that decoding needs with that of the machine.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    mem_len, (_, memory_dtype) = options.mem_len or model.config.train.segment_len, options.dtypes(model.config.model)
    check_memory(model, runtime, mem_len, memory_dtype=memory_dtype, predicts=True)
    rows = options.batch_size or 1
    check_memory(model, runtime, mem_len, batch_size=rows, segment_len=1, memory_dtype=memory_dtype)


def measure_decoding(
    model: LoadedModel, options: BenchConfig, runtime: Runtime, peaks: Peaks, stop: Stop
) -> Measurement:
    """Speed of a session that samples with full memory, as `generate` does."""
    assert options.mem_len is not None
    mem_len, rows, config = options.mem_len, options.batch_size or 1, model.config
    session = InferenceSession.open(model, runtime, options, None)
    prompt = random_tokens(config.model.vocab_size, mem_len or 1)
    for _ in range(2):
        if notice := session.compilation():
            yield notice
        session.predict()
    if session.decoder is None:
        yield replace(describe_decoding(model, runtime), level="info")

    def first_token() -> None:
        session.reset()
        if session.read(prompt, stop) < len(prompt):
            raise StoppedEarlyError
        session.predict()

    stage = f"memory {mem_len:,}"
    first = yield from repeat(first_token, f"{stage}: first token", options.seconds, runtime, stop, warmup=1)
    branch = session.select([0] * rows) if rows > 1 else session
    rngs, sampling = [SampleRNG.seeded(row) for row in range(rows)], Sampling()

    def next_token() -> None:
        branch.last_tokens = sample_tokens(branch.predict(), rngs, sampling)

    times = yield from repeat(next_token, f"{stage}: decoding", options.seconds, runtime, stop)
    peak = peak_rss_bytes()
    if not mem_len:  # memory of length 0 is emptied after each segment: half of one on average
        session.reset()
        session.read(random_tokens(config.model.vocab_size, max((config.train.segment_len - 1) // 2 - 1, 0)), stop)
        branch = session.select([0] * rows)
        branch.predict()
    decoder = branch.decoder
    read = read_bytes(model.network, decoder, branch.state)
    operations = 0 if decoder is None else decoder.operations(branch.state)
    operations += count_operations(branch.predict)
    recomputed = None
    if rows == 1:
        recomputed = yield from _recompute(model, mem_len, first.median, options.seconds, runtime, stop)
    return _speed(
        "decode",
        model.name,
        model.network.n_parameters,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=1,
        batch_size=rows,
        read=read,
        operations=operations,
        peak=peak,
        weight_dtype=model.weight_dtype,
        memory_dtype=session.state.memory_dtype,
        first=first.median,
        recomputed=recomputed,
        kernels=decoder is not None,
    )


def check_evaluation(model: LoadedModel, options: BenchConfig, runtime: Runtime) -> Lengths:
    """Lengths of the calls, whose memory fits the machine.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    names = ("mem_len", "segment_len", "batch_size", "memory_dtype")
    given = EvalConfig(**{name: getattr(options, name) for name in names})
    lengths = choose_lengths(model, runtime, given, options.mem_len, _endless_text())
    check_memory(
        model,
        runtime,
        lengths.mem_len or lengths.segment_len,
        batch_size=lengths.batch_size,
        segment_len=lengths.segment_len,
        memory_dtype=lengths.memory_dtype,
    )
    return lengths


def measure_evaluation(
    model: LoadedModel, lengths: Lengths, seconds: float, runtime: Runtime, peaks: Peaks, stop: Stop
) -> Measurement:
    """Speed of calls of an evaluation with full memory."""
    mem_len, rows, segment_len = lengths.mem_len, lengths.batch_size, lengths.segment_len
    tokens = random_tokens(model.config.model.vocab_size, rows * (segment_len + 1)).reshape(rows, segment_len + 1)
    reader = FixedModel(model.network)
    state = init_state(reader, lengths, np.zeros(rows, np.int64))

    def call() -> None:
        nonlocal state
        _, _, state = token_nats(reader, runtime, tokens[:, :-1].copy(), tokens[:, 1:].copy(), state)

    stage = f"memory {mem_len:,}"
    fill = -(-mem_len // segment_len)
    yield from _fill(call, fill, stage, stop)
    times = yield from repeat(call, f"{stage}: evaluation", seconds, runtime, stop, warmup=WARMUP - fill)
    peak = peak_rss_bytes()
    read = read_bytes(model.network, None, state)
    operations = count_operations(call)
    return _speed(
        "eval",
        model.name,
        model.network.n_parameters,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=rows,
        read=read,
        operations=operations,
        peak=peak,
        weight_dtype=model.weight_dtype,
        memory_dtype=lengths.memory_dtype,
        recomputed=(yield from _recompute(model, mem_len, fill * times.median / rows, seconds, runtime, stop)),
    )


def check_training(config: Config, mem_len: int, runtime: Runtime) -> Config:
    """The configuration with this memory length and full lengths in each step, whose memory fits the machine.

    Raises:
        ConfigError: A setting is illegal.
        ResourceError: The run does not fit the machine.
    """
    options, train = config.bench, {"mem_len": mem_len, "random_lengths": False}
    for key in ("segment_len", "batch_size"):
        if (value := getattr(options, key)) is not None:
            train[key] = value
    config = settings.change(config, {"train": train})
    vocab_size, tokenizer = config.model.vocab_size, config.text.tokenizer
    config = defaults.fill_in(config, tokenizer=tokenizer, vocab_size=vocab_size, device=runtime.device)
    memory.require_possible([config], runtime)  # before the parameters of an impossible model are counted
    memory.require(config, runtime, memory.n_parameters(config.model))
    return config


def measure_training(name: str, config: Config, runtime: Runtime, peaks: Peaks, stop: Stop) -> Measurement:
    """Speed of training steps with full memory."""
    shape = config.train
    n_tokens = shape.batch_size * (shape.mem_len + 64 * shape.segment_len)
    ids = random_tokens(config.model.vocab_size, n_tokens)
    run = make_training_run(config, runtime, TokenFile(ids, len(ids)), 0)
    stage = f"memory {shape.mem_len:,}"

    def step() -> None:
        run.train_step(0.5)

    yield from _fill(step, -(-shape.mem_len // shape.segment_len), stage, stop)
    times = yield from repeat(step, f"{stage}: training", config.bench.seconds, runtime, stop)
    peak = peak_rss_bytes()
    with torch.compiler.set_stance("force_eager") if config.runtime.compile else contextlib.nullcontext():
        operations = count_operations(step)
    return _speed(
        "train",
        name,
        run.model.n_parameters,
        times,
        runtime,
        peaks,
        mem_len=shape.mem_len,
        segment_len=shape.segment_len,
        batch_size=shape.batch_size,
        read=None,
        operations=operations,
        peak=peak,
    )


def _fill(call: Callable[[], None], count: int, stage: str, stop: Stop) -> Iterator[Progress]:
    """Calls that fill the memory, which are not timed."""
    for i in range(count):
        if stop():
            raise StoppedEarlyError
        yield Progress(f"{stage}: filling the memory", i, count, "calls")
        call()


def _recompute(
    model: LoadedModel, mem_len: int, read_seconds: float, seconds: float, runtime: Runtime, stop: Stop
) -> Generator[Progress | Notice, None, float | None]:
    """Median seconds of one call over `mem_len` + 1 tokens of one sequence from empty memory.

    None, with a notice, if reading these tokens takes `read_seconds` that exceed the limit, or if they do not fit the
    machine; None for `mem_len` 0.
    """
    if not mem_len:
        return None
    window, network, stage = mem_len + 1, model.network, f"memory {mem_len:,}: recomputing the window"
    if read_seconds >= SLOW * seconds:
        yield Notice(f"{stage} was not measured, because it takes long; a longer --seconds includes it")
        return None
    try:
        check_memory(model, runtime, window, segment_len=window)
    except ResourceError as error:
        yield Notice(f"{stage} was not measured: {error.message}")
        return None
    tokens = torch.from_numpy(random_tokens(model.config.model.vocab_size, window)[None]).to(runtime.device)

    def call() -> None:
        with torch.inference_mode(), runtime.autocast():
            network.logits(tokens, network.init_state(1, mem_len=0, segment_len=window))

    return (yield from repeat(call, stage, seconds, runtime, stop, warmup=1)).median


def random_tokens(vocab_size: int, count: int) -> NDArray[np.int64]:
    """Random token ids whose frequencies follow Zipf's law."""
    uniforms = np.random.default_rng(0).random(count)
    return np.minimum(vocab_size**uniforms - 1, vocab_size - 1).astype(np.int64)


def _endless_text() -> TokenizedText:
    """A text of one document that is longer than any measurement."""
    ids = np.broadcast_to(np.zeros(1, np.uint16), (2**40,))
    return TokenizedText(Part(Corpus(()), 0, len(ids)), TokenFile(ids, len(ids)), TextCounts(len(ids), 0, None, None))


def _speed(
    task: Literal["decode", "eval", "train"],
    name: str,
    n_parameters: int,
    times: Times,
    runtime: Runtime,
    peaks: Peaks,
    *,
    mem_len: int,
    segment_len: int,
    batch_size: int,
    read: int | None,
    operations: int,
    peak: int,
    weight_dtype: WeightEncoding = "float32",
    memory_dtype: MemoryDtype = "float32",
    first: float | None = None,
    recomputed: float | None = None,
    kernels: bool | None = None,
) -> Speed:
    """The figures of timed calls that make or read `segment_len` tokens of each sequence.

    `read` is the number of bytes that a call reads, `operations` its floating-point operations, `peak` the peak memory
    in bytes.
    """
    per_call = batch_size * segment_len
    tokens = per_call * len(times.seconds)
    seconds = times.median / per_call
    return Speed(
        task=task,
        model=name,
        parameters=n_parameters,
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=batch_size,
        calls=len(times.seconds),
        tokens=tokens,
        tokens_per_second=tokens / times.total,
        ms_per_token=1e3 * seconds,
        ms_per_token_p90=1e3 * times.percentile(0.9) / per_call,
        ms_per_token_p99=1e3 * times.percentile(0.99) / per_call if len(times.seconds) >= LEAST_FOR_P99 else None,
        first_token_seconds=first,
        prompt_tokens=None if first is None else mem_len or 1,
        recompute_ms_per_token=None if recomputed is None else 1e3 * recomputed,
        recompute_ratio=None if recomputed is None else recomputed / seconds,
        read_bytes_per_token=None if read is None else read / per_call,
        read_share=None if read is None else read / times.median / peaks.bytes_per_second,
        flops_per_token=operations / per_call,
        flops_share=operations / times.median / peaks.flops_per_second,
        machine_read_bytes_per_second=peaks.bytes_per_second,
        machine_flops_per_second=peaks.flops_per_second,
        peak_rss_bytes=peak,
        seconds=times.total,
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        weight_dtype=weight_dtype,
        memory_dtype=memory_dtype,
        kernels=kernels,
        threads=runtime.threads,
    )
