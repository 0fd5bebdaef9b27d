"""Several inputs of `stream` and several prompts of `generate`."""

import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess

import pytest
from programs import TEXT, command, environment, standard_input

from xlcli.cli.inputs import InputFiles
from xlcli.cli.prompts import NamedPrompt, read_prompts, show_results
from xlcli.cli.render import Screen
from xlcli.events import Generated


@pytest.fixture
def folder(tmp_path):
    """A folder with two texts, the second without a last line end."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_bytes(TEXT * 3)
    (folder / "b.txt").write_bytes(TEXT[3:] + b"no end")
    (folder / ".hidden").write_bytes(b"\0")
    return folder


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_each_line_names_its_input_and_has_the_score_of_its_text_alone(run, model, folder):
    rows = objects(run("stream", "--inputs", folder, "--json").out)
    for name in ("a", "b.txt"):
        alone = objects(run("stream", folder / name, "--json").out)
        own = [{key: value for key, value in row.items() if key != "input"} for row in rows if row["input"] == name]
        assert [row["byte"] for row in own] == [row["byte"] for row in alone]
        assert [row["bits"] for row in own] == pytest.approx([row["bits"] for row in alone], rel=1e-5)
    done = run("stream", "--inputs", folder / "b.txt", "--inputs", folder / "a")
    assert sorted(line.split(b"\t")[0] for line in done.out.splitlines()) == [b"a"] * 3 + [b"b.txt"] * 2
    assert "a: 3 lines" in done.err
    assert "2 inputs: 5 lines" in done.err
    tokens = objects(run("stream", "--inputs", folder, "--json", "--emit", "tokens").out)
    assert "".join(row["text"] for row in tokens if row["input"] == "a").encode() == TEXT * 3


def test_states_are_kept_in_a_folder(run, model, folder, tmp_path):
    whole = objects(run("stream", "--inputs", folder, "--json").out)
    (folder / "a").write_bytes(TEXT)
    assert run("stream", "--inputs", folder / "a", "--state-out", tmp_path / "states").code == 0
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["a.state"]
    (folder / "a").write_bytes(TEXT * 2)
    states = ["--state-in", tmp_path / "states", "--state-out", tmp_path / "states"]
    rest = objects(run("stream", "--inputs", folder, "--json", *states).out)
    for name, skipped in (("a", 1), ("b.txt", 0)):
        expected = [row["bits"] for row in whole if row["input"] == name][skipped:]
        assert [row["bits"] for row in rest if row["input"] == name] == pytest.approx(expected, rel=1e-5)
    (tmp_path / "states" / "b.txt.state").write_bytes(b"not a state")
    done = run("stream", "--inputs", folder, *states)
    assert (done.code, "b.txt: " in done.err, b"a\t" in done.out, b"b.txt\t" in done.out) == (3, True, True, False)
    assert "damaged" in done.err
    assert "--state-out" not in done.err


def test_an_input_that_is_no_text_ends_alone(run, model, folder):
    (folder / "c").write_bytes(b"\x1f\x8b" + b"x" * 20)
    done = run("stream", "--inputs", folder)
    assert (done.code, done.out.count(b"\n")) == (3, 5)
    assert "c: " in done.err
    assert "1 of the inputs failed" in done.err


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["texts/a", "--inputs", "texts"], 2, "does not go together with FILE"),
    (["--inputs", "texts", "--continue", "9"], 2, "does not go together with --continue"),
    (["--inputs", "texts", "--html", "page.html"], 2, "does not go together with --html"),
    (["--inputs", "texts", "--inputs", "texts/a"], 2, "texts/a is given twice"),
    (["--inputs", "texts", "--inputs", "a"], 2, "texts/a and a have the same name"),
    (["texts/a", "--state-in", "texts"], 3, "--state-in texts is a folder, which goes with stream --inputs"),
    (["texts/a", "--state-in", "a", "--state-out", "a"], 3, "a is damaged or no saved state"),
    (["--inputs", "absent"], 3, "there is no file absent"),
    (["--inputs", "empty"], 3, "empty has no files"),
    (["--inputs", "texts", "--state-out", "texts"], 2, "would be read as inputs"),
    (["--inputs", "texts", "--state-out", "texts/a"], 2, "is a file"),
    (["--inputs", "texts", "--state-in", "absent"], 3, "is no folder of saved states"),
])  # fmt: skip
def test_impossible_inputs_are_refused(run, model, folder, monkeypatch, arguments, code, said):
    (folder.parent / "empty").mkdir()
    (folder.parent / "a").write_bytes(TEXT)
    monkeypatch.setenv("XLCLI_MODEL", str(model))
    monkeypatch.chdir(folder.parent)
    done = run("stream", *arguments)
    assert (done.code, said in done.err) == (code, True), done.err


def test_a_folder_may_hold_files_that_are_not_read(run, model, folder):
    (folder / "c").mkdir()
    (folder / "d").symlink_to("d")
    (folder / "e").symlink_to("absent")
    (folder / "f").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("g")
    done = run("stream", "--inputs", folder)
    assert (done.code, done.out.count(b"\n")) == (0, 5)
    assert [done.err.count(f"{folder / name} is a broken link and is not read") for name in "cdefg"] == [0, 1, 1, 0, 0]


def test_a_later_file_of_a_known_name_is_refused_once(tmp_path, monkeypatch):
    monkeypatch.setattr("xlcli.cli.inputs.SCAN_SECONDS", 0)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "a").write_bytes(TEXT)
    said, files = [], {"text_of": print, "open_states": print, "state_in": None, "state_out": None}
    inputs = InputFiles(folders, **files, stop=lambda: False, flush_ms=None, warn=said.append)
    assert [each.name for each in inputs.appeared()] == ["a"]
    for name in ("a", "b"):
        (folders[1] / name).write_bytes(TEXT)
    assert [[each.name for each in inputs.appeared()] for _ in range(2)] == [["b"], []]
    assert said == [f"{folders[1] / 'a'} has the same name as {folders[0] / 'a'} and is not read"]


def test_variables_name_inputs_and_prompts(run, model, folder, monkeypatch):
    monkeypatch.setenv("XLCLI_INPUTS", f"{folder / 'a'}{os.pathsep}{folder / 'b.txt'}")
    assert json.loads(run("stream", "--dry-run", "--json").out)["does"] == "scores 2 inputs"
    monkeypatch.setenv("XLCLI_PROMPTS", str(folder / "a"))
    assert f"each prompt of {folder / 'a'}" in json.loads(run("generate", "--dry-run", "--json").out)["does"]


def test_names_that_are_not_utf8_are_valid_json(run, model, tmp_path):
    name = os.fsdecode(b"\xff.txt")
    (tmp_path / name).write_bytes(TEXT)
    assert objects(run("stream", "--inputs", tmp_path / name, "--json").out)[0]["input"] == "\ufffd.txt"
    assert run("stream", "--inputs", tmp_path / name).out.startswith(b"\\xff.txt\t")


def test_the_plan_of_several_inputs(run, model, folder):
    plan = json.loads(run("stream", "--inputs", folder, "--dry-run", "--json").out)
    assert (plan["does"], plan["batch_size"]) == ("scores 2 inputs", 2)


def test_pipes_are_live_files_may_appear_and_a_signal_saves_all(model, folder, tmp_path):
    os.mkfifo(folder / "pipe")
    states = tmp_path / "states"
    arguments = command("stream", "-m", model, "--inputs", folder, "--state-out", states, "--flush-ms", "50")
    with (
        subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        (folder / "pipe").open("wb", buffering=0) as pipe,
    ):
        pipe.write(TEXT + b"begun")
        found = set()
        while not found >= {b"pipebegun", b"newThe q"}:
            line = process.stdout.readline()
            found.add(line.split(b"\t")[0] + line.split(b"\t")[2][:5])
            if b"pipebegun" in found:
                (folder / "new").write_bytes(TEXT)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert found > {b"aThe q", b"pipeThe q", b"pipebegun", b"newThe q"}
    assert {path.name for path in states.iterdir()} == {"a.state", "b.txt.state", "pipe.state", "new.state"}


PROMPTS = [{"prompt": "The ", "id": "x"}, {"prompt": ""}, {"id": None, "prompt": "The quick brown fox\n"}]
FEW = ["-n", "9", "--seed", "4"]


def test_prompts_are_continued_as_each_alone(run, model, tmp_path):
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, PROMPTS)))
    rows = objects(run("generate", "--prompts", tmp_path / "p.jsonl", *FEW).out)
    several = objects(run("generate", "--prompts", tmp_path / "p.jsonl", *FEW, "--num-samples", "2", "--no-prompt").out)
    for line, row, samples in zip(PROMPTS, rows, several, strict=True):
        alone = json.loads(run("generate", line["prompt"], *FEW, "--json").out)
        assert [row[key] for key in ("prompt", "text", "tokens", "seed")] == [
            alone[key] for key in ("prompt", "text", "tokens", "seed")
        ]
        assert row.get("id") == samples.get("id") == line.get("id")
        assert [sample["seed"] for sample in samples["samples"]] == [4, 5]
        assert samples["samples"][0]["text"] == row["text"]
        assert "prompt" not in samples["samples"][0]


def test_prompts_come_from_standard_input(run, model):
    with standard_input(b'{"prompt": "The "}'):
        done = run("generate", "--prompts", "-", *FEW)
    assert json.loads(done.out)["text"] == json.loads(run("generate", "The ", *FEW, "--json").out)["text"]


def test_prompts_may_be_compressed_or_in_other_encodings(tmp_path):
    written = '{"prompt": "Über", "id": 1}\r\n'
    for data in (written.encode("utf-16"), gzip.compress(written.encode()), written.encode("utf-8-sig")):
        (tmp_path / "p").write_bytes(data)
        with Screen().stop() as stop:
            found = read_prompts(str(tmp_path / "p"), stop)
        assert found == [NamedPrompt("Über".encode(), (1,))]


def test_no_prompts(run, model, tmp_path):
    (tmp_path / "p").write_bytes(b"\n\n")
    done = run("generate", "--prompts", tmp_path / "p")
    assert (done.code, done.out, f"{tmp_path / 'p'} has no prompts" in done.err) == (0, b"", True)


def test_prompts_that_a_signal_left_without_a_token_are_not_printed(capsysbinary):
    def result(tokens, reason):
        return (Generated(0, "", "", tokens, 1, reason, 1.0, 1.0),)

    events = [result(9, "length"), result(0, "interrupted"), result(3, "interrupted"), result(0, "interrupted")]
    show_results([NamedPrompt(b"")] * 6, events, Screen(), n_samples=1, without_prompt=False)
    out, err = capsysbinary.readouterr()
    assert [row["tokens"] for row in objects(out)] == [9, 0, 3]
    assert b"1 of 6 prompts were continued to their end" in err


@pytest.mark.parametrize(("line", "said"), [
    ("Once", "line 2 of p.jsonl is not JSON"), ('{"prompt": 5}', "line 2 of p.jsonl has no text in 'prompt'"),
    ('["a"]', "line 2 of p.jsonl has no text in 'prompt'"), ('{"text": "a"}', "line 2 of p.jsonl has no text"),
    ('{"prompt": "a", "seed": 1}', "line 2 of p.jsonl has the unknown key 'seed'"),
    ('{"prompt": "\\ud800"}', "line 2 of p.jsonl has half of a surrogate pair"),
    ('{"prompt": "", "id": "\\ud800"}', "line 2 of p.jsonl has half of a surrogate pair"),
    ("[" * 9999, "line 2 of p.jsonl is nested too deeply"),
    ('{"prompt": "", "id": [1]}', "the id in line 2 of p.jsonl is a list or an object"),
    ('{"prompt": "", "id": ' + "[" * 900 + "]" * 900 + "}", "the id in line 2 of p.jsonl is a list or an object"),
    ('{"prompt": "", "id": ' + "9" * 5000 + "}", "line 2 of p.jsonl has a number of 5000 digits"),
    ('{"prompt": "", "id": NaN}', "line 2 of p.jsonl has the number NaN, which is not finite"),
    ('{"prompt": "", "id": -1e999}', "line 2 of p.jsonl has the number -1e999, which is not finite"),
    ('{"prompt": "a", "prompt": "b"}', "line 2 of p.jsonl has a key twice"),
])  # fmt: skip
def test_bad_lines_are_named_before_the_model_is_loaded(run, model, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    done = run("generate", "-m", model, "--prompts", "p.jsonl")
    assert (done.code, said in done.err, done.out) == (3, True, b""), done.err


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["a", "--prompts", "p"], 2, "does not go together with PROMPT"),
    (["-i", "--prompts", "p"], 2, "does not go together with --interactive"),
    (["--prompts", "p", "--state-out", "s"], 2, "does not go together with --state-out"),
    (["--prompts", "absent"], 3, "there is no file absent"),
])  # fmt: skip
def test_impossible_prompts_are_refused(run, model, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.setenv("XLCLI_MODEL", str(model))
    monkeypatch.chdir(tmp_path)
    done = run("generate", *arguments)
    assert (done.code, said in done.err) == (code, True), done.err
