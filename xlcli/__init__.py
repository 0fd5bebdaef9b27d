"""Long-context language modeling on the command line and from Python (docs/python.md).

    import xlcli
    model = xlcli.load("books")
    model.score("It was a dark night.").bits_per_byte

The names below are imported on first use, so that `import xlcli` does not import torch. Their types are in
`__init__.pyi`.
"""

__version__ = "0.1.0"

_MODULES = {
    "BusyError": "xlcli.errors",
    "CheckpointError": "xlcli.errors",
    "ConfigError": "xlcli.errors",
    "DataError": "xlcli.errors",
    "DivergedError": "xlcli.errors",
    "Document": "xlcli.text.documents",
    "Model": "xlcli.api",
    "ResourceError": "xlcli.errors",
    "StateError": "xlcli.errors",
    "TextScore": "xlcli.api.values",
    "TextState": "xlcli.api.values",
    "XLError": "xlcli.errors",
    "copy_model": "xlcli.api",
    "evaluate": "xlcli.api",
    "generate": "xlcli.api",
    "generate_prompts": "xlcli.api",
    "list_presets": "xlcli.presets",
    "load": "xlcli.api",
    "read_toml": "xlcli.config",
    "resume": "xlcli.api",
    "resume_events": "xlcli.api.runs",
    "stream": "xlcli.api",
    "train": "xlcli.api",
    "train_events": "xlcli.api.runs",
}
"""Module of each public name."""

__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'xlcli' has no attribute '{name}'")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
