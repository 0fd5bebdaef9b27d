"""Usage errors: exit code 2, one sentence and a remedy that works, before torch is loaded."""

import re
from typing import get_args

import pytest
from programs import COMMANDS, EVERY, long, options, variable
from pydantic import BeforeValidator

from xlcli.cli.options import settings_of
from xlcli.cli.usage import ELSEWHERE, nearest
from xlcli.config.units import COUNT, DURATION, INTERVAL, LENGTHS, NUMBER

pytestmark = pytest.mark.usefixtures("without_torch")

MISTAKES = [
    (["train", "--mem-length", "5"], "--mem-length", "--mem-len?"),
    (["--json", "eval"], "--json", "xlcli eval --json"),
    (["evl"], "evl", "xlcli eval?"),
    (["frobnicate"], "frobnicate", "xlcli --help"),
    (["train", "--lr"], "--lr", "--lr 0.01"),
    (["train", "--resume=yes"], "--resume", "xlcli train --help"),
    (["train", "--set=train.optimizer=adam"], "train.optimizer", "'adamw'?"),
    (["train", "--mem-len", "-5"], "-5", "--mem-len 512"),
    (["train", "--mem-len", "1e12"], "1000000000000", "--mem-len 512"),
    (["train", "--lr", "inf"], "'inf'", "--lr 0.01"),
    (["train", "--valid", "0.7"], "0.7", "0.05"),
    (["train", "--tokenizer", "byte"], "'byte'", "--tokenizer bytes?"),
    (["train", "--device", "gpu"], "'gpu'", "--device cpu"),
    (["train", "--max-time", "soon"], "'soon'", "--max-time 10m"),
    (["train", "--set", "model.dmi=3"], "model.dmi", "'model.dim'?"),
    (["train", "--set", "model.dim"], "'model.dim'", "--set model.dim=256"),
    (["train", "--set", "model.dim=30", "--set=model.attention.n_heads=4"], "n_heads", "model.attention.head_dim"),
    (["eval", "--set", "model.dim=3"], "model.*", "eval.*"),
    (["train", "--config", "none.toml"], "none.toml", ""),
    (["train", "--preset", "smal", "x"], "'smal'", "small"),
    (["train"], "text", "xlcli train corpus.txt"),
    (["train", "--resume", "--overwrite", "here.txt"], "--resume", "--overwrite"),
    (["generate", "Once", "upon", "a"], "argument", "quotes"),
    (["generate", "--state-out", "s", "--num-samples", "2"], "--num-samples", "one of them"),
    (["stream", "--save-every", "5m"], "--save-every", "--state"),
    (["stream", "--reset-on", "("], "--reset-on", ""),
    (["stream", "a", "b"], "stream", "cat"),
    (["eval", "-m", "books", "--plot", "x.txt"], "x.txt", "x.png"),
    (["models", "shwo", "x"], "shwo", "xlcli models show?"),
    (["bench", "nope"], "'nope'", "xlcli bench decode"),
    (["models", "copy", "small"], "argument", "copy PRESET|MODEL FILE.toml|FOLDER"),
    (["models", "presets", "x"], "argument", "xlcli models presets"),
    (["models", "show", "x", "--color", "alwys"], "'alwys'", "--color always?"),
    (["models", "copy", "x", "y", "--weights"], "--weights", "--weights float32"),
    (["models", "--color"], "--color", "--color auto"),
    (["models", "copy", "x", "y", "--plot", "z"], "--plot", "xlcli models show."),
    (["models", "show", "x", "--polt"], "--polt", "--plot?"),
    (["eval", "--mem-len", ""], "empty", "--mem-len 512"),
    (["generate", "-xello"], "-x", "generate -- PROMPT"),
    (["generate", "--No, he said"], "--No, he said", "generate -- PROMPT"),
    (["generate", "--seed of evil"], "--seed of evil", "generate -- PROMPT"),
    (["generate", "- No, he said"], "- ", "generate -- PROMPT"),
    (["generate", "--- Chapter"], "--- Chapter", "generate -- PROMPT"),
    (["eval", "--my text.txt"], "--my text.txt", "eval -- FILE"),
    (["--model", "books"], "--model", "xlcli eval FILE"),
    (["score", "here.txt"], "'score'", "Did you mean xlcli eval FILE?"),
    (["perplexity"], "'perplexity'", "Did you mean xlcli eval FILE?"),
    (["finetune"], "'finetune'", "Did you mean xlcli train FILE --init NAME?"),
    (["models", "run"], "'run'", "xlcli models --help"),
    (["train", "--model", "books"], "--model", "--init?"),
    (["export", "--model", "books"], "--model", "Type xlcli export MODEL."),
    (["eval", "--ctx", "512"], "--ctx", "--mem-len?"),
    (["generate", "--context", "512"], "--context", "--mem-len?"),
    (["stream", "--context", "20"], "--context", "--mem-len? --context is an option of xlcli eval."),
    (["generate", "--each-line"], "--each-line", "--each-line is an option of xlcli eval, xlcli stream."),
    (["stream", "--limit", "5"], "--limit", "--limit is an option of xlcli eval."),
    (["stream", "-c", "512"], "-c", "--mem-len?"),
    (["train", "--output", "m"], "--output", "--out?"),
    (["eval", "--output", "x.tsv"], "--output", "--words FILE.tsv?"),
    (["generate", "--output", "x.txt"], "--output", "Did you mean > FILE?"),
    (["generate", "-p", "Once"], "-p", "Type xlcli generate PROMPT"),
    (["eval", "--file", "here.txt"], "--file", "Type xlcli eval FILE"),
    (["generate", "--max_length", "9"], "--max_length", "--max-new-tokens?"),
    (["train", "here.txt", "--valid", "a", "--valid", "b"], "--valid is given twice, as 'a' and as 'b'", "once"),
    (["train", "-o", "a", "--out=b"], "--out is given twice", "once"),
    (["eval", "--mem-len", "5", "--words", "w.tsv", "--mem-len=6"], "--mem-len", "once"),
    (["eval", "--sweep-mem-len", "0", "--sweep-mem-len", "8"], "--sweep-mem-len", "once"),
    (["stream", "--emit", "words", "--emit", "tokens"], "--emit", "once"),
    (["models", "show", "x", "--plot", "a.png", "--plot", "b.png"], "--plot", "once"),
    (["eval", "--set", "eval.mem_len=5", "--set", "eval.mem_len=6"], "eval.mem_len twice", "once"),
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


@pytest.mark.parametrize("name", EVERY)
def test_every_option_of_one_value_refuses_another_one(name, run):
    for option in options(EVERY[name]):
        if option.multiple or option.is_flag:
            continue
        done = run(*name.split(), long(option), "a", min(option.opts, key=len), "b")
        assert (done.code, done.out) == (2, b"")
        assert f"{long(option)} is given twice, as 'a' and as 'b'" in done.err


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (
            ["--mem-len", "5", "--mem-len=5", "--set", "eval.limit=9", "--set", "eval.limit = 9"],
            "limit = 9",
            "mem_len = 5",
        ),
        (["--mem-len", "5", "--set", "eval.mem_len=6"], "mem_len = 5", ""),  # an option wins over a setting
        (["--set", "eval.mem_len=5", "--set", "eval.limit=9", "-q", "-q"], "limit = 9", "mem_len = 5"),
    ],
)
def test_the_same_value_twice_and_different_keys_are_no_mistake(arguments, key, value, run):
    done = run("eval", "--print-config", *arguments)
    assert done.code == 0, done.err
    assert key in done.out.decode()
    assert value in done.out.decode()


def test_what_is_said_of_words_of_other_tools_exists():
    known = {name for command in EVERY.values() for option in options(command) for name in option.opts}
    for meant in ELSEWHERE.keys() - {"> FILE"}:
        first, *others = meant.split()
        assert first in known or first in COMMANDS, meant
        assert {word for word in others if word.startswith("-")} <= known, meant


NUMBERS = (COUNT, NUMBER, DURATION, INTERVAL, LENGTHS)


def unit(setting):
    """The validator that reads the text of a setting; None for choices and names."""
    field = setting.field
    parts = (*field.metadata, *(part for each in get_args(field.annotation) for part in get_args(each)))
    return next((part for part in parts if isinstance(part, BeforeValidator)), None)


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
    counts = unit(settings_of(command)[option.name]) is COUNT
    absurd = [
        "-1",
        "nan",
        "-inf",
        "many",
        "1e999",
        *(["1e12"] if counts and option.name != "seed" else []),
    ]
    task = ["eval"] if command == "bench" else []  # the other tasks refuse some of the options
    for value in absurd:
        done = run(command, *task, "--print-config", name, value)
        assert (done.code, done.out) == (2, b""), value
        assert name in done.err.split("\n")[0]
        assert re.search(rf"{name} \S+\.$", done.err.rstrip("\n")), done.err
    example = done.err.rpartition(f"{name} ")[2].strip().rstrip(".")
    assert run(command, *task, "--print-config", name, example).code == 0


@pytest.mark.parametrize(
    ("command", "option"), [pair for pair in NUMERIC if pair[1].name in ("mem_len", "lr", "max_time")]
)
def test_the_environment_is_checked_as_strictly(command, option, run, monkeypatch):
    monkeypatch.setenv(variable(option), "-3")
    done = run(command, "--print-config")
    assert done.code == 2
    assert re.search(rf"{variable(option)}\b.*-3\b", done.err)
    assert f"{variable(option)}=" in done.err


def test_an_override_wins_over_the_environment_and_is_named(run, monkeypatch):
    monkeypatch.setenv("XLCLI_MEM_LEN", "5")
    done = run("train", "--print-config", "--set", "train.mem_len=-1")
    assert "train.mem_len" in done.err
    assert "XLCLI_MEM_LEN" not in done.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--mem-length", "--mem-len"), ("--steps", "--max-steps"), ("--temp", "--temperature"), ("--threshold", None)],
)
def test_only_a_close_name_is_suggested(typed, meant):
    names = ["--threads", "--temperature", "--max-steps", "--mem-len", "--seed", "-t"]
    assert nearest(typed, names) == meant


def test_each_printed_setting_has_its_choices(run):
    lines = run("train", "--print-config").out.decode().splitlines()
    for setting, choice in [('optimizer = "muon"', "adamw"), ('kind = "full"', "lsh")]:
        assert choice in lines[lines.index(setting) - 1]


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
