import json
import math
import re
import shutil
from pathlib import Path

import pytest
from programs import Terminal, command, standard_input


def test_the_prompt_and_its_continuation_exactly(run, model):
    done = run("generate", "Once \x1b[31m", "-n", "12", "--seed", "3")
    assert done.code == 0, done.err
    assert done.out.startswith(b"Once \x1b[31m")
    assert len(done.out) > len(b"Once \x1b[31m")
    assert run("generate", "Once \x1b[31m", "-n", "12", "--seed", "3").out == done.out
    alone = run("generate", "Once \x1b[31m", "-n", "12", "--seed", "3", "--no-prompt").out
    assert b"Once \x1b[31m" + alone == done.out


@pytest.mark.parametrize("command", [("generate", "a", "-n", "1"), ("eval",), ("stream", "valid.txt")])
def test_a_model_that_was_not_named_is_reported(run, model, command, monkeypatch):
    shutil.copy(model / "valid.txt", "valid.txt")
    assert "NAME" in run(*command).err
    for named in ((*command, "-m", "tiny"), (*command, "-q")):
        assert "NAME" not in run(*named).err
    monkeypatch.setenv("XLCLI_MODEL", "tiny")
    assert "XLCLI_MODEL" in run(*command).err


def test_json(run, model):
    one = json.loads(run("generate", "Once", "-n", "5", "--json").out)
    assert set(one) == {
        "prompt", "text", "tokens", "seed", "stop_reason", "tokens_per_second",
    }  # fmt: skip
    assert (one["prompt"], one["tokens"], one["stop_reason"]) == ("Once", 5, "length")
    again = json.loads(run("generate", "Once", "-n", "5", "--json", "--seed", str(one["seed"])).out)
    assert again["text"] == one["text"]


def test_several_samples(run, model):
    done = run("generate", "Once", "-n", "5", "--num-samples", "3", "--seed", "1")
    assert done.out.count(b"\n---\nOnce") == 2
    many = json.loads(run("generate", "Once", "-n", "5", "--num-samples", "3", "--json").out)
    assert len(many["samples"]) == 3


def test_the_seed_is_random_unless_given(run, model, monkeypatch):
    seeds = {json.loads(run("generate", "a", "-n", "1", "--json").out)["seed"] for _ in range(4)}
    assert len(seeds) > 1
    monkeypatch.setenv("XLCLI_SEED", "9")
    assert json.loads(run("generate", "a", "-n", "1", "--json").out)["seed"] == 9


def test_a_prompt_from_standard_input_and_none(run, model):
    with standard_input(b"piped\xff"):
        done = run("generate", "-", "-n", "3")
    assert done.out.startswith(b"piped\xff")
    assert run("generate", "-n", "3").code == 0


def test_a_memory_can_be_saved_and_continued(run, model, tmp_path):
    path, rounded = tmp_path / "s", "--set=generate.memory_dtype=int8"
    options = ("generate", "-t", "0", "--no-prompt", "-v", "--set=generate.weight_dtype=bfloat16")
    whole = run(*options, "Once", "-n", "8", rounded).out
    first = run(*options, "Once", "-n", "4", rounded, "--state-out", path)
    rest = run(*options, "-n", "4", "--state-in", path)
    assert first.out + rest.out == whole
    assert "int8" in first.err
    assert re.search(rf"{path}\b.*\b8\b.*\bint8\b", rest.err)


def test_a_terminal_is_never_driven_by_the_text(model):
    terminal = Terminal(command("generate", "\x1b]0;owned\x07[/x]", "-n", "60", "-t", "3", "--seed", "5"))
    assert terminal.finish() == 0
    assert terminal.screen.title == ""
    assert r"\x1b]0;owned\x07[/x]" in terminal.text
    assert b"\x1b]" not in terminal.received
    assert terminal.screen.cursor.x == 0


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("path", ["nowhere/s", "absent"])
def test_state_files_are_looked_at_first(run, model, path):
    flag = "--state-out" if "/" in path else "--state-in"
    assert run("generate", "a", flag, path).code in (2, 3)


def test_log_probabilities_are_those_of_eval(run, model):
    arguments = ("generate", "Once", "-n", "40", "--seed", "4", "-t", "1.7", "--top-k", "200")
    for n_best in (0, 3):
        done = json.loads(run(*arguments, "--repetition-penalty", "1.3", "--logprobs", str(n_best), "--json").out)
        assert bytes(token["token"] for token in done["logprobs"]).decode("utf-8", "replace") == done["text"]
        assert len(done["logprobs"]) == done["tokens"]
    Path("text").write_bytes(run(*arguments, "--repetition-penalty", "1.3").out)
    assert run("eval", "text", "--per-token", "scores.jsonl").code == 0
    bits = [json.loads(line)["bits"] for line in Path("scores.jsonl").read_text().splitlines()][len("Once") :]
    assert [-token["logprob"] / math.log(2) for token in done["logprobs"]] == pytest.approx(bits, rel=1e-4)
    for token in done["logprobs"]:
        values = [other["logprob"] for other in token["best"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert values[0] >= token["logprob"]
        same = [other for other in token["best"] if other["token"] == token["token"]]
        assert all(other["logprob"] == token["logprob"] for other in same)


@pytest.mark.usefixtures("without_torch")
def test_log_probabilities_need_json(run, model):
    done = run("generate", "a", "--logprobs", "2")
    assert (done.code, "--json" in done.err) == (2, True)


def test_the_name_of_a_file_as_prompt_is_told(run, model, tmp_path):
    (tmp_path / "short story.txt").write_text("once\n")
    done = run("generate", tmp_path / "short story.txt", "-m", model, "-n", "1")
    assert (done.code, f"xlcli generate - < '{tmp_path / 'short story.txt'}'" in done.err) == (0, True)
    assert " - < " not in run("generate", "no such file.txt", "-m", model, "-n", "1").err
    assert " - < " not in run("generate", "a" * 5000, "-m", model, "-n", "1").err
