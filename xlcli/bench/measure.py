"""Measurement of one task with one memory length, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli import config as settings
from xlcli.bench.peaks import Peaks
from xlcli.bench.timing import WARMUP, Times, repeat
from xlcli.config import BenchConfig, Config, EvalConfig, GenerateConfig, MemoryDtype, WeightEncoding
from xlcli.evaluation.lengths import choose_lengths
from xlcli.evaluation.passes import init_state, token_nats
from xlcli.events import Progress, Speed, StoppedEarlyError
from xlcli.inference import InferenceSession, check_memory
from xlcli.metrics import TextCounts
from xlcli.runtime import Runtime, peak_rss_bytes
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store.layout import SavedConfig
from xlcli.store.loaded import LoadedModel
from xlcli.text.corpus import Corpus
from xlcli.text.heldout import Part
from xlcli.text.tokens import TokenFile
from xlcli.tokenized import TokenizedText
from xlcli.training import defaults, memory
from xlcli.training.run import make_training_run

SLOW = 10.0
"""Time to read a window, in multiples of the time for a figure, from which on recomputing it is not measured."""

WEIGHT_BYTES: dict[WeightEncoding, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Bytes of a weight; the scales of the rows of an int8 matrix are left out."""

Stop = Callable[[], bool]


def measure_decoding(
    model: LoadedModel, options: BenchConfig, runtime: Runtime, peaks: Peaks, stop: Stop
) -> Generator[Progress, None, Speed]:
    """Speed of a session that samples with full memory, as `generate` does."""
    assert options.mem_len is not None
    mem_len, rows, shape = options.mem_len, options.batch_size or 1, model.config.model
    session = InferenceSession.open(model, runtime, options, None)
    prompt = random_tokens(shape.vocab_size, mem_len or 1)
    for _ in range(2):
        session.predict()  # compiles kernels, once on a machine

    def first_token() -> None:
        session.reset()
        session.read(prompt, lambda: False)
        session.predict()

    stage = f"memory {mem_len:,}"
    first = yield from repeat(first_token, f"{stage}: first token", options.seconds, runtime, stop, warmup=1)
    branch = session.select([0] * rows) if rows > 1 else session
    rngs, sampling = [SampleRNG.seeded(row) for row in range(rows)], GenerateConfig()

    def next_token() -> None:
        branch.last_tokens = sample_tokens(branch.predict(), rngs, sampling)

    times = yield from repeat(next_token, f"{stage}: decoding", options.seconds, runtime, stop)
    recomputed = None
    if mem_len and first.median < SLOW * options.seconds:
        recomputed = yield from _recompute(model, mem_len, rows, options.seconds, runtime, stop)
    return _speed(
        "decode",
        model.name,
        model.network.n_parameters,
        model.config,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=1,
        batch_size=rows,
        weight_dtype=model.weight_dtype,
        memory_dtype=session.state.memory_dtype,
        first=first.median,
        recomputed=recomputed,
    )


def measure_evaluation(
    model: LoadedModel, options: BenchConfig, runtime: Runtime, peaks: Peaks, stop: Stop
) -> Generator[Progress, None, Speed]:
    """Speed of calls of an evaluation with full memory."""
    names = ("mem_len", "segment_len", "batch_size", "memory_dtype")
    given = EvalConfig(**{name: getattr(options, name) for name in names})
    lengths = choose_lengths(model, runtime, given, options.mem_len, _endless_text())
    rows, segment_len = lengths.batch_size, lengths.segment_len
    check_memory(
        model,
        runtime,
        lengths.mem_len or segment_len,
        batch_size=rows,
        segment_len=segment_len,
        memory_dtype=lengths.memory_dtype,
    )
    tokens = random_tokens(model.config.model.vocab_size, rows * (segment_len + 1)).reshape(rows, segment_len + 1)
    state = init_state(model, lengths, np.zeros(rows, np.int64))

    def call() -> None:
        nonlocal state
        _, _, state = token_nats(model, runtime, tokens[:, :-1].copy(), tokens[:, 1:].copy(), state)

    stage = f"memory {lengths.mem_len:,}"
    fill = -(-lengths.mem_len // segment_len)
    for i in range(fill):
        if stop():
            raise StoppedEarlyError
        yield Progress(f"{stage}: filling the memory", i, fill, "calls")
        call()
    times = yield from repeat(call, f"{stage}: evaluation", options.seconds, runtime, stop, warmup=max(1, 3 - fill))
    recomputed = None
    if lengths.mem_len and fill * times.median < SLOW * rows * options.seconds:
        recomputed = yield from _recompute(model, lengths.mem_len, 1, options.seconds, runtime, stop)
    return _speed(
        "eval",
        model.name,
        model.network.n_parameters,
        model.config,
        times,
        runtime,
        peaks,
        mem_len=lengths.mem_len,
        segment_len=segment_len,
        batch_size=rows,
        weight_dtype=model.weight_dtype,
        memory_dtype=lengths.memory_dtype,
        recomputed=recomputed,
    )


def measure_training(
    name: str, config: Config, mem_len: int, runtime: Runtime, peaks: Peaks, stop: Stop
) -> Generator[Progress, None, Speed]:
    """Speed of training steps with full memory."""
    options, train = config.bench, {"mem_len": mem_len}
    for key in ("segment_len", "batch_size"):
        if (value := getattr(options, key)) is not None:
            train[key] = value
    config = settings.change(config, {"train": train})
    vocab_size, tokenizer = config.model.vocab_size, config.text.tokenizer
    config = defaults.fill_in(config, tokenizer=tokenizer, vocab_size=vocab_size, device=runtime.device)
    memory.require(config, runtime, memory.memory_bytes(config, runtime))
    shape = config.train
    n_tokens = shape.batch_size * (mem_len + 64 * shape.segment_len)
    ids = random_tokens(vocab_size, n_tokens)
    run = make_training_run(config, runtime, TokenFile(ids, len(ids)), 0)
    stage = f"memory {mem_len:,}: training"
    warmup = WARMUP + -(-mem_len // shape.segment_len)
    times = yield from repeat(lambda: run.train_step(0.5), stage, options.seconds, runtime, stop, warmup=warmup)
    return _speed(
        "train",
        name,
        run.model.n_parameters,
        config,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=shape.segment_len,
        batch_size=shape.batch_size,
    )


def _recompute(
    model: LoadedModel, mem_len: int, rows: int, seconds: float, runtime: Runtime, stop: Stop
) -> Generator[Progress, None, float]:
    """Median seconds per token of one call over the last `mem_len` + 1 tokens from empty memory."""
    window, network = mem_len + 1, model.network
    ids = random_tokens(model.config.model.vocab_size, rows * window).reshape(rows, window)
    tokens = torch.from_numpy(ids).to(runtime.device)
    check_memory(model, runtime, window, batch_size=rows, segment_len=window)

    def call() -> None:
        with torch.inference_mode(), runtime.autocast():
            network.logits(tokens, network.init_state(rows, mem_len=0, segment_len=window))

    stage = f"memory {mem_len:,}: recomputing the window"
    return (yield from repeat(call, stage, seconds, runtime, stop, warmup=1)).median / rows


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
    config: Config | SavedConfig,
    times: Times,
    runtime: Runtime,
    peaks: Peaks,
    *,
    mem_len: int,
    segment_len: int,
    batch_size: int,
    weight_dtype: WeightEncoding = "float32",
    memory_dtype: MemoryDtype = "float32",
    first: float | None = None,
    recomputed: float | None = None,
) -> Speed:
    """The figures of timed calls that make or read `segment_len` tokens of each sequence."""
    per_call, shape = batch_size * segment_len, config.model
    tokens = per_call * len(times.seconds)
    seconds = times.median / per_call
    if task == "train":
        read = None
        context = mem_len + (segment_len - 1) // 2  # the mean of span "growing"
        flops = 3 * shape.flops_per_token(context)
    else:
        weights = WEIGHT_BYTES[weight_dtype] * shape.n_products_of_weights
        remembered = shape.memory_bytes(mem_len or segment_len, memory_dtype)
        read = weights / per_call + remembered / segment_len
        flops = shape.flops_per_token(mem_len or (segment_len - 1) // 2)
    return Speed(
        task=task,
        model=name,
        parameters=n_parameters,
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=batch_size,
        tokens=tokens,
        tokens_per_second=tokens / times.total,
        ms_per_token=1e3 * seconds,
        ms_per_token_p90=1e3 * times.percentile(0.9) / per_call,
        ms_per_token_p99=1e3 * times.percentile(0.99) / per_call,
        first_token_seconds=first,
        prompt_tokens=None if first is None else mem_len or 1,
        recompute_ms_per_token=None if recomputed is None else 1e3 * recomputed,
        recompute_ratio=None if recomputed is None else recomputed / seconds,
        read_bytes_per_token=read,
        read_share=None if read is None else read / seconds / peaks.bytes_per_second,
        flops_per_token=flops,
        flops_share=flops / seconds / peaks.flops_per_second,
        machine_read_bytes_per_second=peaks.bytes_per_second,
        machine_flops_per_second=peaks.flops_per_second,
        peak_rss_bytes=peak_rss_bytes(),
        seconds=times.total,
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        weight_dtype=weight_dtype,
        memory_dtype=memory_dtype,
        threads=runtime.threads,
    )
