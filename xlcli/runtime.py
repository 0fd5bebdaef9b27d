"""Runtime: device, number type, CPU threads, ranks, and compilation."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlcli.config import RuntimeConfig
from xlcli.errors import ConfigError
from xlcli.files import own_folder, process_folder
from xlcli.machine import cpu_limit
from xlcli.memory import Memory
from xlcli.model.attention.local import LocalAttention
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.reversible import ReversibleStack
from xlcli.model.stack import Block, Stack, StackOutput
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import has_bfloat16_units
from xlcli.ranks import SINGLE, Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # number types by name
COMPILER: dict[str, Any] = {"cpp_cache_precompile_headers": False}  # which are in the temporary folder of all users
LOOP_SECONDS = 0.02  # duration of the measurement of a parallel loop
LOOP_ROUNDS = 3  # number of measurements of a parallel loop, of which the slowest counts


@dataclass(frozen=True)
class Runtime:
    """Device, number type of matrix products (weights stay float32), number of CPU threads, and ranks."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    ranks: Ranks = SINGLE

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Context for matrix products in `dtype`; does nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def make_runtime(
    config: RuntimeConfig, *, training: bool = False, by_clock: bool = False, ranks: Ranks = SINGLE
) -> Runtime:
    """Chooses device and number type, and sets the number of threads of the process.

    Number type `auto` is float32 at inference, whose results must not depend on the division of the text into calls; in
    training it is bfloat16 where the hardware supports it natively. Several ranks of a machine share its CPUs equally,
    and each has the CUDA device of its own number. A device with a number becomes the current one of PyTorch.

    Training that ends `by_clock` may depend on the load of the machine: on a CPU it takes `fastest_threads`, unless the
    number is given (`threads`, `OMP_NUM_THREADS` or `MKL_NUM_THREADS`) or `deterministic` is set. `ConfigError` if the
    device does not exist or does not support the settings, or others can write the folder of compiled code.
    """
    device = _device(config.device, ranks)
    if training:  # without it, optimizers make a folder that another user may have made, too
        name = "TORCHINDUCTOR_CACHE_DIR"
        chosen = os.environ.get(name)
        folder = own_folder(Path(chosen), name) if chosen else process_folder()
        os.environ[name] = str(folder)
    if training and config.compile:
        _require_compiler(device)
        os.environ["PYTHONSAFEPATH"] = "1"  # the compiler starts Python, which would search the working folder
    if config.deterministic:
        # Read by cuBLAS at its first use; deterministic matrix products require it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.dtype != "auto":
        dtype = DTYPES[config.dtype]
    elif training and has_bfloat16_units(device):
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    n_threads = _n_threads(config, ranks, trains_on_cpu=training and device.type == "cpu", by_clock=by_clock)
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    return Runtime(device, dtype, torch.get_num_threads(), ranks=ranks)


def _n_threads(config: RuntimeConfig, ranks: Ranks, *, trains_on_cpu: bool, by_clock: bool) -> int | None:
    """Number of CPU threads to set; None if it stays as the environment or PyTorch say."""
    if config.threads is not None:
        return config.threads
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
        return None
    if ranks.size > 1:
        return max(1, cpu_limit() // ranks.local_size)
    if not trains_on_cpu:
        return None
    most = min(torch.get_num_threads(), cpu_limit())
    return fastest_threads(most) if by_clock and not config.deterministic else most


def fastest_threads(limit: int) -> int:
    """Number of CPU threads with which short parallel loops are fastest now: `limit`, one fewer, or its halves.

    With more threads than idle cores, every loop waits for a thread that waits for a core. Steps of training then take
    up to 50 times as long as with fewer threads.
    """
    halves = [limit >> i for i in range(limit.bit_length())]
    slowest: dict[int, float] = {}
    for n_threads in sorted({max(1, limit - 1), *halves}):
        slowest[n_threads] = max(parallel_loop_seconds(n_threads, limit) for _ in range(LOOP_ROUNDS))
    return min(slowest, key=slowest.__getitem__)


def parallel_loop_seconds(threads: int, n_parts: int) -> float:
    """Mean duration in seconds of a short parallel loop of `n_parts` parts with as many CPU threads, or fewer.

    A part of the loop takes about 20 microseconds. If threads wait for cores, which they get milliseconds later, the
    loop takes many times as long as with one thread. Measures for about `LOOP_SECONDS`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.zeros(n_parts * 2**15)  # PyTorch splits loops over elements into parts of at least 2^15
    x.exp()  # starts the threads
    started = time.perf_counter()
    seconds = 0.0
    n_loops = 0
    while seconds < LOOP_SECONDS:
        x.exp()
        n_loops += 1
        seconds = time.perf_counter() - started
    torch.set_num_threads(before)
    return seconds / n_loops


def compile_stack(stack: Stack) -> None:
    """Compiles the stack for training steps with full memory, at the first such call; other calls are not compiled.

    Beside LSH attention, within which shapes depend on the text, it compiles what follows attention in each block.
    Of two shapes each is compiled on its own: segments in which a document or piece begins have a mask. Results
    therefore do not depend on earlier compilations, and a resumed run equals an uninterrupted one to the bit.
    """
    if isinstance(stack, ReversibleStack):  # the compiler cannot trace the backward pass of its blocks
        stack.couple = torch.compiler.disable(stack.couple)  # type: ignore[no-untyped-call]
    elif any(isinstance(block.attention, LSHAttention) for block in stack.blocks):
        for block in stack.blocks:
            _compile_after_attention(block)
        return
    plain = stack.forward
    compiled = torch.compile(plain, dynamic=False, options=COMPILER)

    def forward(x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        if not stack.training or context.n_memory < context.keep:  # memory grows
            return plain(x, memories, context)
        compute_in_advance(stack, context)
        # One layout, because another would be compiled separately.
        contiguous = tuple(memory.map(Tensor.contiguous) for memory in memories)
        return compiled(x, contiguous, context)

    stack.forward = forward  # type: ignore[method-assign, method-assign]


def _compile_after_attention(block: Block) -> None:
    """Compiles in training what follows the attention of a block."""
    plain = block.after_attention
    compiled = torch.compile(plain, dynamic=False, options=COMPILER)

    def after_attention(x: Tensor, y: Tensor) -> Tensor:
        return compiled(x, y) if block.training else plain(x, y)

    block.after_attention = after_attention  # type: ignore[method-assign]


def compute_in_advance(stack: Stack, context: AttentionContext) -> None:
    """Computes what `context` keeps and the compiler cannot trace, such as a cached property on Python 3.11."""
    contexts = [context]
    for block in stack.blocks:
        if isinstance(block.attention, LocalAttention):
            narrow = context.narrow(block.attention.window)
            contexts += [narrow, narrow.block(block.attention.window)]
    for each in contexts:
        _ = each.mask.visible
        if each.mask.sees_all_earlier:
            _ = each.mask.causal_bias
        _ = each.positions.absolute


def _require_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("runtime.compile needs the package triton, which is not installed.", "Drop it.")
        return
    names = ["g++", "clang++", "c++", "cl"]
    if os.environ.get("CXX"):
        names = [os.environ["CXX"]]
    if not any(shutil.which(name) for name in names):
        problem = f"runtime.compile needs a C++ compiler, and there is none ({', '.join(names)})."
        raise ConfigError(problem, "Drop runtime.compile, or install g++.")


def _device(name: str, ranks: Ranks) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and ranks.size > 1:
        if device.index is not None:
            problem = f"{name} is one device, but there are {ranks.size} processes."
            raise ConfigError(problem, "Use --device cuda: each takes its own.")
        device = torch.device("cuda", ranks.local_rank)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("no CUDA device is available.", "Use --device cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            problem = f"there is no device {device}: this machine has {torch.cuda.device_count()}."
            raise ConfigError(problem, "Use --device cuda, and as many processes per machine as it has devices.")
        if device.index is not None:
            torch.cuda.set_device(device)  # FSDP2 moves parameters to the current device
    return device
