"""Random invocations of the program: odd values of arguments, options, keys, environment variables, files and streams.

    odd   any command, mostly with values that are refused
    near  a command that works on a tiny model, with a few changes, so that most reach deep code

    python tests/campaigns/invocations.py [odd|near] [--cases N] [--seconds S] [--workers N] [--case N] [--write]

An invocation must end with a documented exit code other than 1, within 30 s of CPU time and 6 GiB of address space and
without a traceback; one that is refused (codes 2 and 3) must leave its folder as it was. One that runs for long is sent
SIGINT or SIGTERM, and must end then. Each is a child that is forked after torch was imported; one that fails is
repeated as a process, and counts as a failure if that fails too. Its command line is printed. Every 250th is also run
as a process, which must have the same exit code. Commands, options and keys are those of the program.
"""

import contextlib
import ctypes
import gc
import gzip
import importlib
import inspect
import json
import os
import random
import resource
import select
import shlex
import shutil
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

os.environ["OMP_STACKSIZE"] = "1M"  # a thousand threads fit into the address space; read when torch is imported

import campaign
from campaign import TESTS, Tally, command, fork, wait

sys.path.insert(0, str(TESTS / "cli"))
from programs import EVERY, SOURCE, options
from pydantic import BaseModel
from short_runs import corpus, small

from xlcli.cli.options import choices, settings_of
from xlcli.cli.settings import to_toml
from xlcli.cli.usage import variable
from xlcli.config import Config

PATH = os.environ["PATH"]
CPU_SECONDS = 30
ADDRESSES = 6 * 2**30
FILE_SIZE = 2**28
STOP_SECONDS = 15
"""Wall time after which an invocation is sent a signal; ten times that as a process, which starts slowly."""
KILL_SECONDS = 10 * CPU_SECONDS
"""Wall time after which it is killed: other processes take theirs."""
CODES = {0, 2, 3, 4, 5, 6, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGPIPE}
PROCESS_EVERY = 250
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""

LONG = "x" * 5000
NUMBERS = (
    "", "0", "1", "-1", "2", "3", "7", "0.5", "1.5", "-0.0", "1e-320", "1e-45", "1e308", "1e400", "nan", "inf", "-inf",
    "NaN", "Infinity", "2147483647", "2147483648", "2147483649", "9223372036854775807", "9223372036854775808",
    "1" * 5000, "1e18", "1e1000000", "0x10", "1_000", "\u0661\u0662", "\u00bd", "1,5", "+1", " 1 ", "1 000", "--1",
)  # fmt: skip
EXTREMES = (
    "0", "1", "3", "1000", "65536", "1048576", "2147483647", "2147483648", "1e-320", "1e-300", "1e-30", "0.999999",
    "1e30", "1e300",
)  # fmt: skip
"""Numbers that may be legal where a number is."""
UNITS = (
    "10k", "1Ki", "64MiB", "1e6M", "0.5k", "1.5s", "1h30m", "90", "0s", "-5s", "1ms", "1e308h", "9" * 400 + "d", "1y",
    "5%", "-5%", "200%", "nan%", "%", "1m", "1M", "0.0001ms", "50%%", "k", "1kk", "infs",
)  # fmt: skip
TEXTS = (
    "None", "none", "null", "auto", "true", "false", "True", "yes", "-", "--", "---", "--help", "-h", "=", "==", ",",
    "0,,1", "1,2,3", "[]", "{}", "[1, 2]", "[[[[]]]]", "{kind = 1}", '["x", 1]', "[nan]", '"', "'", "\\", "\\0", "%00",
    "%s", "{0}", "$HOME", "~", "*", "?", "[", "(", "(a|a)*$", "(?P<x>", "\\1", "a\nb", "\t", "\r", "\x01", "\x1b[31m",
    "\x7f", "\u2400", "\u202eabc", "\ufeff", "\U0001f98a", "e\u0301", "\u00df", "\udcff", "\udced\udca0\udc80", LONG,
    "[" * 100, "a.b=c", "1979-05-27",
)  # fmt: skip
PATHS = (
    "corpus.txt", "small.txt", "empty.txt", "binary.bin", "lines.jsonl", "packed.gz", "texts", "nothing", "folder",
    "no/such/file", "corpus.txt/below", "link", "dangling", "loop", "pipe", "null", "zero", "full", "urandom",
    "unreadable.txt", "models/tiny", "models/run", "models", "tiny.state", "settings.toml", ".", "./",
    "a/../corpus.txt", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/mem", "/proc/cpuinfo", "\udcff.txt",
    "\u4e16\u754c.txt", "-x.txt", LONG, "x" * 255, "models/new", "out.html", "out.png", "out.jsonl", "out.state",
    "models/tiny/config.json", "models/x y",
)  # fmt: skip
INPUTS = (
    b"The fox.\nA dog.\n", b"One fox, two dogs.\n" * 9, b"", bytes(range(256)), b"\xff\xfe\0\0", b"\n" * 99,
    b"a" * 3000, None,
)  # fmt: skip
"""Standard input; None: closed."""
MODELS = ("tiny", "lsh", "linear", "universal", "run", "models/tiny", "nothing", "folder")
VARIABLES = {
    **dict.fromkeys(("COLUMNS", "LINES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "COLORFGBG", "XLCLI_DEBUG"), NUMBERS),
    **dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "TERM", "LANG", "LC_ALL", "SHELL", "CXX"), ("", "1", "dumb", *TEXTS)),
    **dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME", "XLCLI_CACHE", "XLCLI_CONFIG"), ("", *PATHS)),
    "XLCLI_MODEL": MODELS + PATHS,
    "_XLCLI_COMPLETE": ("", "1", "complete_bash", "source_zsh", "complete_fish", "complete_nothing"),
}  # fmt: skip
RANKS = {
    **dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("1", "1", "2", *NUMBERS)),
    "TORCHELASTIC_RESTART_COUNT": NUMBERS,
    "TORCHELASTIC_RUN_ID": ("", "none", "xlcli-1"),
    "MASTER_ADDR": ("", "localhost", "127.0.0.1", "300.0.0.1"),
    "MASTER_PORT": ("1", "29511", *NUMBERS),
}  # fmt: skip
"""Variables of launchers, drawn rarely: processes wait for others."""
RARE = {"--nproc", "--interactive"}
"""Options that are slow."""
SHAPE = [f"--set=model.{value}" for value in ("dim=16", "n_layers=1", "attention.n_heads=2", "position.n_features=8")]
SMALL = ["--max-steps", "2", "--segment-len", "8", "--mem-len", "8", "--batch-size", "2", "--tokenizer", "bytes"]
NEW = ["-o", "models/new", "--preset", "tiny", *SHAPE]
KNOWN = {
    "device": ["auto", "cpu"], "text_field": ["text", "a"], "reset_on": ["^The", "fox|dog", "(?i)a"],
    "stop": [".", "\\n", "The"], "preset": ["tiny", "small", "small-rope", "reformer-tiny"], "dropout": ["0", "0.1"],
}  # fmt: skip
"""Plausible texts of options and keys whose declarations do not show them."""
WORKING = {
    "train": [
        (["corpus.txt", *NEW], SMALL), (["lines.jsonl", "texts", *NEW], SMALL), (["-", *NEW], SMALL),
        (["corpus.txt", "-o", "models/new", "--init", "tiny"], ["--max-steps", "2"]),
        (["corpus.txt", "-o", "models/run", "--resume"], ["--max-steps", "3"]),
        (["corpus.txt", "-o", "models/tiny", "--overwrite", "--preset", "tiny", *SHAPE], SMALL),
    ],
    "eval": [
        (["small.txt", "-m", "tiny"], []), (["corpus.txt"], ["--limit", "300"]), (["-", "-m", "lsh"], []),
        ([], ["--limit", "99"]),
    ],
    "generate": [
        *((["The quick", "-m", name], ["-n", "5"]) for name in MODELS[:4]),
        (["--prompts", "small.txt", "-m", "tiny"], ["-n", "3"]),
        (["--state-in", "tiny.state", "-m", "tiny"], ["-n", "4"]),
    ],
    "stream": [
        (["small.txt", "-m", "tiny"], []), (["-m", "linear"], []), (["-m", "lsh"], []), (["lines.jsonl"], []),
        (["small.txt", "-m", "tiny", "--state-in", "tiny.state"], []),
    ],
    "models": [([], [])],
    "models list": [([], [])],
    "models presets": [([], [])],
    "models show": [(["tiny"], []), (["lsh", "--plot", "out.png"], [])],
    "models copy": [(["tiny", "models/new"], []), (["lsh", "models/new", "--weights", "int8"], [])],
    "bench": [(["generate", "-m", "tiny"], ["--seconds", "0.01"])],
}  # fmt: skip
"""Command to words that work: the first ones, and those that keep it short, to which most changes are put before."""
COMMANDS = {name: command for name, command in EVERY.items() if not any(word in name for word in ("push", "pull"))}


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Dotted keys of a class of the configuration with plausible values."""
    for name, declared in kind.model_fields.items():
        types = list(parts_of(declared.annotation))
        for section in (part for part in types if isinstance(part, type) and issubclass(part, BaseModel)):
            yield from leaves(section, f"{prefix}{name}.")
        values = [str(value) for part in types if get_origin(part) is Literal for value in get_args(part)]
        for plain, examples in ((bool, "true false"), (int, "1 2 4 8 16"), (float, "0.0 0.1 0.5 1.0")):
            values += examples.split() if plain in types else []
        values += ["[1]", "[2, 4]", '["full", "lsh"]'] if tuple in map(get_origin, types) else []
        values += KNOWN.get(name, PATHS[:8]) if str in types else []
        if values:
            yield prefix + name, values


def parts_of(annotation: object) -> Iterator[object]:
    """An annotation and everything in it."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from parts_of(part)


KEYS = dict(leaves(Config))


@dataclass
class Invocation:
    """Words, environment, streams and configuration file of one run of the program."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    stdin: bytes | None = b""
    stdout: str = "file"
    settings: bytes | None = None
    stop: int = signal.SIGTERM

    def __str__(self) -> str:
        text = " ".join([*(f"{name}={_quoted(value)}" for name, value in self.variables.items()), "xlcli"])
        text = " ".join([text, *map(_quoted, self.words)])
        source = "<&-" if self.stdin is None else f"with {self.stdin[:60]!r} as input"
        settings = "" if self.settings is None else f", and {self.settings[:300]!r} in settings.toml"
        return f"{text[:3000]} {source}, output to {self.stdout}{settings}"


def _quoted(word: str) -> str:
    plain = word.isprintable() and word.isascii()
    return shlex.quote(word) if plain else f"$'{os.fsencode(word).decode('latin-1').encode('unicode_escape').decode()}'"


def invocation(case: int, *, near: bool) -> Invocation:
    """The invocation with this number."""
    return Draw(f"{case} {near}", near=near).invocation()


class Draw(random.Random):
    """Draws an invocation.

    Args:
        seed: Its seed.
        near: Change a command that works, and draw mostly plausible values.
    """

    def __init__(self, seed: str, *, near: bool) -> None:
        super().__init__(seed)
        self.near, self.odd = near, 0.15 if near else 0.7
        names = [name for name in COMMANDS if name in WORKING or not near]
        rates = [
            0.03 if name == "bench" else 1 if name.startswith("models") else 2 if "press" in name else 5
            for name in names
        ]
        [self.name] = self.choices(names, rates)
        self.command = COMMANDS[self.name]
        self.options = options(self.command)
        self.settings_of = settings_of(self.name)
        sections = (self.name.split()[0], "runtime", *(("model", "text") if self.name == "train" else ()))
        self.keys = [key for key in KEYS if key.partition(".")[0] in sections]

    def __new__(cls, seed: str, **_: object) -> "Draw":
        """`random.Random` takes the seed alone."""
        return super().__new__(cls, seed)

    def invocation(self) -> Invocation:
        """A command, its changes, environment and streams."""
        words = self.name.split()
        changes = [word for _ in range(self.choice((0, 1, 1, 1, 2, 2, 3, 5))) for word in self.option()]
        has_keys = any(option.name == "overrides" for option in self.options)
        if has_keys:
            changes += [word for _ in range(self.choice((0, 0, 1, 1, 2))) for word in self.override()]
        if self.near:
            first, last = self.choice(WORKING[self.name])
            if first and self.random() < 0.1:
                first = [self.value(PATHS), *first[1:]]
            words += [*first, *changes, *last] if self.random() < 0.8 else [*first, *last, *changes]
        else:
            words += [*changes, *(self.value(PATHS) for _ in range(self.choice((0, 1, 1, 2))))]
            if self.random() < 0.05:
                self.shuffle(words)
        settings = None
        if has_keys and self.random() < (0.15 if self.near else 0.3):
            settings = self.settings()
            words += ["--config", "settings.toml"]
        [stdout] = self.choices(("file", "pipe without reader", "full", "nothing"), (20, 1, 1, 1))
        stop = self.choice((signal.SIGTERM, signal.SIGINT))
        return Invocation(words, self.variables(), self.choice(INPUTS), stdout, settings, stop)

    def value(self, plausible: Sequence[str]) -> str:
        """A value, plausible or odd."""
        if plausible and self.random() >= self.odd:
            return self.choice(plausible)
        if plausible and plausible[0][:1].isdigit() and self.random() < 0.5:
            return self.choice(EXTREMES)
        return self.choice(self.choice((NUMBERS, UNITS, TEXTS, PATHS)))

    def plausible(self, option: Any) -> Sequence[str]:
        """Values of an option."""
        if option.is_flag:
            return ("1", "0")
        declared = inspect.signature(self.command.callback, eval_str=True).parameters[option.name].annotation
        if listed := choices(get_args(declared)[0]):
            return listed
        metavar = str(option.metavar or "")
        if "FILE" in metavar or "FOLDER" in metavar:
            return MODELS + PATHS if "NAME" in metavar else PATHS
        setting = self.settings_of.get(option.name)
        example = setting.option.example if setting and setting.option else ""
        numbers = ["1", "2", "8"] if example[:1].isdigit() else []
        return KNOWN.get(option.name, [example, *numbers] if example else ["a", "The fox", "x" * 90])

    def option(self) -> list[str]:
        """Words of an option; none if the command has no options."""
        if not self.options:
            return []
        option = self.choice(self.options)
        name = self.choice(option.opts)
        if name in RARE and self.random() < 0.9:
            return []
        if option.is_flag:
            return [name] if self.random() < 0.9 else [f"{name}={self.value(())}"]
        if option.name == "overrides":
            return self.override()
        given = self.value(("1", "2", "0", "-1") if name == "--nproc" else self.plausible(option))
        if name == "--nproc" and given.isdigit() and int(given) > 4:
            return []
        return [f"{name}={given}"] if name.startswith("--") and self.random() < 0.3 else [name, given]

    def override(self) -> list[str]:
        """Words that set a key."""
        key = self.choice(self.keys if self.near or self.random() < 0.7 else list(KEYS))
        return ["--set", f"{key}={self.value(KEYS[key])}"]

    def settings(self) -> bytes:
        """A configuration file."""
        keys = self.sample(self.keys, min(len(self.keys), self.choice((0, 1, 2, 5))))
        values = [self.value(KEYS[key]) for key in keys]
        lines = [
            f"{key} = {self.choice((value, json.dumps(value)))}\n" for key, value in zip(keys, values, strict=True)
        ]
        text = "".join(lines).encode("utf-8", "surrogateescape")
        odd = (b"\xef\xbb\xbf" + text, text * 2, b"\xff\xfe", b"\0", b"model = 3", b"a = " + b"[" * 5000)
        return self.choice(odd) if self.random() < self.odd else text

    def variables(self) -> dict[str, str]:
        """Environment variables: some that are named here, some of settings."""
        found = {}
        for _ in range(self.choice((0, 0, 0, 1, 2) if self.near else (0, 0, 1, 3))):
            if not self.settings_of or self.random() < 0.6:
                name = self.choice(list(VARIABLES))
                found[name] = self.value(VARIABLES[name])
            elif (name := self.choice(list(self.settings_of))) not in ("nproc", "compile"):
                setting = self.settings_of[name]
                found[variable(name, setting.option)] = self.value(KEYS.get(f"{setting.section}.{name}", ()))
        if self.random() < 0.01:
            found |= {name: self.choice(RANKS[name]) for name in self.sample(list(RANKS), self.choice((1, 2, 4)))}
        return found


class Place:
    """Folders in which invocations run, each in a copy of `base`, and the files that receive what they print."""

    def __init__(self, folder: Path, base: Path) -> None:
        folder.mkdir()
        self.base, self.here, self.out, self.err = base, folder / "here", folder / "out", folder / "err"

    def attempt(self, tried: Invocation, *, process: bool) -> tuple[int, str]:
        """Exit code of an invocation, and the reason for which it fails or an empty text."""
        prepare(self.base, self.here, tried.settings)
        before = listing(self.here)
        child = fork(lambda: self._work(tried, process=process))
        code = ended(child, tried.stop, (10 if process else 1) * STOP_SECONDS)
        said = self.err.read_bytes()[-20000:].decode(errors="replace")
        debug = "--debug" in tried.words or tried.variables.get("XLCLI_DEBUG", "0") not in ("", "0")
        if code == -tried.stop or code == -signal.SIGPIPE:
            code = 128 - code
        if code not in CODES:
            reason = f"ended with exit code {code}: {said[-400:]}"
        elif "Traceback (most recent" in said and not debug:
            reason = f"exit code {code} with a traceback: {said[-400:]}"
        elif code in (2, 3) and (left := listing(self.here) ^ before):
            reason = f"exit code {code}, but changed {sorted(left, key=str)[:4]}: {said[-300:]}"
        else:
            reason = ""
        return code, reason.rstrip()

    def _work(self, tried: Invocation, *, process: bool) -> int:
        os.chdir(self.here)
        os.environ.clear()
        os.environ.update(environment(self.here) | tried.variables)
        errors = os.open(self.err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 2)
        if tried.stdin is None:
            os.close(0)
            sys.stdin = None
        else:
            reader, writer = os.pipe()
            os.write(writer, tried.stdin)
            os.close(writer)
            os.dup2(reader, 0)
            os.close(reader)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
        if tried.stdout == "nothing":
            os.close(1)
            sys.stdout = None
        else:
            reader, writer = os.pipe()
            if tried.stdout != "pipe without reader":
                os.close(writer)
                writer = os.open("full" if tried.stdout == "full" else self.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(writer, 1)
            os.close(reader)
            os.close(writer)
        os.close(errors)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if process:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execve(sys.executable, [sys.executable, "-m", "xlcli", *tried.words], os.environ)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `xlcli.__main__`
        sys.argv = ["xlcli", *tried.words]
        from xlcli.cli.entry import main

        try:
            return main(tried.words)
        except SystemExit as end:  # of a completion
            return end.code or 0


def environment(folder: Path) -> dict[str, str]:
    """Environment of an invocation before its own variables."""
    private = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "XLCLI_CACHE": str(folder / "cache")}
    fixed = {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "OMP_STACKSIZE": "1M",
        "LANG": "C.UTF-8",
        "TERM": "xterm",
        "COLUMNS": "100",
    }
    return {"PATH": PATH} | private | fixed


def prepare(base: Path, here: Path, settings: bytes | None) -> None:
    """Makes a copy of `base`, with special files."""
    for folder, _, _ in os.walk(here):
        Path(folder).chmod(0o700)
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(base, here, symlinks=True)
    os.mkfifo(here / "pipe")
    for name, number in (("null", 3), ("zero", 5), ("full", 7), ("urandom", 9)):
        try:  # a link to a device could be replaced by root
            os.mknod(here / name, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except PermissionError:
            (here / name).symlink_to(f"/dev/{name}")
    if settings is not None:
        (here / "settings.toml").write_bytes(settings)


def listing(folder: Path) -> set[tuple[str, int, int]]:
    """Names, sizes and times of the files and folders that an invocation may not change if it is refused."""
    found = set()
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in ("cache", "home")]
        for path in (Path(parent, name) for name in (*folders, *files)):
            status = path.lstat()
            size_and_time = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else (0, 0)
            found.add((str(path.relative_to(folder)), *size_and_time))
    return found


def ended(child: int, number: int, seconds: int) -> int:
    """Exit code of a child, which is sent a signal after `seconds`; everything that it started is killed."""
    process, waiting = os.pidfd_open(child), select.poll()
    waiting.register(process, select.POLLIN)
    if not waiting.poll(1000 * seconds):
        os.kill(child, number)
        if not waiting.poll(1000 * KILL_SECONDS):
            os.kill(child, signal.SIGKILL)
    os.close(process)
    code = wait(child)
    while left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for orphan in map(int, left):
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    return code


def make_base(base: Path) -> None:
    """Makes a folder with texts, models, a run and files of other commands, and imports the modules that this needs."""
    for name in ("models", "texts", "folder", "home", "tmp", "a"):
        (base / name).mkdir(parents=True)
    corpus(base)
    for name, data in {
        "small.txt": b"The quick brown fox.\nA lazy dog, caf\xc3\xa9.\n", "empty.txt": b"", "unreadable.txt": b"x",
        "lines.jsonl": b'{"text": "The fox."}\n{"text": "A dog."}\n' * 40, "binary.bin": bytes(range(256)) * 2,
        "packed.gz": gzip.compress(b"The fox.\n" * 50), "texts/one.txt": b"One fox.\n" * 30, "-x.txt": b"x\n",
        "texts/two.txt": b"Two dogs.\n" * 30, "settings.toml": to_toml(small()).encode(), "folder/notes.md": b"notes",
    }.items():  # fmt: skip
        (base / name).write_bytes(data)
    (base / "unreadable.txt").chmod(0)
    for name, target in {"link": "corpus.txt", "dangling": "missing", "loop": "loop"}.items():
        (base / name).symlink_to(target)
    rope = [
        "--set=model.position.kind=rope",
        "--set=model.dim=16",
        "--set=model.n_layers=1",
        "--set=model.attention.n_heads=2",
    ]
    train = ["train", "corpus.txt", "--preset", "tiny", *SMALL, "-q", "-o"]
    for words in (
        [*train, "models/tiny", *SHAPE],
        [*train, "models/lsh", *rope, "--set=model.attention.kind=lsh", "--set=model.attention.n_buckets=4"],
        [*train, "models/linear", *rope, "--set=model.attention.kind=linear", "--tokenizer", "words"],
        [*train, "models/universal", *rope, "--set=model.stack.kind=universal", "--set=model.stack.act=true"],
        [*train, "models/run", *SHAPE, "--set=train.save_every=1", "--set=train.keep_checkpoints=3"],
        ["stream", "small.txt", "-m", "tiny", "--state-out", "tiny.state", "-q"],
    ):

        def work(words: list[str] = words) -> int:
            os.chdir(base)
            os.environ.clear()
            os.environ.update(environment(base))
            code = command(*words)()
            (base.parent / "modules").write_text("\n".join(sys.modules))
            return code

        if code := wait(fork(work, base / "log")):
            raise AssertionError(f"{words}: exit code {code}: {(base / 'log').read_text()[:500]}")
        for module in (base.parent / "modules").read_text().split():
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    (base / "log").unlink()
    shutil.rmtree(base / "cache", ignore_errors=True)


def part(*, near: bool) -> Callable[[Tally, Iterator[int], Path], None]:
    """A part of the campaign."""

    def tries(tally: Tally, cases: Iterator[int], place: Path) -> None:
        make_base(place / "base")
        gc.freeze()
        reader, writer = os.pipe()
        for worker in range(tally.workers):
            own = islice(cases, worker, None, tally.workers)
            fork(lambda own=own, at=place / f"worker-{worker}": _work(own, near, Place(at, place / "base"), writer))
        os.close(writer)
        codes: Counter[int] = Counter()
        for line in os.fdopen(reader):
            case, code, reason = json.loads(line)
            codes[code] += 1
            if reason:
                tally.failed(case, f"{reason}\n    {invocation(case, near=near)}")
            else:
                tally.survived()
        for _ in range(tally.workers):
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        print("exit codes:", ", ".join(f"{code}: {codes[code]:,}" for code in sorted(codes)))

    return tries


def _work(cases: Iterator[int], near: bool, place: Place, report: int) -> int:
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    for case in cases:
        tried = invocation(case, near=near)
        began = time.monotonic()
        code, reason = place.attempt(tried, process=False)
        if os.environ.get("TRACE"):
            print(
                f"TRACE {case} {code} {time.monotonic() - began:.2f} {reason[-1500:]!r} {str(tried)[:600]}", flush=True
            )
        if reason or case % PROCESS_EVERY == 0:
            again, reason = place.attempt(tried, process=True)
            if not reason and code in CODES and code not in (again, 128 + tried.stop):
                reason = f"exit code {code}, and {again} as a process"
        os.write(report, json.dumps([case, code, reason]).encode() + b"\n")
    return 0


PARTS = {"odd": part(near=False), "near": part(near=True)}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=500, has_workers=True))
