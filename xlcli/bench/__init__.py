"""Benchmark: speed of decoding, evaluation and training on this machine, beside the peaks of the machine.

Calls are repeated with full memory, after calls that are not timed. Times are medians, with percentiles beside the time
per token; tokens per second is a mean, and the peaks of the machine are the best of their calls. Tokens are random, and
their frequencies follow Zipf's law; the cost of a call depends on their values only with LSH attention and an adaptive
softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from xlcli.bench import measure
from xlcli.bench.timing import PEAK_SECONDS, Stopwatch
from xlcli.config import Config
from xlcli.events import Notice, Progress, Speed, StoppedEarlyError
from xlcli.machine import require_memory
from xlcli.model.build import build_model
from xlcli.runtime import Runtime, forget_peak_rss
from xlcli.store.folder import LoadedModel
from xlcli.store.weights import round_weights
from xlcli.text.tokenizers import BytesTokenizer

UNEVEN = 1.5
"""Ratio of the 90th percentile to the median above which the machine was not quiet."""
FIGURES = {"decode": 3, "eval": 2, "train": 1}
"""Number of timed figures of a task."""


def untrained(name: str, config: Config, runtime: Runtime) -> LoadedModel:
    """A model of this configuration with random weights and the settings of `config.bench`.

    Raises:
        ResourceError: The weights do not fit the machine.
    """
    options, shape = config.bench, config.bench.shape(config.model)
    require_memory(f"the weights of {name}", 4 * shape.n_matrix_weights, "Use a smaller preset.", str(runtime.device))
    torch.manual_seed(config.runtime.seed or 0)
    network = build_model(shape).to(runtime.device).eval()
    if options.clamp_len is not None:
        network.clamp_len, network.full_len = config.train.limits(shape, options.clamp_len)
    if (weights := options.weights) != "float32":
        round_weights(network, weights)
    config = config.model_copy(update={"model": shape})
    return LoadedModel(
        Path(name), name, config, BytesTokenizer(), network, {}, {}, weight_dtype=weights, encoding=weights
    )


def bench(
    task: str, name: str, model: LoadedModel | None, config: Config, runtime: Runtime, *, stop: Callable[[], bool]
) -> Iterator[Notice | Progress | Speed]:
    """Measures a workflow, with a line about the plan first.

    Args:
        task: `decode` (a token per call, as `generate`), `eval`, or `train`.
        name: Name of the preset or model.
        model: Model that decodes or evaluates, trained or not; training makes new weights.
        config: Sections model, train and bench: memory lengths, batch size and time for each figure.
        runtime: Device and number type, of `make_runtime` for this task.
        stop: Called between calls; when true, no further memory length is measured.

    Yields:
        Progress, notices, and a `Speed` for each memory length.

    Raises:
        ConfigError: A setting is illegal or does not apply to this model.
        ResourceError: The memory does not fit the machine.
    """
    options = config.bench
    watch = Stopwatch(runtime, options.seconds, stop)
    if model is None:
        measurements = [measure.training(name, config, each, watch) for each in options.sweep]
    else:
        model.check_settings(options)
        start = measure.decoding if task == "decode" else measure.evaluation
        measurements = [start(model, each, watch) for each in options.sweep]
    for measurement in measurements:
        next(measurement)
    planned = 2 * min(options.seconds, PEAK_SECONDS) + options.seconds * FIGURES[task] * len(measurements)
    lengths = ", ".join(map(str, options.mem_lens)) or "as trained"
    yield Notice(f"peaks of this machine, then {task} of {name} with memory {lengths}: about {planned:.0f} s")
    try:
        yield from watch.measure_peaks()
        for measurement in measurements:
            forget_peak_rss()
            speed = yield from measurement
            if (ratio := speed.ms_per_token_p90 / speed.ms_per_token) > UNEVEN:
                yield Notice(f"a tenth of the calls took {ratio:.1f} times the median or longer; the machine was busy")
            yield speed
    except StoppedEarlyError:
        yield Notice("stopped before all figures were measured.", "warning")
