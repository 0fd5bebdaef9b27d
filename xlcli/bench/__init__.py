"""Benchmark: speed of decoding, evaluation and training on this machine, beside the peaks of the machine.

Calls are repeated with full memory, after calls that are not timed. Times are medians, with percentiles beside the time
per token; tokens per second is a mean, and the peaks of the machine are the best of their calls. Tokens are random, and
their frequencies follow Zipf's law; the cost of a call depends on their values only with LSH attention and an adaptive
softmax.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from xlcli.bench.measure import (
    Measurement,
    Stop,
    check_decoding,
    check_evaluation,
    check_training,
    measure_decoding,
    measure_evaluation,
    measure_training,
)
from xlcli.bench.peaks import Peaks, measure_peaks
from xlcli.bench.timing import UNEVEN
from xlcli.config import BenchConfig, Config, WeightEncoding
from xlcli.events import Notice, Progress, Speed, StoppedEarlyError
from xlcli.machine import require_memory
from xlcli.model.build import build_model
from xlcli.runtime import Runtime, forget_peak_rss
from xlcli.store.folder import LoadedModel
from xlcli.store.weights import round_weights
from xlcli.text.tokenizers import BytesTokenizer

BUSY_LOAD = 0.5
"""Load average at the start above which other programs use the machine."""
FIGURES = {"decode": 3, "eval": 2, "train": 1}
"""Number of timed figures of a task."""
PEAK_SECONDS = 1.0
"""Maximum time for each peak of the machine."""
Event = Notice | Progress | Speed
Task = Literal["decode", "eval", "train"]


def untrained(name: str, config: Config, runtime: Runtime, weight_dtype: WeightEncoding = "float32") -> LoadedModel:
    """A model of this configuration with random weights, rounded to a number type.

    Raises:
        ResourceError: The weights do not fit the machine.
    """
    least = 4 * config.model.n_matrix_weights
    require_memory(f"the weights of {name}", least, "Use a smaller preset.", str(runtime.device))
    torch.manual_seed(config.runtime.seed or 0)
    network = build_model(config.model).to(runtime.device).eval()
    if weight_dtype != "float32":
        round_weights(network, weight_dtype)
    return LoadedModel(
        Path(name), name, config, BytesTokenizer(), network, {}, {}, weight_dtype=weight_dtype, encoding=weight_dtype
    )


def bench(task: Task, model: LoadedModel, options: BenchConfig, runtime: Runtime, *, stop: Stop) -> Iterator[Event]:
    """Measures decoding or evaluation with a model.

    Args:
        task: `decode` (a token per call, as `generate`) or `eval`.
        model: Model, trained or not.
        options: Memory lengths, batch size and time for each figure.
        runtime: Device and number type.
        stop: Called between calls; when true, no further memory length is measured.

    Yields:
        Progress, notices, and a `Speed` for each memory length.

    Raises:
        ConfigError: A setting does not apply to this model.
        ResourceError: The memory does not fit the machine.
    """
    model.check_settings(options)

    def prepare(mem_len: int) -> Callable[[Peaks], Measurement]:
        changed = options.model_copy(update={"mem_len": mem_len})
        if task == "decode":
            check_decoding(model, changed, runtime)
            return lambda peaks: measure_decoding(model, changed, runtime, peaks, stop)
        lengths = check_evaluation(model, changed, runtime)
        return lambda peaks: measure_evaluation(model, lengths, options.seconds, runtime, peaks, stop)

    return _measure_all(task, model.name, options, model.config.train.mem_len, runtime, prepare, stop)


def bench_training(name: str, config: Config, runtime: Runtime, *, stop: Stop) -> Iterator[Event]:
    """Measures training steps of a configuration, with new weights.

    Args:
        name: Name of the preset or model.
        config: Sections model, train and bench.
        runtime: Device and number type, of `make_runtime` for training.
        stop: As in `bench`.

    Yields:
        As `bench`.

    Raises:
        ConfigError: A setting is illegal.
        ResourceError: The run does not fit the machine.
    """

    def prepare(mem_len: int) -> Callable[[Peaks], Measurement]:
        changed = check_training(config, mem_len, runtime)
        return lambda peaks: measure_training(name, changed, runtime, peaks, stop)

    return _measure_all("train", name, config.bench, config.train.mem_len, runtime, prepare, stop)


def _measure_all(
    task: Task,
    name: str,
    options: BenchConfig,
    trained: int,
    runtime: Runtime,
    prepare: Callable[[int], Callable[[Peaks], Measurement]],
    stop: Stop,
) -> Iterator[Event]:
    """Plan, peaks of the machine, and the figures for each memory length; `trained` is the default length.

    `prepare` raises an error if a memory length does not fit the machine. All are prepared before a measurement.
    """
    mem_lens = options.mem_lens or (trained if options.mem_len is None else options.mem_len,)
    measurements = [prepare(mem_len) for mem_len in mem_lens]
    for_peaks = min(options.seconds, PEAK_SECONDS)
    planned = 2 * for_peaks + options.seconds * FIGURES[task] * len(mem_lens)
    lengths = ", ".join(map(str, mem_lens))
    yield Notice(f"peaks of this machine, then {task} of {name} with memory {lengths}: about {planned:.0f} s")
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        yield Notice(f"load of the last minute: {load:.1f}; calls take longer if other programs are running")
    try:
        peaks = yield from measure_peaks(runtime, for_peaks, stop)
        for measure in measurements:
            forget_peak_rss()
            yield from _end((yield from measure(peaks)))
    except StoppedEarlyError:
        yield Notice("stopped before all figures were measured.", "warning")


def _end(speed: Speed) -> Iterator[Event]:
    """The figures, and a remark if they vary."""
    if speed.ms_per_token_p90 > UNEVEN * speed.ms_per_token:
        ratio = speed.ms_per_token_p90 / speed.ms_per_token
        yield Notice(
            f"memory {speed.mem_len:,}: a tenth of the calls took {ratio:.1f} times the median or longer; the machine "
            "was not quiet"
        )
    yield speed
