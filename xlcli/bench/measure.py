"""Measurement of one task with one memory length, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli import config as settings
from xlcli.bench.peaks import Peaks
from xlcli.bench.timing import WARMUP, Times, repeat
from xlcli.config import BenchConfig, Config, EvalConfig, GenerateConfig, MemoryDtype, TrainConfig, WeightEncoding
from xlcli.config.attention import SoftmaxAttentionConfig
from xlcli.errors import ResourceError
from xlcli.evaluation.lengths import Lengths, choose_lengths
from xlcli.evaluation.passes import init_state, token_nats
from xlcli.events import Notice, Progress, Speed, StoppedEarlyError
from xlcli.inference import InferenceSession, check_memory
from xlcli.metrics import TextCounts
from xlcli.online import FixedModel
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
Measurement = Generator[Progress | Notice, None, Speed]


def check_decoding(model: LoadedModel, options: BenchConfig, runtime: Runtime) -> None:
    """Compares the memory that decoding needs with that of the machine.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    mem_len, (_, memory_dtype) = options.mem_len or model.config.train.segment_len, options.dtypes(model.config.model)
    check_memory(model, runtime, mem_len, memory_dtype=memory_dtype)
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
        session.predict()  # compiles kernels, once on a machine

    def first_token() -> None:
        session.reset()
        session.read(prompt, lambda: False)
        session.predict()

    stage = f"memory {mem_len:,}"
    context = mem_len or (config.train.segment_len - 1) // 2  # memory of length 0 is emptied after each segment
    first = yield from repeat(first_token, f"{stage}: first token", options.seconds, runtime, stop, warmup=1)
    branch = session.select([0] * rows) if rows > 1 else session
    rngs, sampling = [SampleRNG.seeded(row) for row in range(rows)], GenerateConfig()

    def next_token() -> None:
        branch.last_tokens = sample_tokens(branch.predict(), rngs, sampling)

    times = yield from repeat(next_token, f"{stage}: decoding", options.seconds, runtime, stop)
    peak = peak_rss_bytes()
    return _speed(
        "decode",
        model.name,
        model.network.n_parameters,
        config,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=1,
        batch_size=rows,
        n_remembered=context,
        flops=config.model.flops_per_token(context),
        peak=peak,
        weight_dtype=model.weight_dtype,
        memory_dtype=session.state.memory_dtype,
        first=first.median,
        recomputed=(yield from _recompute(model, mem_len, first.median, options.seconds, runtime, stop)),
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
    return _speed(
        "eval",
        model.name,
        model.network.n_parameters,
        model.config,
        times,
        runtime,
        peaks,
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=rows,
        n_remembered=mem_len or segment_len,
        flops=model.config.model.flops_per_token(mem_len or (segment_len - 1) // 2),
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
    memory.require_possible([config], runtime, dry_run=False)  # the estimate of an impossible run takes long
    memory.require(config, runtime, memory.memory_bytes(config, runtime))
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
    return _speed(
        "train",
        name,
        run.model.n_parameters,
        config,
        times,
        runtime,
        peaks,
        mem_len=shape.mem_len,
        segment_len=shape.segment_len,
        batch_size=shape.batch_size,
        n_remembered=None,
        flops=training_flops(config),
        peak=peak_rss_bytes(),
    )


def training_flops(config: Config) -> float:
    """Floating-point operations per token of the matrix products of a training step with full memory.

    Without those of activations that the backward pass computes again. With `train.memory` `hidden` a step also
    projects the remembered inputs of softmax attention to keys and values; pooled blocks are left out.
    """
    shape, train = config.model, config.train
    projected = 0.0
    if train.memory == "hidden":
        softmax = [layer for layer in shape.attentions if isinstance(layer, SoftmaxAttentionConfig)]
        remembered = shape.n_repeats * sum(layer.effective_mem_len(train.mem_len) or 0 for layer in softmax)
        projected = remembered / train.segment_len * 2 * shape.dim * shape.attention.n_heads * shape.head_dim
    return 3 * (shape.flops_per_token(_training_context(train)) + 2 * projected)


def _training_context(train: TrainConfig) -> int:
    """Mean number of earlier tokens that a token attends to in a training step with full memory."""
    if train.mem_len and train.span == "uniform":
        return train.mem_len
    return train.mem_len + (train.segment_len - 1) // 2


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
    config: Config | SavedConfig,
    times: Times,
    runtime: Runtime,
    peaks: Peaks,
    *,
    mem_len: int,
    segment_len: int,
    batch_size: int,
    n_remembered: int | None,
    flops: float,
    peak: int,
    weight_dtype: WeightEncoding = "float32",
    memory_dtype: MemoryDtype = "float32",
    first: float | None = None,
    recomputed: float | None = None,
) -> Speed:
    """The figures of timed calls that make or read `segment_len` tokens of each sequence.

    `n_remembered` is the number of tokens whose keys and values a call reads (None in training), `flops` the number of
    operations per token, `peak` the peak memory in bytes.
    """
    per_call, shape = batch_size * segment_len, config.model
    tokens = per_call * len(times.seconds)
    seconds = times.median / per_call
    read = None
    if n_remembered is not None:
        weights = WEIGHT_BYTES[weight_dtype] * shape.n_products_of_weights
        read = weights / per_call + shape.memory_bytes(n_remembered, memory_dtype) / segment_len
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
        peak_rss_bytes=peak,
        seconds=times.total,
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        weight_dtype=weight_dtype,
        memory_dtype=memory_dtype,
        threads=runtime.threads,
    )
