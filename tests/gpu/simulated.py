"""A CUDA device that is not there: tensors say `cuda:0` and hold their values on the CPU.

A plugin of pytest, which must come before PyTorch (`pytest -p tests.gpu.simulated`, with GPU_TESTS_DEVICE=simulated).
PyTorch then believes in one CUDA device, so code takes its branches for one, with the numbers of the CPU. An operator
with tensors of both devices raises, as on a GPU. `counted` records what a GPU would have to do: operators, copies
between host and device, and waits of the host for the device, each with file and line.

It is a model of a CUDA build: an operator of PyTorch counts once, however many kernels it starts. Which kernel
`scaled_dot_product_attention` takes is said by the rules of `attention_kernel`. NCCL, CUDA graphs and Triton are not
simulated, nor is rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

COMPILER = os.environ.get("CXX", "c++")
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def why_not() -> str | None:
    """Why there is no simulated device; None: there is one."""
    if (TORCH / "lib" / "libtorch_cuda.so").exists():
        return "the GPU is not simulated: this PyTorch has CUDA itself"
    if shutil.which(COMPILER) is None:
        return f"the GPU is not simulated: there is no C++ compiler {COMPILER}"
    return None


def pytest_configure() -> None:
    """Ends the run, as if it had passed, where there is no simulated device."""
    reason = why_not()
    if reason is not None:
        pytest.exit(reason, returncode=0)


def load_guard() -> None:
    """Compiles guard.cpp for this PyTorch, unless it is in the temporary folder, and loads it."""
    assert "torch" not in sys.modules, "PyTorch asks for CUDA once, when it is imported"
    source = Path(__file__).with_name("guard.cpp")
    key = hashlib.sha256(source.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()
    library = Path(tempfile.gettempdir()) / f"xlcli-tests-{os.getuid()}" / f"guard-{key[:16]}.so"
    libraries = TORCH / "lib"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        compiler = [COMPILER, "-shared", "-fPIC", "-std=c++20", f"-I{TORCH / 'include'}"]
        linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
        subprocess.run([*compiler, str(source), "-o", str(part), *linked], check=True)
        part.replace(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


if why_not() is None:
    load_guard()

import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import CausalBias  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

CUDA = torch.device("cuda:0")
SOURCES = f"{Path(__file__).parents[2] / 'xlcli'}/"
FLASH_WIDTH = 256
"""Largest width of a head that the flash kernel takes."""


class Place(NamedTuple):
    """Line of the package, with its function; in a backward pass the function is the node of autograd."""

    file: str
    line: int
    function: str


@dataclass
class Work:
    """What a GPU has to do, each with its name and the place in the package that asks for it.

    operators   operators of PyTorch that start a kernel
    copies      copies from the host that wait: of memory that is not pinned, or that ask to wait
    waits       results for which the host waits
    attention   kernels of `scaled_dot_product_attention`
    """

    operators: list[tuple[str, Place]] = field(default_factory=list)
    copies: list[Place] = field(default_factory=list)
    waits: list[tuple[str, Place]] = field(default_factory=list)
    attention: Counter[str] = field(default_factory=Counter)


_work: Work | None = None
_pinned: dict[int, StorageWeakRef] = {}
"""The storages that were pinned, by address. Another storage may have the address of one that is gone."""


@contextlib.contextmanager
def counted():
    """Context that records the work of the device, and yields it."""
    global _work
    _work = work = Work()
    try:
        yield work
    finally:
        _work = None


def place() -> Place:
    """Innermost place of the package that runs now."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return Place("backward", 0, node.name())
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(SOURCES):
            return Place(code.co_filename.removeprefix(SOURCES), frame.f_lineno, code.co_name)
        frame = frame.f_back
    return Place("elsewhere", 0, "")


def note(name: str) -> None:
    if _work is not None:
        _work.operators.append((name, place()))


def note_copy(name: str) -> None:
    if _work is not None:
        _work.copies.append(place())
        _work.operators.append((name, place()))


def note_wait(name: str) -> None:
    if _work is not None:
        _work.waits.append((name, place()))


class Simulated(torch.Tensor):
    """Tensor of the device, with its values on the CPU."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=CUDA, requires_grad=values.requires_grad,
        )  # fmt: skip

    def __init__(self, values):
        self.values = values

    def __repr__(self):
        return f"Simulated({self.values})"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self):
        return self.cpu().tolist()

    def backward(self):
        """As that of a tensor, but not within `__torch_function__`, since it may compute attention again."""
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((self,), (torch.ones_like(self),), False, False, (), True, accumulate_grad=True)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in STAND_INS:
            return STAND_INS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Mode in which tensors can be made on, and copied to, the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def to_values(x):
    """The values of a tensor of the device; other things as they are, but the CPU for a device."""
    if isinstance(x, Simulated):
        return x.values
    return torch.device("cpu") if isinstance(x, torch.device) else x


def to_device(x):
    """A tensor of the device with these values; other things as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    with torch.inference_mode(False):  # a subclass cannot be made for inference only
        return Simulated(x)


WITHOUT_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "view", "_unsafe_view", "as_strided",
    "expand", "permute", "transpose", "t", "select", "slice", "split", "split_with_sizes", "unbind", "unsqueeze",
    "squeeze", "alias", "detach", "diagonal", "unfold", "_reshape_alias", "lift_fresh", "_local_scalar_dense",
    "is_same_size", "set_", "resize_", "record_stream",
}  # fmt: skip
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "repeat_interleave.Tensor",
    "_unique2",
    "unique_dim",
}
WITHOUT_CPU_KERNEL = {
    "_softmax": lambda x, dim, to_float: (x.float() if to_float else x).softmax(dim),
    "_log_softmax": lambda x, dim, to_float: (x.float() if to_float else x).log_softmax(dim),
    "_softmax_backward_data": lambda gradient, y, dim, dtype: (
        gradient * y - y * (gradient * y).sum(dim, keepdim=True)
    ).to(dtype),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def dispatch(func, args, kwargs):
    """Runs an operator on the values of its tensors, checks their devices, and notes what it does."""
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = [isinstance(x, Simulated) for x in tensors]
    asked = kwargs.get("device")
    asks_for_device = asked is not None and torch.device(asked).type == "cuda"
    if name in ("_pin_memory", "is_pinned"):
        return pin(name, *map(to_values, args))
    if not any(on_device) and not asks_for_device:
        return func(*args, **kwargs)
    if name == "_to_copy":
        return copy_to(func, args[0], kwargs)
    if name == "copy_" and not all(on_device):
        return copy_into(*args)
    if is_composite(func):  # in inference mode it comes as a whole
        with Device():
            return func.decompose(*args, **kwargs)
    check_devices(func, name, tensors)
    has_masks = any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
    if name in WAITING or f"{name}.{func._overloadname}" in WAITING or (name in INDEXING and has_masks):
        note_wait(name)
    if name not in WITHOUT_KERNEL:
        note(name)
    function = WITHOUT_CPU_KERNEL.get(name, func)
    out = function(*tree_map(to_values, args), **tree_map(to_values, kwargs))
    return return_and_correct_aliasing(func, args, kwargs, tree_map(to_device, out))


@functools.cache
def is_composite(func):
    """Whether an operator is made of others, and has no kernel."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def check_devices(func, name, tensors):
    """Raises RuntimeError if tensors of an operator are on two devices, but for what a GPU allows.

    That is single numbers, and indices, which are copied to the device.
    """
    elsewhere = [x for x in tensors if not isinstance(x, Simulated)]
    if not elsewhere or len(elsewhere) == len(tensors):
        return
    if name in INDEXING and all(isinstance(x, Simulated) for x in tensors[:1]):
        note_copy("index from the host")
    elif any(x.ndim for x in elsewhere):
        shapes = [tuple(x.shape) for x in elsewhere]
        raise RuntimeError(f"{func} at {place()}: not all tensors are on one device: on the CPU are {shapes}")


def pin(name, values, *_):
    """Whether a tensor of the CPU is pinned, or a pinned copy of it."""
    if name == "is_pinned":
        return is_pinned(values)
    copied = values.clone()
    storage = copied.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return copied


def is_pinned(values):
    """Whether a tensor of the CPU is pinned."""
    storage = _pinned.get(values.untyped_storage().data_ptr())
    return storage is not None and not storage.expired()


def copy_to(func, source, kwargs):
    """Copy of a tensor with other properties, on this or on another device."""
    device = torch.device(kwargs.get("device") or source.device)
    rest = {key: value for key, value in kwargs.items() if key != "device"}
    values = to_values(source)
    out = func(values, **rest)
    if device.type != "cuda":
        note_wait("copy to the host")
        note("copy to the host")
        return out
    if isinstance(source, Simulated):
        note("_to_copy")
    elif kwargs.get("non_blocking") and is_pinned(values):
        note("copy of pinned memory")
    else:
        note_copy("copy from the host")
    return to_device(out)


def copy_into(target, source, non_blocking=False):
    """Copies the values of a tensor into one of another device."""
    if not isinstance(target, Simulated):
        note_wait("copy to the host")
        note("copy to the host")
    elif non_blocking and is_pinned(source):
        note("copy of pinned memory")
    else:
        note_copy("copy from the host")
    to_values(target).copy_(to_values(source))
    return target


class OneOperator(torch.autograd.Function):
    """function(*tensors), which a CUDA build computes with one operator, and its gradient with another one."""

    @staticmethod
    def forward(ctx, name, function, *tensors):
        note(name)
        ctx.operator = name
        values = [x.values.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.inference_mode(False), torch.enable_grad():
            ctx.out = function(*[x.clone() if x.is_inference() else x for x in values])
        ctx.values = values
        return Simulated(ctx.out.detach())

    @staticmethod
    def backward(ctx, gradient):
        note(f"{ctx.operator}_backward")
        needed = [x for x in ctx.values if x.requires_grad]
        gradients = iter(torch.autograd.grad(ctx.out, needed, gradient.values))
        return None, None, *[Simulated(next(gradients)) if x.requires_grad else None for x in ctx.values]


def attention_kernel(q, k, v, mask):
    """Name of the kernel that a CUDA build takes (`sdp_utils.cpp` of PyTorch)."""
    is_16_bit = q.dtype in (torch.float16, torch.bfloat16)
    is_without_tensor = mask is None or isinstance(mask, CausalBias)
    if is_16_bit and is_without_tensor and q.shape[-1] == v.shape[-1] <= FLASH_WIDTH:
        return "flash"
    return "plain" if q.dtype == torch.float64 else "efficient"


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    tensors, is_bias = [query, key, value], isinstance(attn_mask, CausalBias)
    if torch.is_autocast_enabled("cuda") and not is_bias:  # whose kernels are not cast
        tensors = [x.to(torch.get_autocast_dtype("cuda")) if x.is_floating_point() else x for x in tensors]
    query, key, value = tensors
    if any(x.device != CUDA for x in tensors) or (attn_mask is not None and attn_mask.device != CUDA and not is_bias):
        raise RuntimeError(f"attention at {place()}: not all tensors are on one device")
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"attention at {place()}: {query.dtype}, {key.dtype} and {value.dtype}")
    if _work is not None:
        _work.attention[attention_kernel(query, key, value, attn_mask)] += 1
    if is_bias:
        attn_mask = attn_mask._materialize(torch.device("cpu"))
    elif attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(query.dtype)
        tensors.append(attn_mask)

    def function(q, k, v, bias=None):
        mask = to_values(attn_mask) if bias is None else bias
        return PLAIN_ATTENTION(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return OneOperator.apply("attention", function, *tensors)


def make_bias(cls, *_):
    """An empty tensor of this class, which cannot be made through a mode."""
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def rms_norm(x, normalized_shape, weight=None, eps=None):
    tensors = [x] if weight is None else [x, weight]
    if weight is not None and weight.dtype != x.dtype:  # not one operator then
        with torch._C.DisableTorchFunctionSubclass():
            return PLAIN_NORM(x, normalized_shape, weight, eps)
    return OneOperator.apply("rms_norm", lambda x, w=None: PLAIN_NORM(x, normalized_shape, w, eps), *tensors)


def silu(x, inplace=False):
    return OneOperator.apply("silu", PLAIN_SILU, x)


PLAIN_ATTENTION, PLAIN_NORM, PLAIN_SILU = F.scaled_dot_product_attention, F.rms_norm, F.silu
STAND_INS = {
    PLAIN_ATTENTION: scaled_dot_product_attention,
    PLAIN_NORM: rms_norm,
    PLAIN_SILU: silu,
}
"""In place of functions of PyTorch that a CUDA build computes with one operator. Within others nothing is replaced."""


def pretend() -> None:
    """Makes this process believe in the device, for good."""
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": "simulated", "is_bf16_supported": True, "mem_get_info": (2**37, 2**37), "memory_reserved": 0,
        "memory_allocated": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "_lazy_init": None, "synchronize": None, "set_device": None, "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.utils._foreach_utils._foreach_supported_types.append(Simulated)
    CausalBias.__new__ = make_bias
    torch.__future__.set_swap_module_params_on_conversion(True)  # shared ones stay shared
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a tensor of the CPU first
    Device().__enter__()


if why_not() is None and os.environ.get("GPU_TESTS_DEVICE") == "simulated":
    pretend()
