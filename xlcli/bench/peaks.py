"""Measured peaks of the machine: bandwidth of reading memory, and arithmetic of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import torch

from xlcli.bench.timing import repeat
from xlcli.events import Progress
from xlcli.runtime import Runtime

READ_BYTES = 2**28
"""Size of the array that is read, larger than the caches."""
WIDTHS = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Widths of the square matrices that are multiplied; the best rate counts."""


@dataclass(frozen=True)
class Peaks:
    """Highest measured rates, with all threads: bytes read, and operations of matrix products in the number type."""

    bytes_per_second: float
    flops_per_second: float


def measure_peaks(runtime: Runtime, seconds: float, stop: Callable[[], bool]) -> Generator[Progress, None, Peaks]:
    """Measures both peaks on the device, for about `seconds` each; the shortest call counts.

    Raises:
        StoppedEarlyError: `stop` became true.
    """
    array = torch.ones(READ_BYTES // 4, device=runtime.device)
    times = yield from repeat(array.max, "bandwidth of reading memory", seconds, runtime, stop)
    bandwidth = READ_BYTES / times.seconds[0]
    del array
    small = torch.ones(2, 8, 8, device=runtime.device, dtype=runtime.dtype)
    torch.matmul(*small)  # starts the library of matrix products
    widths, rates = WIDTHS.get(runtime.device.type, WIDTHS["cuda"]), []
    for width in widths:
        a, b = torch.ones(2, width, width, device=runtime.device, dtype=runtime.dtype)
        multiply = partial(torch.matmul, a, b)
        times = yield from repeat(multiply, "arithmetic of matrix products", seconds / len(widths), runtime, stop)
        rates.append(2 * width**3 / times.seconds[0])
    return Peaks(bandwidth, max(rates))
