"""Several inputs of `stream` and several prompts of `generate`."""

import json
import os
import signal
import subprocess

import pytest
from programs import TEXT, command, environment


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
    (["--inputs", "texts", "--inputs", "texts/a"], 2, "two inputs have the name a"),
    (["--inputs", "absent"], 3, "there is no file absent"),
    (["--inputs", "empty"], 3, "empty has no files"),
    (["--inputs", "texts", "--state-out", "texts"], 2, "would be read as inputs"),
    (["--inputs", "texts", "--state-out", "texts/a"], 2, "is a file"),
    (["--inputs", "texts", "--state-in", "absent"], 3, "is no folder of saved states"),
])  # fmt: skip
def test_impossible_inputs_are_refused(run, model, folder, monkeypatch, arguments, code, said):
    (folder.parent / "empty").mkdir()
    monkeypatch.setenv("XLCLI_MODEL", str(model))
    monkeypatch.chdir(folder.parent)
    done = run("stream", *arguments)
    assert (done.code, said in done.err) == (code, True), done.err


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


PROMPTS = [{"prompt": "The ", "id": "x"}, {"prompt": ""}, {"id": [1, None], "prompt": "The quick brown fox\n"}]
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
    source, pipe = os.pipe()
    os.write(pipe, b'{"prompt": "The "}')
    os.close(pipe)
    before = os.dup(0)
    os.dup2(source, 0)
    try:
        done = run("generate", "--prompts", "-", *FEW)
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(source)
    assert json.loads(done.out)["text"] == json.loads(run("generate", "The ", *FEW, "--json").out)["text"]


@pytest.mark.parametrize(("line", "said"), [
    ("Once", "line 2 of p.jsonl is not JSON"), ('{"prompt": 5}', "line 2 of p.jsonl has no text in 'prompt'"),
    ('["a"]', "line 2 of p.jsonl has no text in 'prompt'"), ('{"text": "a"}', "line 2 of p.jsonl has no text"),
    ('{"prompt": "a", "seed": 1}', "line 2 of p.jsonl has the unknown key 'seed'"),
    ('{"prompt": "\\ud800"}', "the prompt in line 2 of p.jsonl is not Unicode"),
    ("[" * 9999, "line 2 of p.jsonl is not JSON"),
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
