"""Sources of settings and their precedence."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from xlcli import presets
from xlcli.config import Config


def printed(run, *arguments):
    done = run("train", "--print-config", "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_precedence(run, monkeypatch):
    assert printed(run, "--preset", "tiny")["train"]["grad_clip"] == Config().train.grad_clip
    preset = presets.read_preset("small")["train"]["mem_len"]
    assert printed(run, "--preset", "small")["train"]["mem_len"] == preset
    Path("o.toml").write_text("[train]\nmem_len = 11\nmax_time = '1h30m'\n")
    typed = ["--preset", "small", "--config", "o.toml"]
    assert printed(run, *typed)["train"]["mem_len"] == 11
    assert printed(run, *typed)["train"]["max_time"] == 5400
    monkeypatch.setenv("XLCLI_MEM_LEN", "12")
    assert printed(run, *typed)["train"]["mem_len"] == 12
    typed += ["--set", "train.mem_len=13"]
    assert printed(run, *typed)["train"]["mem_len"] == 13
    typed += ["--mem-len", "14"]
    assert printed(run, *typed)["train"]["mem_len"] == 14


def test_the_config_file_may_come_from_the_environment(run, monkeypatch):
    Path("o.toml").write_text("[train]\nmem_len = 11\n")
    monkeypatch.setenv("XLCLI_CONFIG", "o.toml")
    assert printed(run)["train"]["mem_len"] == 11


def test_units_and_several_overrides(run):
    made = printed(
        run, "--set=model.dropout=0.1", "--max-tokens=1e6", "--set=train.eval_every=100", "--set=train.save_every=5m",
        "--valid=5%", "--set=train.max_time=90s", "--set=model.dim=64", "--set=model.position.kind=none",
    )  # fmt: skip
    assert set(made["model"]["dropout"].values()) == {0.1}
    assert made["train"]["max_tokens"] == 1_000_000
    assert made["train"]["eval_every"] == 100
    assert made["train"]["save_every"] == 300.0
    assert made["train"]["max_time"] == 90.0
    assert made["text"]["valid"] == pytest.approx(0.05)
    assert made["model"]["dim"] == 64
    assert made["model"]["position"] == {"kind": "none"}


@pytest.mark.parametrize("preset", [preset.name for preset in presets.list_presets()])
def test_the_printed_configuration_can_be_read_back(preset, run):
    first = run("train", "--print-config", "--preset", preset, "--set=train.save_every=30s", "--set", "runtime.seed=7")
    Path("again.toml").write_bytes(first.out)
    assert tomllib.loads(first.out.decode())["runtime"]["seed"] == 7
    again = run("train", "--print-config", "--preset", preset, "--config", "again.toml")
    assert tomllib.loads(again.out.decode()) == tomllib.loads(first.out.decode())


def test_a_command_prints_its_own_sections(run):
    assert list(tomllib.loads(run("eval", "--print-config").out.decode())) == ["eval", "runtime"]
    assert list(tomllib.loads(run("generate", "--print-config").out.decode())) == ["generate", "runtime"]


def test_a_shared_file_may_hold_sections_of_other_commands(run):
    Path("o.toml").write_text("[train]\nmem_len = 11\n[eval]\nmem_len = 5\n")
    assert tomllib.loads(run("eval", "--print-config", "--config", "o.toml").out.decode())["eval"]["mem_len"] == 5


def test_faults_in_a_file_are_located(run):
    Path("o.toml").write_text("[train]\nmem_len = 'much'\n")
    done = run("train", "--print-config", "--config", "o.toml")
    assert done.code == 2
    assert re.search(r"o\.toml: train\.mem_len\b.*'much'", done.err)
    Path("o.toml").write_text("[train\n")
    done = run("train", "--print-config", "--config", "o.toml")
    assert done.code == 2
    assert "TOML" in done.err
    Path("o.toml").write_text("[trian]\nmem_len = 3\n")
    done = run("train", "--print-config", "--config", "o.toml")
    assert "trian" in done.err
    assert "'train'" in done.err


@pytest.mark.parametrize(("name", "value"), [("N_STEPS", "1048576"), ("ADAPT_BLOCK", "1e-300"), ("DTYPE", "int3")])
def test_a_variable_of_a_setting_without_an_option_is_named(name, value, run, monkeypatch):
    monkeypatch.setenv(f"XLCLI_{name}", value)
    done = run("eval", "--print-config")
    assert (done.code, f"XLCLI_{name}" in done.err) == (2, True), done.err


def test_overrides_are_not_read_from_the_environment(run, monkeypatch):
    without = printed(run)
    monkeypatch.setenv("XLCLI_SET", "train.mem_len=11")
    assert printed(run) == without


def test_a_resumed_run_starts_from_the_saved_configuration(run):
    """A setting that is illegal with every preset may be legal with the saved model."""
    Path("text").write_text("a line\n" * 99)
    seven = ["--preset", "tiny", "--set", "model.attention.n_heads=7", "--set", "model.dim=70", "--max-steps", "1"]
    assert run("train", "text", "-o", "m", *seven, "-q").code == 0
    again = run("train", "text", "-o", "m", "--resume", "--set", "model.attention.n_heads=7", "--max-steps", "2", "-q")
    assert again.code == 0, again.err
    refused = run("train", "text", "-o", "m", "--resume", "--batch-size", "3")
    assert refused.code == 2
    assert "--batch-size" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", "x=" + "[" * 3000),
        ("--set", "x=" + "[" * 30 + "]" * 30),
        ("--set", "x" + ".a" * 3000 + "=1"),
        ("--set", "stream.mem_len=" + "9" * 5000),
        ("--set", "stream.mem_len=0x" + "f" * 5000),
        ("--mem-len", "9" * 5000),
        ("--config", "/dev/zero"),
        ("--config", "deep.toml"),
        ("--config", "long.toml"),
        ("--reset-on", "(" * 900),
        ("--reset-on", "a" * 2000),
        ("--reset-on", "\udcff"),
        ("--set", "stream.reset_on=\udcff"),
    ],
    ids=lambda arguments: "".join(arguments)[:30],
)
def test_extreme_values_are_refused_in_a_sentence(arguments, run, without_torch):
    Path("deep.toml").write_text("x = " + "[" * 5000)
    Path("long.toml").write_text("x = " + "9" * 5000)
    done = run("stream", *arguments, "text")
    assert done.code == 2, done.err
    assert len(done.err) < 6000


def test_a_stop_text_that_is_not_utf8(run, without_torch):
    done = run("generate", "--stop", "\udcff")
    assert (done.code, r"--stop '\xff'" in done.err) == (2, True)


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--init", "books"], ["--config", "file.toml"]])
def test_a_section_that_is_no_table_is_refused(flags, run, without_torch):
    Path("file.toml").write_text("runtime = 3\n")
    for section in ("text", "train", "runtime", "model"):
        done = run("train", "corpus.txt", *flags, "--set", f"{section}=3")
        assert done.code == 2
        assert re.search(r"'\w+'\D+3\b", done.err)


@pytest.mark.parametrize("key", ["train.betas=[0.9]", "train.betas=[]", "text.valid=[1]"])
def test_a_list_of_another_length_is_refused(key, run):
    done = run("train", "--print-config", f"--set={key}")
    assert (done.code, key.partition("=")[0] in done.err) == (2, True), done.err


def test_units_in_tables_of_several_kinds(run):
    made = printed(run, "--set=model.position.clamp_len=1k", "--set=model.attention.n_heads=0.004k")
    assert (made["model"]["position"]["clamp_len"], made["model"]["attention"]["n_heads"]) == (1000, 4)


def test_a_variable_is_of_the_setting_with_the_option(run, monkeypatch):
    monkeypatch.setenv("XLCLI_MEM_LEN", "0,64")
    made = json.loads(run("bench", "--preset", "tiny", "--print-config", "--json").out)
    assert (made["bench"]["mem_lens"], made["bench"]["mem_len"]) == ([0, 64], None)
