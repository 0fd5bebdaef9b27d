"""What a command is: a table of flags, from which help, parsing, environment variables and configuration keys follow.

A flag reads its text with a reader of `xlcli.cli.units`; ranges and legality are the configuration's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xlcli.cli import units
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError

_EXAMPLES: dict[Callable[[str], Any], str] = {
    units.count: "512",
    units.number: "0.1",
    units.duration: "10m",
    units.cadence: "5m",
    units.share: "0.05",
    units.lengths: "0,128,512",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option.

    Attributes:
        names: as typed, separated by `/`, the long one last: `-m/--model`.
        value: what follows it, as help shows it: `TOKENS`; `a|b` is a choice; empty for a switch.
        about: half a line of help.
        read: from the text typed to a value; `ValueError` says why not.
        keys: configuration keys it sets.
        many: whether it may be repeated.
        example: a value that works, for error messages.
    """

    names: str
    value: str
    about: str
    read: Callable[[str], Any] = units.text
    keys: tuple[str, ...] = ()
    many: bool = False
    example: str = ""

    @property
    def long(self) -> str:
        """The name with two dashes."""
        return self.names.rpartition("/")[2]

    @property
    def name(self) -> str:
        """The long name without its dashes: the key in `Values`."""
        return self.long[2:]

    @property
    def variable(self) -> str:
        """The environment variable that stands in for it."""
        return "XLCLI_" + self.name.replace("-", "_").upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal values of a choice, else nothing."""
        return (
            tuple(self.value.split("|"))
            if "|" in self.value and self.value.islower() and self.read is units.text
            else ()
        )

    def parse(self, raw: str, source: str) -> Any:
        """The value of `raw`, which was given as `source` (the flag or its variable); `ConfigError` otherwise."""
        if self.choices and raw not in self.choices:
            near = nearest(raw.lower(), self.choices)
            raise ConfigError(
                f"{source} '{one_line(raw)}' is not one of {', '.join(self.choices)}.",
                f"Did you mean {self.typed(source, near)}?" if near else f"Try {self.typed(source, self.choices[0])}.",
            )
        try:
            return self.read(raw)
        except ValueError as error:
            raise ConfigError(f"{source} '{one_line(raw)}' is {error}.", self.remedy(source)) from None

    def typed(self, source: str, value: str) -> str:
        """How to type it with this value, in the way it was given."""
        return f"{source}={value}" if source == self.variable else f"{self.long} {value}"

    def remedy(self, source: str) -> str:
        """A sentence with a value that works."""
        example = self.example or _EXAMPLES.get(self.read, "")
        return f"Try {self.typed(source, example)}." if example else ""


@dataclass(frozen=True, slots=True)
class Given:
    """A value somebody gave, as typed and as read, and by which name (`--mem-len` or `XLCLI_MEM_LEN`)."""

    value: Any
    raw: str
    source: str


@dataclass(frozen=True)
class Values:
    """What was typed: words, flags, and the environment below them."""

    command: Command
    words: tuple[str, ...] = ()
    flags: Mapping[str, Given] = field(default_factory=dict)
    environment: Mapping[str, Given] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Value of the option `name`: typed, else from the environment, else None."""
        given = self.given(name)
        return given.value if given else None

    def given(self, name: str) -> Given | None:
        """As `get`, with its origin."""
        return self.flags.get(name) or self.environment.get(name)

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return bool(self.get(name))


@dataclass(frozen=True)
class Command:
    """A command of the program.

    Attributes:
        about: what it does, in one sentence.
        examples: two lines to type.
        words: positional arguments as help shows them; empty for none.
        groups: flags under their headings.
        sections: tables of the configuration that it obeys.
        run: does the work and returns the exit code.
    """

    name: str
    about: str
    examples: tuple[str, str]
    words: str
    groups: Mapping[str, tuple[Flag, ...]]
    sections: tuple[str, ...]
    run: Callable[[Values], int]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All its flags."""
        return tuple(flag for group in self.groups.values() for flag in group)


def collect(command: Command, words: tuple[str, ...], typed: Mapping[str, Any], env: Mapping[str, str]) -> Values:
    """Reads what was typed (by option name, texts or lists of texts or True) and the environment."""
    flags: dict[str, Given] = {}
    environment: dict[str, Given] = {}
    for flag in command.flags:
        raw = typed.get(flag.name)
        if raw:
            flags[flag.name] = _given(flag, raw, flag.long)
        elif raw == "":
            raise ConfigError(f"{flag.long} was given an empty value.", flag.remedy(flag.long))
        elif env.get(flag.variable) and flag is not SET:
            environment[flag.name] = _given(flag, env[flag.variable], flag.variable)
    return Values(command, words, flags, environment)


def _given(flag: Flag, raw: Any, source: str) -> Given:
    if raw is True:
        return Given(True, "", source)
    if not flag.value:
        try:
            return Given(units.switch(raw), raw, source)
        except ValueError as error:
            raise ConfigError(f"{source} is '{one_line(raw)}', {error}.", f"Type {source}=1, or unset it.") from None
    if flag.many:
        texts = [raw] if isinstance(raw, str) else raw
        return Given([flag.parse(text, source) for text in texts], " ".join(texts), source)
    return Given(flag.parse(raw, source), raw, source)


CONFIG = Flag("--config", "FILE.toml", "read options from a file", example="options.toml")
SET = Flag("--set", "a.b=c", "set one key of the configuration; may be repeated", many=True, example="model.dim=256")
TALK = (
    Flag("--json", "", "print JSON on stdout"),
    Flag("-q/--quiet", "", "print results, warnings and errors only"),
    Flag("-v/--verbose", "", "explain more on stderr"),
    Flag("--no-progress", "", "show no progress"),
    Flag("--color", "auto|always|never", "use color (auto: on a terminal, unless NO_COLOR is set)"),
    Flag("--debug", "", "show a traceback when something fails"),
)
SETTINGS = (
    CONFIG,
    SET,
    Flag("--print-config", "", "print the configuration that results (TOML, or JSON with --json) and stop"),
    Flag("--dry-run", "", "print the plan, model size and memory need, and stop"),
)
DEVICE = (
    Flag("--device", "auto|cpu|cuda[:N]", "where to compute", units.device, ("runtime.device",), example="cpu"),
    Flag("--dtype", "auto|float32|bfloat16|float16", "type of numbers", keys=("runtime.dtype",)),
    Flag("--threads", "N", "CPU threads to use", units.count, ("runtime.threads",), example="2"),
)
SEED = Flag("--seed", "N", "seed of all random choices", units.count, ("runtime.seed",), example="1")
MODEL = Flag("-m/--model", "NAME|FOLDER", "model (else the newest in ./models, else the bundled one)")


def reading(section: str) -> tuple[Flag, ...]:
    """Flags of how a trained model reads, for one section of the configuration."""
    return (
        mem_len(section),
        Flag(
            "--n-steps",
            "N",
            "how often a universal model applies its blocks (as trained)",
            units.count,
            (f"{section}.n_steps",),
            example="8",
        ),
        Flag(
            "--n-hashes",
            "N",
            "rounds of hashed attention, 1 to 8 (as trained)",
            units.count,
            (f"{section}.n_hashes",),
            example="8",
        ),
    )


def mem_len(section: str) -> Flag:
    """`--mem-len` for one section of the configuration."""
    about = "tokens of memory each layer sees; 0 turns recurrence off"
    return Flag("--mem-len", "TOKENS", about, units.count, (f"{section}.mem_len",))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like this one."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
