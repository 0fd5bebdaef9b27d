"""Long-context language modeling on the command line and from Python (docs/python.md).

    import xlcli
    model = xlcli.load("books")
    model.score("It was a dark night.").bits_per_byte

All names below are imported on first use, so that `import xlcli` does not import torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import would lengthen the time in which an interrupt prints a traceback

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Document",
    "Model",
    "ResourceError",
    "StateError",
    "TextScore",
    "TextState",
    "XLError",
    "__version__",
    "copy_model",
    "evaluate",
    "generate",
    "generate_prompts",
    "list_presets",
    "load",
    "read_toml",
    "resume",
    "stream",
    "train",
]

_MODULES = {
    "xlcli.api": (
        "Model",
        "copy_model",
        "evaluate",
        "generate",
        "generate_prompts",
        "load",
        "stream",
    ),
    "xlcli.api.runs": ("resume", "train"),
    "xlcli.api.values": ("TextScore", "TextState"),
    "xlcli.config": ("read_toml",),
    "xlcli.errors": (
        "BusyError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DivergedError",
        "ResourceError",
        "StateError",
        "XLError",
    ),
    "xlcli.presets": ("list_presets",),
    "xlcli.text.formats": ("Document",),
}
"""Module of each public name."""

if TYPE_CHECKING:
    from typing import Any

    from xlcli.api import Model, copy_model, evaluate, generate, generate_prompts, load, stream
    from xlcli.api.runs import resume, train
    from xlcli.api.values import TextScore, TextState
    from xlcli.config import read_toml
    from xlcli.errors import (
        BusyError,
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        ResourceError,
        StateError,
        XLError,
    )
    from xlcli.presets import list_presets
    from xlcli.text.formats import Document


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'xlcli' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
