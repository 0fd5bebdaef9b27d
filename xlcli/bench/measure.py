"""Measurement of one task with one memory length, and the figures that follow from it.

The first event of a measurement comes as soon as it is known that its memory fits the machine, before any call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli import config as settings
from xlcli.bench.timing import Stopwatch, count_operations
from xlcli.config import BenchConfig, Config, EvalConfig, Sampling
from xlcli.errors import ResourceError
from xlcli.evaluation.text import TokenizedText, choose_lengths
from xlcli.events import Notice, Progress, Speed, StoppedEarlyError
from xlcli.inference import InferenceSession, check_memory, describe_decoding
from xlcli.metrics import TextCounts
from xlcli.model.build import build_on_meta
from xlcli.runtime import peak_rss_bytes
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store.folder import LoadedModel
from xlcli.text.corpus import Corpus, Part
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults, memory
from xlcli.training.run import TrainingRun

LEAST_FOR_P99 = 100
"""Minimum number of calls for their 99th percentile."""
Measurement = Generator[Progress | Notice, None, Speed]


def decoding(model: LoadedModel, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of a session that samples with full memory, as `generate` does.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    rows, config = options.batch_size or 1, model.config
    reading = options.reading(config.model, config.train)
    mem_len, dtype = reading.mem_len, reading.memory_dtype
    session = InferenceSession.open(model, watch.runtime, options, None)
    check_memory(model, watch.runtime, reading.longest, batch_size=rows, segment_len=1, memory_dtype=dtype)
    yield Progress(f"memory {mem_len:,}", 0, None, "calls")
    prompt = random_tokens(config.model.vocab_size, mem_len or 1)
    yield from session.compile(2, watch.stop)
    if watch.stop():
        raise StoppedEarlyError
    session.predict()
    session.predict()
    if session.decoder is None:
        yield replace(describe_decoding(model, watch.runtime), level="info")

    def first_token() -> None:
        session.reset()
        if session.read(prompt, watch.stop) < len(prompt):
            raise StoppedEarlyError
        session.predict()

    first = float(np.median((yield from watch.repeat(first_token, f"memory {mem_len:,}: first token", warmup=1))))
    branch = session.select([0] * rows) if rows > 1 else session
    rngs = [SampleRNG(row) for row in range(rows)]

    def next_token() -> None:
        branch.last_tokens = sample_tokens(branch.predict(), rngs, Sampling())

    times = yield from watch.repeat(next_token, f"memory {mem_len:,}: decoding")
    peak = peak_rss_bytes()
    if not mem_len:  # memory of length 0 is emptied after each segment: half of one on average
        half = max((config.train.segment_len - 1) // 2 - 1, 0)
        session.reset()
        session.read(random_tokens(config.model.vocab_size, half), watch.stop)
        branch = session.select([0] * rows)
        branch.predict()
    decoder, state = branch.decoder, branch.state
    read = model.network.read_bytes + state.bytes if decoder is None else decoder.read_bytes(state)
    operations = 0 if decoder is None else decoder.operations(state)
    operations += count_operations(branch.predict)
    return _speed(
        watch,
        times,
        task="decode",
        model=model.name,
        parameters=model.network.n_parameters,
        mem_len=mem_len,
        segment_len=1,
        batch_size=rows,
        read=read,
        operations=operations,
        peak_rss_bytes=peak,
        weight_dtype=model.weight_dtype,
        memory_dtype=dtype,
        first_token_seconds=first,
        prompt_tokens=mem_len or 1,
        recomputed=(yield from _recompute(model, mem_len, watch)) if rows == 1 else None,
        kernels=decoder is not None,
    )


def evaluation(model: LoadedModel, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of calls of an evaluation with full memory.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    given = EvalConfig(**options.model_dump(include={"mem_len", "segment_len", "batch_size", "memory_dtype"}))
    ids = np.broadcast_to(np.zeros(1, np.uint16), (2**40,))  # one document, longer than any measurement
    text = TokenizedText(Part(Corpus(()), 0, len(ids)), TokenFile(ids, len(ids)), TextCounts(len(ids)))
    lengths = choose_lengths(model, watch.runtime, given, text)
    mem_len, rows, segment_len, dtype = lengths.mem_len, lengths.batch_size, lengths.segment_len, lengths.memory_dtype
    check_memory(model, watch.runtime, lengths.longest, batch_size=rows, segment_len=segment_len, memory_dtype=dtype)
    yield Progress(f"memory {mem_len:,}", 0, None, "calls")
    tokens = random_tokens(model.config.model.vocab_size, rows * (segment_len + 1)).reshape(rows, segment_len + 1)
    whole = torch.from_numpy(tokens).to(watch.runtime.device)
    x, y = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    state = lengths.init_state(model.network, np.zeros(rows, np.int64))

    def call() -> None:
        nonlocal state
        with torch.inference_mode(), watch.runtime.autocast():
            nll, state, *_ = model.network.score(x, y, state)
        nll.cpu()

    fill = -(-mem_len // segment_len)
    times = yield from watch.repeat(call, f"memory {mem_len:,}: evaluation", fill=fill)
    return _speed(
        watch,
        times,
        task="eval",
        model=model.name,
        parameters=model.network.n_parameters,
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=rows,
        peak_rss_bytes=peak_rss_bytes(),
        read=model.network.read_bytes + state.bytes,
        operations=count_operations(call),
        weight_dtype=model.weight_dtype,
        memory_dtype=dtype,
        recomputed=(yield from _recompute(model, mem_len, watch)),
    )


def training(name: str, config: Config, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of training steps with full memory and full lengths.

    Raises:
        ConfigError: A setting is illegal.
        ResourceError: The run does not fit the machine.
    """
    given = options.model_dump(include={"mem_len", "segment_len", "batch_size"}, exclude_none=True)
    config = settings.change(config, {"train": {**given, "random_lengths": False}})
    vocab_size, tokenizer = config.model.vocab_size, config.text.tokenizer
    config = defaults.fill_in(config, tokenizer=tokenizer, vocab_size=vocab_size, device=watch.runtime.device)
    memory.require([config], watch.runtime)  # before the parameters of an impossible model are counted
    memory.require([config], watch.runtime, build_on_meta(config.model).n_parameters)
    shape, stage = config.train, f"memory {config.train.mem_len:,}"
    yield Progress(stage, 0, None, "calls")
    n_tokens = shape.batch_size * (shape.mem_len + 64 * shape.segment_len)
    ids = random_tokens(config.model.vocab_size, n_tokens)
    run = TrainingRun(config, watch.runtime, TokenFile(ids, len(ids)), 0)
    step = partial(run.train_step, 0.5)
    fill = -(-shape.mem_len // shape.segment_len)
    times = yield from watch.repeat(step, f"{stage}: training", fill=fill)
    peak = peak_rss_bytes()
    with torch.compiler.set_stance("force_eager") if config.runtime.compile else contextlib.nullcontext():
        operations = count_operations(step)
    return _speed(
        watch,
        times,
        task="train",
        model=name,
        parameters=run.model.n_parameters,
        mem_len=shape.mem_len,
        segment_len=shape.segment_len,
        batch_size=shape.batch_size,
        read=None,
        operations=operations,
        peak_rss_bytes=peak,
    )


def _recompute(model: LoadedModel, mem_len: int, watch: Stopwatch) -> Generator[Progress | Notice, None, float | None]:
    """Median seconds of one call over `mem_len` + 1 tokens of one sequence from empty memory.

    None, with a notice, if they do not fit the machine; None for `mem_len` 0 and beyond 2**15 tokens.
    """
    if not 0 < mem_len <= 2**15:  # a longer window takes minutes
        return None
    window, network, stage = mem_len + 1, model.network, f"memory {mem_len:,}: recomputing the window"
    try:
        check_memory(model, watch.runtime, window, segment_len=window)
    except ResourceError as error:
        yield Notice(f"{stage} was not measured: {error.message}")
        return None
    tokens = torch.from_numpy(random_tokens(model.config.model.vocab_size, window)[None]).to(watch.runtime.device)

    def call() -> None:
        with torch.inference_mode(), watch.runtime.autocast():
            network.logits(tokens, network.init_state(1, mem_len=0, segment_len=window))

    return float(np.median((yield from watch.repeat(call, stage, warmup=1))))


def random_tokens(vocab_size: int, count: int) -> NDArray[np.int64]:
    """Random token ids whose frequencies follow Zipf's law."""
    uniforms = np.random.default_rng(0).random(count)
    return np.minimum(vocab_size**uniforms - 1, vocab_size - 1).astype(np.int64)


def _speed(
    watch: Stopwatch,
    times: NDArray[np.float64],
    *,
    batch_size: int,
    segment_len: int,
    read: int | None,
    operations: int,
    recomputed: float | None = None,
    **fields: Any,
) -> Speed:
    """The figures of timed calls that make or read `segment_len` tokens of each sequence.

    `read` is the number of bytes that a call reads, `operations` its floating-point operations, `recomputed` the
    seconds of a token without memory, `fields` other fields of `Speed`.
    """
    per_call, total = batch_size * segment_len, float(times.sum())
    median, p90, p99 = (float(seconds) for seconds in np.quantile(times, (0.5, 0.9, 0.99)))
    return Speed(
        segment_len=segment_len,
        batch_size=batch_size,
        calls=len(times),
        tokens=per_call * len(times),
        tokens_per_second=per_call * len(times) / total,
        ms_per_token=1e3 * median / per_call,
        ms_per_token_p90=1e3 * p90 / per_call,
        ms_per_token_p99=1e3 * p99 / per_call if len(times) >= LEAST_FOR_P99 else None,
        recompute_ms_per_token=None if recomputed is None else 1e3 * recomputed,
        recompute_ratio=None if recomputed is None else recomputed * per_call / median,
        read_bytes_per_token=None if read is None else read / per_call,
        read_share=_share(read, median * watch.bytes_per_second),
        flops_per_token=operations / per_call,
        flops_share=_share(operations, median * watch.flops_per_second),
        machine_read_bytes_per_second=watch.bytes_per_second,
        machine_flops_per_second=watch.flops_per_second,
        seconds=total,
        device=str(watch.runtime.device),
        dtype=watch.runtime.dtype_name,
        threads=watch.runtime.threads,
        **fields,
    )


def _share(amount: float | None, most: float) -> float | None:
    """Share of the most that is possible; None above it, where data come from a cache."""
    return None if amount is None or amount > most else amount / most
