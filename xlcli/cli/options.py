"""Options of the commands: their settings, which the fields of the configuration declare, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Optional, get_args

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from xlcli.config import Option

COMMANDS: Mapping[str, str] = {  # what each command does, in the order of the help
    "train": "Train a model on a text and save it in models/. Everything has a default.",
    "eval": "Score a text: bits per byte, perplexity, loss by context.",
    "generate": "Continue a text and print it as it is generated.",
    "stream": "Score text line by line as it arrives, indefinitely, in constant RAM.",
    "import": "Import a model of another program from a folder or file that you have downloaded.\n\n"
    "Nothing in it is executed. docs/models.md lists the formats and what is exact.",
    "export": "Write a model for transformers or llama.cpp, with the same predictions.\n\n"
    "Rejects a model that the format cannot hold. Importing it again gives the same model.",
    "models": "List models (default) or presets; show or copy one.\n\n"
    "A model is a folder: rm, mv and rsync do the rest.",
    "bench": "Measure the speed of decoding (default), evaluation or training.",
}
SECTIONS: Mapping[str, tuple[str, ...]] = {  # by command; fields of those up to `runtime` are options and variables
    "train": ("text", "train", "runtime", "model"),
    "eval": ("eval", "runtime"),
    "generate": ("generate", "runtime"),
    "stream": ("stream", "runtime"),
    "bench": ("bench", "runtime", "train", "model"),
}


def option(panel: str, names: str, about: str, **settings: Any) -> Any:
    """An option for `Annotated`, under a heading of the help; `settings` are further arguments of `typer.Option`.

    `names` are those of the option, and its value, as the help shows them: `-m, --model NAME|FOLDER`.
    """
    spelled, _, value = names.replace(", ", ",").partition(" ")
    return typer.Option(*spelled.split(","), metavar=value or None, help=about, rich_help_panel=panel, **settings)


def plot_option(panel: str, about: str, **settings: Any) -> Any:
    """The option `--plot` for `Annotated`; arguments as of `option`."""
    return option(panel, "--plot FILE.png", f"{about} (needs the extra xlcli[plot]).", **settings)


def complete_models(incomplete: str) -> list[str]:
    """Names of models that begin so, for a shell."""
    from xlcli.store.discover import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_presets(incomplete: str) -> list[str]:
    """Names of presets that begin so, for a shell."""
    from xlcli.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_both(incomplete: str) -> list[str]:
    return complete_models(incomplete) + complete_presets(incomplete)


Model = Annotated[
    list[str] | None,
    option(
        "Model",
        "-m, --model NAME|FOLDER",
        "Use this model. Default: newest in ./models, else the bundled one.",
        autocompletion=complete_models,
    ),
]
State = Annotated[
    str | None,
    option("Memory", "--state FILE", "Continue from the state in this file, if it exists; save the new one there."),
]
StateIn = Annotated[str | None, option("Memory", "--state-in FILE", "Continue from the state in this file.")]
StateOut = Annotated[
    str | None, option("Memory", "--state-out FILE", "Save the state here at the end or when stopped.")
]
Html = Annotated[
    str | None, option("Output", "--html FILE.html", "Write a page: words by surprisal, a curve, surprising lines.")
]
DryRun = Annotated[
    bool, option("Settings", "--dry-run", "Print the plan, the size of the model and the RAM it needs, and exit.")
]
Weights = Annotated[
    Literal["float32", "bfloat16", "int8"] | None,
    option("Model", "--weights", "Store the weights in this type. Default: as in the model.", allow_from_autoenv=False),
]
Format = Annotated[
    Literal[
        "llama", "gemma3", "gpt2", "gpt-neo", "gpt-j", "gpt-neox", "opt", "bloom",
        "transfo-xl", "transfo-xl-original", "gguf",
    ] | None,
    option("Model", "--format", "Name the format of the model. Default: detected.", allow_from_autoenv=False),
]  # fmt: skip
SETTINGS_OPTIONS = {  # parameters of the commands that have settings, beside `SHARED_OPTIONS`
    "config_file": Annotated[
        str | None, option("Settings", "--config FILE.toml", "Read settings from a TOML file.", envvar="XLCLI_CONFIG")
    ],
    "overrides": Annotated[
        list[str] | None,
        option("Settings", "--set a.b=c", "Set one setting. May be repeated.", allow_from_autoenv=False),
    ],
    "print_config": Annotated[
        bool, option("Settings", "--print-config", "Print all settings with their meaning, and exit.")
    ],
    "verbose": Annotated[bool, option("Output", "-v, --verbose", "Print details on stderr.")],
}
SHARED_OPTIONS = {  # parameters of all commands
    "json": Annotated[bool, option("Output", "--json", "Print JSON on stdout.")],
    "quiet": Annotated[bool, option("Output", "-q, --quiet", "Print only results, warnings and errors.")],
    "color": Annotated[
        Literal["auto", "always", "never"] | None,
        option("Output", "--color", "Use color. auto: on a terminal unless NO_COLOR is set."),
    ],
    "debug": Annotated[bool, option("Output", "--debug", "Show a traceback on errors.")],
}


class Setting(NamedTuple):
    """A setting of a command: a field of the configuration in a section, and its option if it has one."""

    section: str
    field: FieldInfo
    option: Option | None


def settings_of(command: str | None) -> dict[str, Setting]:
    """Settings of a command that are options or environment variables, by name; of two the one of the first section."""
    from xlcli.config import Config, Option, table

    settings: dict[str, Setting] = {}
    if command is None or command not in SECTIONS:
        return settings
    sections = SECTIONS[command]
    for section in sections[: sections.index("runtime") + 1]:
        kind = table(Config.model_fields[section])
        assert kind is not None
        for name, field in kind.model_fields.items():
            if name in settings:
                continue
            declared = [part for part in field.metadata if isinstance(part, Option)]
            # An option is one of all commands unless it names some.
            options = [part for part in declared[:1] if not part.commands or command in part.commands]
            settings[name] = Setting(section, field, options[0] if options else None)
    return settings


def option_kinds(command: str) -> dict[str, Any]:
    """Types of the options of a command's settings, by name: switches, choices, lists, or texts to be read later."""
    kinds: dict[str, Any] = {}
    for name, setting in settings_of(command).items():
        if setting.option is None:
            continue
        kind = setting.field.annotation
        details = option(
            setting.option.panel,
            setting.option.names,
            setting.field.description or "",
            allow_from_autoenv=False,
        )
        is_switch = kind is bool or any(bool in get_args(part) for part in get_args(kind))
        if is_switch:
            kinds[name] = Annotated[bool, details]
        elif kind == tuple[str, ...]:
            kinds[name] = Annotated[list[str] | None, details]
        elif choices(kind):
            kinds[name] = Annotated[Optional[kind], details]  # noqa: UP045
        else:
            kinds[name] = Annotated[str | None, details]
    return kinds


def choices(kind: Any) -> tuple[str, ...]:
    """Values of a `Literal`, or of one that may be None; none of any other type."""
    texts: list[str] = []
    for part in (kind, *get_args(kind)):
        texts += [choice for choice in get_args(part) if isinstance(choice, str)]
    return tuple(texts)
