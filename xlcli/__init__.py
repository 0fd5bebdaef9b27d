"""Long-context language modeling on the command line and from Python.

The workflows are generators of events: `xlcli.training.train`, `xlcli.evaluation.evaluate`, `xlcli.generation.generate` and
`xlcli.streaming.stream`. The names below are loaded on first use, so `import xlcli` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "ResourceError",
    "State",
    "StateError",
    "XLError",
    "__version__",
    "find_model",
    "list_presets",
    "load_model",
    "load_state",
    "make_config",
    "make_runtime",
    "read_preset",
    "save_state",
]

_HOMES = {
    "Config": "xlcli.config:Config",
    "State": "xlcli.state:State",
    "find_model": "xlcli.store.discover:find",
    "list_presets": "xlcli.presets:list_presets",
    "load_model": "xlcli.store.folder:load",
    "load_state": "xlcli.store.state_files:load_state",
    "make_config": "xlcli.config:make",
    "read_preset": "xlcli.presets:read_preset",
    "save_state": "xlcli.store.state_files:save_state",
    "make_runtime": "xlcli.runtime:make_runtime",
}

if TYPE_CHECKING:
    from xlcli.config import Config
    from xlcli.config import make as make_config
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
    from xlcli.presets import list_presets, read_preset
    from xlcli.runtime import make_runtime
    from xlcli.state import State
    from xlcli.store.discover import find as find_model
    from xlcli.store.folder import load as load_model
    from xlcli.store.state_files import load_state, save_state


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, f"xlcli.errors:{name}" if name in __all__ else "")
    if not home:
        raise AttributeError(f"module 'xlcli' has no attribute '{name}'")
    module, _, attribute = home.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
