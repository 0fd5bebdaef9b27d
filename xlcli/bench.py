"""Benchmark: speed of decoding, evaluation and training on this machine.

Calls are repeated with full memory, after calls that are not timed. Times are medians, with percentiles beside the time
per token; tokens per second is a mean. Tokens are random, and their frequencies follow Zipf's law; the cost of a call
depends on their values only with LSH attention and an adaptive softmax.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli import config as settings
from xlcli.config import BenchConfig, Config, EvalConfig, Sampling
from xlcli.errors import ResourceError
from xlcli.evaluation.text import TokenizedText, choose_lengths
from xlcli.events import Notice, Progress, ProgressMeter, Speed, StoppedEarlyError
from xlcli.inference import InferenceSession, check_memory, describe_decoding
from xlcli.machine import forget_peak_rss, peak_rss_bytes, require_memory
from xlcli.metrics import TextCounts
from xlcli.model.build import build_model, build_on_meta
from xlcli.runtime import Runtime
from xlcli.sampling import SampleRNG, sample_tokens
from xlcli.store.folder import LoadedModel
from xlcli.store.weights import round_weights
from xlcli.text.corpus import Corpus, Part
from xlcli.text.tokenizers import BytesTokenizer
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults, memory
from xlcli.training.run import TrainingRun

WARMUP = LEAST = 3  # number of calls before the timed ones, and minimum number of timed calls
UNEVEN = 1.5  # ratio of the 90th percentile to the median above which the machine was not quiet
FIGURES = {"decode": 3, "eval": 2, "train": 1}  # number of timed figures of a task
LONGEST_WINDOW = 2**15  # tokens of memory whose window is recomputed, which takes minutes for more
LEAST_FOR_P99 = 100  # minimum number of calls for their 99th percentile
Measurement = Generator[Progress | Notice, None, Speed]
"""One task with one memory length. Its first event comes once its memory is known to fit; else a `ResourceError`."""


@dataclass(frozen=True)
class Stopwatch:
    """Times calls again and again."""

    runtime: Runtime  # device, which is waited for
    # Time for all calls of a figure; at least `LEAST` are timed. A second call that takes longer is the only
    # timed one.
    seconds: float
    stop: Callable[[], bool]  # called between calls

    def repeat(
        self, call: Callable[[], object], stage: str, *, fill: int = 0, warmup: int = WARMUP
    ) -> Generator[Progress, None, NDArray[np.float64]]:
        """Durations of a call in seconds, ascending; yields progress of this stage.

        The first `fill` calls fill the memory; `warmup` more are not timed, at least 1, which may compile or allocate.
        `StoppedEarlyError` if `stop` became true.
        """
        meter = ProgressMeter(stage, None, "calls")
        durations: list[float] = []
        for n in itertools.count(1):
            if self.stop():
                raise StoppedEarlyError
            started = time.perf_counter()
            call()
            if self.runtime.device.type == "cuda":
                torch.cuda.synchronize()
            if n > fill:
                durations.append(time.perf_counter() - started)
            yield from meter.report(n)
            timed = durations[warmup:]
            is_enough = len(timed) >= LEAST and sum(timed) >= self.seconds
            if len(durations) > 1 and (durations[1] >= self.seconds or is_enough):
                break
        return np.sort(timed or durations[1:])


def untrained(name: str, config: Config, runtime: Runtime) -> LoadedModel:
    """A model with random weights and the settings of `config.bench`; `ResourceError` if it does not fit."""
    options, shape = config.bench, config.bench.shape(config.model)
    require_memory(f"the weights of {name}", 4 * shape.n_matrix_weights, "Use a smaller preset.", str(runtime.device))
    torch.manual_seed(config.runtime.seed or 0)
    network = build_model(shape).to(runtime.device).eval()
    if options.clamp_len is not None:
        network.limit_distances(*config.train.limits(shape, options.clamp_len))
    weights = options.weights
    if weights != "float32":
        round_weights(network, weights)
    config = config.model_copy(update={"model": shape})
    formats: dict[str, Any] = {"weight_dtype": weights, "encoding": weights}
    return LoadedModel(Path(name), name, config, BytesTokenizer(), network, record={}, fingerprints={}, **formats)


def bench(
    task: str, name: str, model: LoadedModel | None, config: Config, runtime: Runtime, *, stop: Callable[[], bool]
) -> Iterator[Notice | Progress | Speed]:
    """Measures a workflow: yields a line about the plan, and a `Speed` for each memory length until `stop`.

    The task is `decode` (a token per call, as `generate`) or `eval`, by a model that may have random weights, or
    `train`, which makes new ones. `ConfigError` if a setting does not apply, `ResourceError` if memory does not fit.
    """
    options = config.bench
    watch = Stopwatch(runtime, options.seconds, stop)
    if model is None:
        measurements = [_train(name, config, at_length, watch) for at_length in options.sweep]
    else:
        model.check_settings(options)
        measure = _decode if task == "decode" else _evaluate
        measurements = [measure(model, at_length, watch) for at_length in options.sweep]
    # Before anything is measured, all lengths are known to fit.
    for measurement in measurements:
        next(measurement)
    planned = options.seconds * FIGURES[task] * len(measurements)
    lengths = ", ".join(map(str, options.mem_lens)) or "as trained"
    yield Notice(f"{task} of {name} with memory {lengths}: about {planned:.0f} s")
    try:
        for measurement in measurements:
            forget_peak_rss()
            speed = yield from measurement
            ratio = speed.ms_per_token_p90 / speed.ms_per_token
            if ratio > UNEVEN:
                yield Notice(f"a tenth of the calls took {ratio:.1f} times the median or longer; the machine was busy")
            yield speed
    except StoppedEarlyError:
        yield Notice("stopped before all figures were measured.", "warning")


def _decode(model: LoadedModel, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of sampling, as by `generate`: of a first token, after a prompt that fills the memory, and of the next."""
    config = model.config
    n_sequences = options.batch_size or 1
    reading = options.reading(config.model, config.train.reading)
    mem_len = reading.mem_len
    stage = f"memory {mem_len:,}"
    session = InferenceSession.open(model, watch.runtime, options, None)
    sizes: dict[str, Any] = {"batch_size": n_sequences, "segment_len": 1, "memory_dtype": reading.memory_dtype}
    check_memory(model, watch.runtime, reading.longest, **sizes)
    yield Progress(stage, 0, None, "calls")  # it fits, and may be measured
    n_first = 2  # predictions after which the session has chosen its decoder
    yield from session.compile(n_first, watch.stop)
    if watch.stop():
        raise StoppedEarlyError
    for _ in range(n_first):
        session.predict()
    if session.decoder is None:
        yield replace(describe_decoding(model, watch.runtime), level="info")
    n_prompt = mem_len or 1  # tokens
    prompt = _random_tokens(config.model.vocab_size, n_prompt)

    def first_token() -> None:
        session.reset()
        if session.read(prompt, watch.stop) < n_prompt:
            raise StoppedEarlyError
        session.predict()

    first_times = yield from watch.repeat(first_token, f"{stage}: first token", warmup=1)
    branch = session.select([0] * n_sequences)  # all sequences go on from the memory of the prompt
    rngs = [SampleRNG(number) for number in range(n_sequences)]

    def next_token() -> None:
        branch.append(sample_tokens(branch.predict(), rngs, Sampling()))

    times = yield from watch.repeat(next_token, f"{stage}: decoding")
    peak = peak_rss_bytes()
    recomputed = None
    if n_sequences == 1:  # otherwise the times would not be comparable
        recomputed = yield from _recompute(model, mem_len, watch)
    figures = {"task": "decode", "first_token_seconds": float(np.median(first_times)), "prompt_tokens": n_prompt}
    figures |= _of_model(model, mem_len) | sizes | {"peak_rss_bytes": peak, "kernels": branch.decoder is not None}
    return _speed(watch, times, recomputed, **figures)


def _evaluate(model: LoadedModel, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of calls of an evaluation with full memory."""
    settings_of_eval = options.model_dump(include={"mem_len", "segment_len", "batch_size", "memory_dtype"})
    ids = np.broadcast_to(np.zeros(1, np.uint16), (2**40,))  # one document, longer than any measurement
    text = TokenizedText(Part(Corpus(()), 0, len(ids)), TokenFile(ids, len(ids)), TextCounts(len(ids)))
    lengths = choose_lengths(model, watch.runtime, EvalConfig(**settings_of_eval), text)
    mem_len, rows, segment_len = lengths.mem_len, lengths.batch_size, lengths.segment_len
    sizes: dict[str, Any] = {"batch_size": rows, "segment_len": segment_len, "memory_dtype": lengths.memory_dtype}
    check_memory(model, watch.runtime, lengths.longest, **sizes)
    yield Progress(f"memory {mem_len:,}", 0, None, "calls")
    tokens = _random_tokens(model.config.model.vocab_size, rows * (segment_len + 1)).reshape(rows, segment_len + 1)
    tokens_on_device = torch.from_numpy(tokens).to(watch.runtime.device)
    inputs, targets = tokens_on_device[:, :-1].contiguous(), tokens_on_device[:, 1:].contiguous()
    state = lengths.init_state(model.network, np.zeros(rows, np.int64))

    def call() -> None:
        nonlocal state
        with torch.inference_mode(), watch.runtime.autocast():
            nll, state, *_ = model.network.score(inputs, targets, state)
        nll.cpu()  # which waits for the device

    fill = math.ceil(mem_len / segment_len)
    times = yield from watch.repeat(call, f"memory {mem_len:,}: evaluation", fill=fill)
    figures = {"task": "eval", "peak_rss_bytes": peak_rss_bytes()} | _of_model(model, mem_len) | sizes
    recomputed = yield from _recompute(model, mem_len, watch)
    return _speed(watch, times, recomputed, **figures)


def _train(name: str, config: Config, options: BenchConfig, watch: Stopwatch) -> Measurement:
    """Speed of training steps with full memory and full lengths."""
    lengths = options.model_dump(include={"mem_len", "segment_len", "batch_size"}, exclude_none=True)
    config = settings.change(config, {"train": lengths})
    vocab_size, tokenizer = config.model.vocab_size, config.text.tokenizer
    config = defaults.fill_in(config, tokenizer=tokenizer, vocab_size=vocab_size, device=watch.runtime.device)
    memory.require([config], watch.runtime)  # before the parameters of an impossible model are counted
    memory.require([config], watch.runtime, build_on_meta(config.model).n_parameters)
    shape = config.train
    stage = f"memory {shape.mem_len:,}"
    yield Progress(stage, 0, None, "calls")
    ids = _random_tokens(vocab_size, shape.batch_size * (shape.mem_len + 64 * shape.segment_len))
    run = TrainingRun(config, watch.runtime, TokenFile(ids, len(ids)), 0)
    step = partial(run.train_step, 0.5)
    fill = math.ceil(shape.mem_len / shape.segment_len)
    times = yield from watch.repeat(step, f"{stage}: training", fill=fill)
    figures = {"task": "train", "model": name, "parameters": run.model.n_parameters, "peak_rss_bytes": peak_rss_bytes()}
    figures |= shape.model_dump(include={"mem_len", "segment_len", "batch_size"})
    return _speed(watch, times, None, **figures)


def _recompute(model: LoadedModel, mem_len: int, watch: Stopwatch) -> Generator[Progress | Notice, None, float | None]:
    """Median seconds of one call over `mem_len` + 1 tokens of one sequence from empty memory.

    None, with a notice, if they do not fit the machine; None for `mem_len` 0 and beyond `LONGEST_WINDOW` tokens.
    """
    if not 0 < mem_len <= LONGEST_WINDOW:
        return None
    window, network = mem_len + 1, model.network
    stage = f"memory {mem_len:,}: recomputing the window"
    try:
        check_memory(model, watch.runtime, window, segment_len=window)
    except ResourceError as error:
        yield Notice(f"{stage} was not measured: {error.message}")
        return None
    tokens = torch.from_numpy(_random_tokens(model.config.model.vocab_size, window)[None]).to(watch.runtime.device)

    def call() -> None:
        with torch.inference_mode(), watch.runtime.autocast():
            network.logits(tokens, network.init_state(1, mem_len=0, segment_len=window))

    times = yield from watch.repeat(call, stage, warmup=1)
    return float(np.median(times))


def _random_tokens(vocab_size: int, count: int) -> NDArray[np.int64]:
    """Random token ids whose frequencies follow Zipf's law: id i of V has a share of log((i + 2) / (i + 1)) / log V."""
    uniforms = np.random.default_rng(0).random(count)
    return np.minimum(vocab_size**uniforms - 1, vocab_size - 1).astype(np.int64)


def _of_model(model: LoadedModel, mem_len: int) -> dict[str, Any]:
    parameters, weight_dtype = model.network.n_parameters, model.weight_dtype
    return {"model": model.name, "parameters": parameters, "weight_dtype": weight_dtype, "mem_len": mem_len}


def _speed(watch: Stopwatch, times: NDArray[np.float64], recomputed: float | None, **figures: Any) -> Speed:
    """The figures of timed calls that make or read `segment_len` tokens of each sequence.

    `recomputed` are the seconds of a token without memory, `figures` other fields of `Speed`.
    """
    n_tokens = figures["batch_size"] * figures["segment_len"]  # of a call
    total = float(times.sum())
    median, p90, p99 = (float(seconds) for seconds in np.quantile(times, (0.5, 0.9, 0.99)))
    if len(times) >= LEAST_FOR_P99:
        figures["ms_per_token_p99"] = 1e3 * p99 / n_tokens
    if recomputed is not None:
        figures |= {"recompute_ms_per_token": 1e3 * recomputed, "recompute_ratio": recomputed * n_tokens / median}
    return Speed(
        calls=len(times),
        tokens=n_tokens * len(times),
        tokens_per_second=n_tokens * len(times) / total,
        ms_per_token=1e3 * median / n_tokens,
        ms_per_token_p90=1e3 * p90 / n_tokens,
        seconds=total,
        device=str(watch.runtime.device),
        dtype=watch.runtime.dtype_name,
        threads=watch.runtime.threads,
        **figures,
    )
