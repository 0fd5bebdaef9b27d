"""A stopwatch for repeated calls, their operations, and the peaks of the machine: memory bandwidth, matrix products."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from xlcli.events import Progress, ProgressMeter, StoppedEarlyError
from xlcli.runtime import Runtime

WARMUP = LEAST = 3
"""Number of calls before the timed ones, and minimum number of timed calls."""
PEAK_SECONDS = 1.0
"""Maximum time for each peak of the machine."""
READ_BYTES = 2**28
"""Size of the array that is read, larger than the caches."""
WIDTHS = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Widths of the square matrices that are multiplied; the best rate counts."""


@dataclass
class Stopwatch:
    """Times calls again and again.

    Attributes:
        runtime: Device, which is waited for.
        seconds: Time for all calls of a figure; at least `LEAST` are timed. A second call that takes longer is the only
            timed one.
        stop: Called between calls.
        bytes_per_second: Highest rate of reading memory, once the peaks are measured.
        flops_per_second: Highest rate of matrix products in the number type, with all threads.
    """

    runtime: Runtime
    seconds: float
    stop: Callable[[], bool]
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0

    def repeat(
        self, call: Callable[[], object], stage: str, *, fill: int = 0, warmup: int = WARMUP
    ) -> Generator[Progress, None, NDArray[np.float64]]:
        """Durations of a call in seconds, ascending; yields progress of this stage.

        The first `fill` calls fill the memory; `warmup` more are not timed, at least 1, which may compile or allocate.

        Raises:
            StoppedEarlyError: `stop` became true.
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

    def measure_peaks(self) -> Generator[Progress, None, None]:
        """Measures both peaks on the device; the shortest call counts. Raises `StoppedEarlyError` as `repeat`."""
        device, seconds = self.runtime.device, min(self.seconds, PEAK_SECONDS)
        array = torch.ones(READ_BYTES // 4, device=device)
        watch = Stopwatch(self.runtime, seconds, self.stop)
        times = yield from watch.repeat(array.max, "bandwidth of reading memory")
        self.bytes_per_second = READ_BYTES / times[0]
        del array
        small = torch.ones(2, 8, 8, device=device, dtype=self.runtime.dtype)
        torch.matmul(*small)  # starts the library of matrix products
        widths = WIDTHS.get(device.type, WIDTHS["cuda"])
        watch = Stopwatch(self.runtime, seconds / len(widths), self.stop)
        for width in widths:
            a, b = torch.ones(2, width, width, device=device, dtype=self.runtime.dtype)
            times = yield from watch.repeat(partial(torch.matmul, a, b), "arithmetic of matrix products")
            self.flops_per_second = max(self.flops_per_second, 2 * width**3 / times[0])


aten = torch.ops.aten
MORE_PRODUCTS = {
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Floating-point operations of matrix products that PyTorch does not count."""


def count_operations(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call, forward and backward, without compiled kernels.

    A multiplication with its addition counts as two.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks of modules whose activations are computed again
        counter = FlopCounterMode(display=False)
        counter.flop_registry.update(MORE_PRODUCTS)
        with counter:
            call()
    return int(counter.get_total_flops())
