"""Commands: functions of Typer that get more options than they name.

    @app.command("stream", "cat book.txt | xlcli stream")
    def stream(call: Call, files: Annotated[list[str] | None, typer.Argument()] = None) -> int:
        settings = call.config().stream

A command has the options that its function names, those of its settings, which are declared at the fields of the
configuration (`Option`), and the shared ones (`options.SHARED_OPTIONS`). The function gets the values of the first kind
as arguments; `Call.config` has the settings, and `Call` the others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperOption
from typer.main import _get_param
from typer.models import ParamMeta

from xlcli.cli.help import CONTEXT, TYPER, HelpPage
from xlcli.cli.options import COMMANDS, SECTIONS, SETTINGS_OPTIONS, SHARED_OPTIONS, option_kinds
from xlcli.cli.outputs import Kind, check_outputs
from xlcli.cli.render import Screen
from xlcli.cli.settings import UserSettings, read_settings, to_toml
from xlcli.cli.usage import example, spelling, typed_names
from xlcli.config import Config, make
from xlcli.errors import ConfigError, InvalidSettingError
from xlcli.ranks import environment


class Call(typer.Context):
    """A call of a command. A function gets it as its parameter of this type."""

    @property
    def name(self) -> str:
        return str(self.info_name)

    @cached_property
    def screen(self) -> Screen:
        """Standard output and error, with the options of this call. Only the first process of several prints."""
        options = {name: self.params.get(name) or False for name in ("json", "quiet", "verbose")}
        return Screen(**options, color=self.params.get("color"), hidden=not environment().is_first)

    @cached_property
    def settings(self) -> UserSettings:
        """What the user has set: options, `--set`, environment and file."""
        spelled = {param.name: spelling(self, param) for param in self.command.params}
        return read_settings(self.name, self.params, typed_names(self), spelled)

    def config(self) -> Config:
        """The configuration; `--print-config` prints it instead. Errors name settings as the user wrote them."""
        with self.naming_settings():
            config = make(self.settings.tree)
        self.show_config(config)
        return config

    def show_config(self, config: Config, note: str = "") -> None:
        """With `--print-config`, prints the configuration after a note, and ends the command."""
        if not self.params["print_config"]:
            return
        tree = config.model_dump(mode="json", include={*SECTIONS[self.name]})
        if self.screen.json:
            self.screen.print(json.dumps(tree, indent=2) + "\n")
        else:
            self.screen.print(note + to_toml(tree, config).lstrip("\n"))
        raise typer.Exit

    @contextmanager
    def naming_settings(self) -> Iterator[None]:
        """Context in which an `InvalidSettingError` names the key as the user gave it: option, variable, key, file."""
        try:
            yield
        except InvalidSettingError as error:
            key = re.sub(r"\.\d+$", "", error.key)  # of an item of a list: the user wrote the list
            spelled = self.settings.spelled.get(key, error.key)
            remedy = error.remedy
            is_option_or_variable = spelled.startswith(("-", "XLCLI_"))
            if not remedy and is_option_or_variable:
                remedy = example(self.name, error.key.split(".")[1], spelled)
            raise ConfigError(f"{spelled} {error.reason}.", remedy or "Change that value.") from None

    def is_typed(self, name: str) -> bool:
        """True if this option is on the command line, and not only in the environment."""
        return name in typed_names(self)

    def require(self, name: str, wanted: str, *, is_given: bool) -> None:
        """`ConfigError` if an option or `--set` is on the command line without what it needs, as `--emit words`."""
        key = f"{self.name}.{name}"
        is_set = self.settings.spelled.get(key) == key
        if (self.is_typed(name) or is_set) and not is_given:
            raise ConfigError(f"{self.spelled(name)} needs {wanted}.", f"Add {wanted}.")

    def conflict(self, name: str, other: str) -> ConfigError:
        """The error for two options, or settings, that exclude each other."""
        reason = f"{self.spelled(name)} and {self.spelled(other)} cannot be combined."
        return ConfigError(reason, "Give one of them.")

    def spelled(self, name: str) -> str:
        """An option, argument or setting as the user gave it."""
        for param in self.command.params:
            if param.name == name and param.param_type_name == "argument":
                return str(param.metavar).partition("|")[0].strip("[]")
            if param.name == name:
                return spelling(self, param)
        return f"{self.name}.{name}"

    def check_files(self, inputs: Iterable[str | Path], outputs: Mapping[str, tuple[str | None, Kind]]) -> None:
        """Refuses outputs that cannot be written, or are inputs, before a model is loaded; by option with kinds."""
        files_read = [*inputs]
        if self.params.get("config_file") is not None:
            files_read.append(self.params["config_file"])
        check_outputs(outputs, map(Path, files_read))


class Command(HelpPage, TyperCommand):
    """A command with the options of its settings, and the shared ones."""

    context_class = Call

    def __init__(self, name: str | None, *, params: list[Any], **settings: Any) -> None:
        self.named_params = [param.name for param in params]
        kinds = option_kinds(str(name))
        if name in SECTIONS:
            kinds |= SETTINGS_OPTIONS
        kinds |= SHARED_OPTIONS
        more = [_option(key, kind) for key, kind in kinds.items() if key not in self.named_params]
        super().__init__(name, params=[*params, *more], **settings)

    def invoke(self, ctx: Any) -> Any:
        """Calls the function of the command with the options that it names. Needs a working folder."""
        os.getcwd()  # noqa: PTH109
        assert self.callback is not None
        return ctx.invoke(self.callback, **{name: ctx.params[name] for name in self.named_params})


def _option(name: str, kind: Any) -> TyperOption:
    """The option that Typer makes of a parameter with this annotation."""
    value, details = get_args(kind)
    info = copy(details)
    # `typer.Option` takes a default first; in `Annotated` that is the first name.
    info.param_decls = (details.default, *(details.param_decls or ()))
    info.default = False if value is bool else None
    option = _get_param(ParamMeta(name=name, default=info, annotation=value))
    assert isinstance(option, TyperOption)
    return option


class App(typer.Typer):
    """Commands of this kind. Arguments are those of `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, **TYPER, **settings)

    def command(  # type: ignore[override]
        self, name: str, *examples: str, about: str | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: makes a function a command with these examples. `about` is its help, if not in `COMMANDS`."""
        text, epilog = about or COMMANDS[name], "\n".join(examples)
        return super().command(name, cls=Command, context_settings=CONTEXT, help=text, epilog=epilog)
