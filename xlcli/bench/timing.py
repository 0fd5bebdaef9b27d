"""A stopwatch for repeated calls, their operations, and the peaks of the machine: memory bandwidth, matrix products."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from xlcli.events import Progress, ProgressMeter, StoppedEarlyError
from xlcli.runtime import Runtime

WARMUP = 3
"""Number of calls before the timed ones."""
LEAST = 3
"""Minimum number of timed calls."""
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
        """Durations of a call in seconds, ascending; yields progress.

        Args:
            call: The call.
            stage: Name of the measurement in the events.
            fill: Number of calls that fill the memory, before all others.
            warmup: Number of calls before the timed ones, at least 1: the first call may compile or allocate.

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
            if len(durations) > 1 and (
                durations[1] >= self.seconds or (len(timed) >= LEAST and sum(timed) >= self.seconds)
            ):
                break
        return np.sort(timed or durations[1:])

    def measure_peaks(self) -> Generator[Progress, None, None]:
        """Measures both peaks on the device; the shortest call counts.

        Raises:
            StoppedEarlyError: `stop` became true.
        """
        device, seconds = self.runtime.device, min(self.seconds, PEAK_SECONDS)
        array = torch.ones(READ_BYTES // 4, device=device)
        watch = Stopwatch(self.runtime, seconds, self.stop)
        times = yield from watch.repeat(array.max, "bandwidth of reading memory")
        self.bytes_per_second = READ_BYTES / times[0]
        del array
        small = torch.ones(2, 8, 8, device=device, dtype=self.runtime.dtype)
        torch.matmul(*small)  # starts the library of matrix products
        widths = WIDTHS.get(device.type, WIDTHS["cuda"])
        watch.seconds = seconds / len(widths)
        for width in widths:
            a, b = torch.ones(2, width, width, device=device, dtype=self.runtime.dtype)
            times = yield from watch.repeat(partial(torch.matmul, a, b), "arithmetic of matrix products")
            self.flops_per_second = max(self.flops_per_second, 2 * width**3 / times[0])


aten = torch.ops.aten
OPERATIONS = flop_registry | {
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Floating-point operations of each matrix product, a multiplication with its addition as two: as PyTorch's
`FlopCounterMode`, and more."""


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Unlike `FlopCounterMode` it has no hooks on modules, which warn when activations are computed again."""

    total: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Result of the operator."""
        kwargs = kwargs or {}
        formula = OPERATIONS.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)  # in inference mode matmul, for example, is not yet split
            return func(*args, **kwargs) if parts is NotImplemented else parts
        out = func(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=out)
        return out


def count_operations(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call, forward and backward, without compiled kernels."""
    with _OperationCounter() as counter:  # type: ignore[no-untyped-call]
        call()
    return int(counter.total)
