"""Usage errors: exit code 2, one sentence and a remedy that works, before torch is loaded."""

import re
from typing import get_args

import pytest
from programs import COMMANDS, EVERY, long, options, variable

from xlcli.cli.options import settings_of
from xlcli.config import units
from xlcli.config.base import Unit

pytestmark = pytest.mark.usefixtures("without_torch")

MISTAKES = [
    (["train", "--mem-length", "5"], "no option --mem-length", "Did you mean --mem-len?"),
    (["--json", "eval"], "no option --json", "xlcli eval --json"),
    (["evl"], "no 'xlcli evl'", "Did you mean xlcli eval?"),
    (["frobnicate"], "no 'xlcli frobnicate'", "See xlcli --help."),
    (["train", "--lr"], "--lr needs a value", "Try --lr 0.01."),
    (["train", "--resume=yes"], "--resume takes no value", "See xlcli train --help."),
    (["train", "--set=train.optimizer=adam"], "train.optimizer is 'adam'", "Did you mean 'adamw'?"),
    (["train", "--mem-len", "-5"], "--mem-len is -5: ", "Try --mem-len 512."),
    (["train", "--mem-len", "1e12"], "--mem-len is 1000000000000: ", "Try --mem-len 512."),
    (["train", "--lr", "inf"], "--lr is 'inf': not a finite number", "Try --lr 0.01."),
    (["train", "--valid", "0.7"], "--valid 0.7", "0.05"),
    (["train", "--tokenizer", "byte"], "--tokenizer 'byte' is not one of", "Did you mean --tokenizer bytes?"),
    (["train", "--device", "gpu"], "--device is 'gpu': not a device", "Try --device cpu."),
    (["train", "--max-time", "soon"], "--max-time is 'soon': not a duration", "Try --max-time 10m."),
    (["train", "--set", "model.dmi=3"], "model.dmi is an unknown key", "Did you mean 'model.dim'?"),
    (["train", "--set", "model.dim"], "'model.dim' is not of the form a.b=c", "--set model.dim=256"),
    (["train", "--set", "model.dim=30", "--set", "model.attention.n_heads=4"], "not divisible", "Change one of them"),
    (["eval", "--set", "model.dim=3"], "does not use model.*", "eval.*"),
    (["train", "--config", "none.toml"], "none.toml", "Check the path."),
    (["train", "--preset", "smal", "x"], "no preset 'smal'", "small"),
    (["train"], "needs a text", "Type xlcli train corpus.txt."),
    (["train", "--resume", "--overwrite", "here.txt"], "exclude each other", "Give one"),
    (["generate", "Once", "upon", "a"], "the prompt is one argument", "quotes"),
    (["generate", "--state-out", "s", "--num-samples", "2"], "--num-samples asks for several", "Drop one"),
    (["stream", "--save-every", "5m"], "needs a file to save in", "--state-out"),
    (["stream", "--reset-on", "("], "not a regular expression", ""),
    (["stream", "a", "b"], "reads one file", "cat"),
    (["eval", "-m", "books", "--plot", "x.txt"], "not a picture file", "Try --plot loss.png."),
    (["models", "shwo", "x"], "no 'xlcli models shwo'", "Did you mean xlcli models show?"),
    (["bench", "nope"], "xlcli: 'nope' is not one of 'decode'", "Try xlcli bench decode."),
    (["models", "copy", "small"], "takes 2 words", "copy PRESET|MODEL FILE.toml|FOLDER."),
    (["models", "presets", "x"], "takes no words", "Type xlcli models presets."),
    (["models", "show", "x", "--color", "alwys"], "--color 'alwys' is not one of", "Did you mean --color always?"),
    (["models", "copy", "x", "y", "--weights"], "--weights needs a value", "Try --weights float32."),
    (["models", "--color"], "--color needs a value", "Try --color auto."),
    (["models", "copy", "x", "y", "--force"], "--force applies to xlcli models show only", "Leave it out."),
    (["models", "show", "x", "--polt"], "no option --polt", "Did you mean --plot?"),
    (["eval", "--mem-len", ""], "empty value", "Try --mem-len 512."),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("text\n")


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_explained(arguments, message, remedy, run):
    done = run(*arguments)
    assert done.code == 2
    assert done.out == b""
    assert done.err.startswith("xlcli: ")
    assert message in done.err
    assert remedy in done.err
    assert "Traceback" not in done.err


NUMBERS = (units.count, units.number, units.duration, units.interval, units.lengths)


def unit(setting):
    """The function that reads the text of a setting; None for choices, switches and names."""
    field = setting.field
    parts = (*field.metadata, *(part for each in get_args(field.annotation) for part in get_args(each)))
    return next((part.read for part in parts if isinstance(part, Unit)), None)


NUMERIC = [
    (name, option)
    for name, command in EVERY.items()
    for option in options(command)
    if option.name in settings_of(name) and unit(settings_of(name)[option.name]) in NUMBERS
]


def test_every_number_and_switch_is_read_from_text():
    """Also those without an option, which a variable of the environment can set."""
    assert len(NUMERIC) > 35
    for name in COMMANDS:
        for key, setting in settings_of(name).items():
            kinds = {setting.field.annotation, *get_args(setting.field.annotation)}
            kinds |= {part for kind in kinds for part in get_args(kind) if isinstance(part, type)}
            assert unit(setting) or not {int, float, bool} & kinds, key


@pytest.mark.parametrize(("command", "option"), NUMERIC, ids=lambda value: getattr(value, "name", value))
def test_absurd_numbers_are_refused_and_the_remedy_works(command, option, run):
    name = long(option)
    counts = unit(settings_of(command)[option.name]) is units.count
    absurd = [
        "-1",
        "nan",
        "-inf",
        "many",
        "1e999",
        *(["1e12"] if counts and option.name != "seed" else []),
    ]
    task = ["eval"] if command == "bench" else []  # the other tasks refuse some of the options
    task += ["here.txt"] if command in ("compress", "decompress") else []
    for value in absurd:
        done = run(command, *task, "--print-config", name, value)
        assert (done.code, done.out) == (2, b""), value
        assert name in done.err.split("\n")[0]
        assert re.search(rf"Try {name} \S+\.", done.err), done.err
    example = done.err.rpartition(f"{name} ")[2].strip().rstrip(".")
    assert run(command, *task, "--print-config", name, example).code == 0


@pytest.mark.parametrize(
    ("command", "option"), [pair for pair in NUMERIC if pair[1].name in ("mem_len", "lr", "max_time")]
)
def test_the_environment_is_checked_as_strictly(command, option, run, monkeypatch):
    monkeypatch.setenv(variable(option), "-3")
    done = run(command, *(["here.txt"] if command == "compress" else []), "--print-config")
    assert done.code == 2
    assert re.search(rf"{variable(option)} is '?-3(\.0)?'?: ", done.err)
    assert f"Try {variable(option)}=" in done.err


def test_an_override_wins_over_the_environment_and_is_named(run, monkeypatch):
    monkeypatch.setenv("XLCLI_MEM_LEN", "5")
    done = run("train", "--print-config", "--set", "train.mem_len=-1")
    assert "train.mem_len is -1: " in done.err
    assert "XLCLI_MEM_LEN" not in done.err


def test_a_switch_in_the_environment(run, monkeypatch):
    monkeypatch.setenv("XLCLI_JSON", "1")
    assert run("train", "--print-config").out.startswith(b"{")
    monkeypatch.setenv("XLCLI_JSON", "0")
    assert run("train", "--print-config").out.startswith(b"#")
    monkeypatch.setenv("XLCLI_JSON", "perhaps")
    done = run("train", "--print-config")
    assert (done.code, "XLCLI_JSON=1" in done.err) == (2, True)


def test_escapes_in_an_argument_are_shown_not_sent(run):
    done = run("train", "--mem-len", "\x1b[2J\n")
    assert "\x1b" not in done.err
    assert r"\x1b[2J\n" in done.err
