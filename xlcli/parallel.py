"""Where and in which number type to compute: decided once, outside the model."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass

import torch

from xlcli.config import RuntimeConfig
from xlcli.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number types by name."""


@dataclass(frozen=True)
class Runtime:
    """A device, the type matrices are multiplied in (weights stay float32), and the number of CPU threads."""

    device: torch.device
    dtype: torch.dtype
    threads: int

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Matrix products in `dtype`; nothing at all for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def setup(config: RuntimeConfig, *, training: bool = False) -> Runtime:
    """Chooses device and number type and sets threads.

    `auto` is float32 for evaluation and generation, whose numbers must not depend on how the text is cut; training
    takes bfloat16 where the hardware multiplies it natively.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    device = _device(config.device)
    if config.dtype != "auto":
        dtype = DTYPES[config.dtype]
    else:
        dtype = torch.bfloat16 if training and has_bfloat16_units(device) else torch.float32
    if dtype == torch.float16 and training:
        raise ConfigError("training in float16 is not supported.", "Use --dtype bfloat16 or float32.")
    return Runtime(device, dtype, torch.get_num_threads())


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are native, and so faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def peak_rss_bytes() -> int:
    """Most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("no CUDA device is available.", "Use --device cpu.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no device {name}: this machine has {torch.cuda.device_count()}.", "Use --device cuda."
            )
    return device
