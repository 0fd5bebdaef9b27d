"""Several prompts of `generate`."""

import gzip
import json
import re

import pytest
from programs import standard_input

from xlcli.cli.prompts import Results, read_prompts
from xlcli.cli.render import Screen
from xlcli.events import Generated


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


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
        assert "prompt" not in json.loads(run("generate", line["prompt"], *FEW, "--json", "--no-prompt").out)
        assert row.get("id") == samples.get("id") == line.get("id")
        assert [sample["seed"] for sample in samples["samples"]] == [4, 5]
        assert samples["samples"][0]["text"] == row["text"]
        assert "prompt" not in samples["samples"][0]


def test_prompts_come_from_standard_input(run, model):
    with standard_input(b'{"prompt": "The "}'):
        done = run("generate", "--prompts", "-", *FEW)
    assert json.loads(done.out)["text"] == json.loads(run("generate", "The ", *FEW, "--json").out)["text"]


def test_line_ends_of_prompts_are_read_as_lf(run, model, tmp_path):
    with standard_input(b"The\r\ndog\r"):
        done = run("generate", "-", *FEW, "--json")
    assert json.loads(done.out)["prompt"] == "The\ndog\r"
    assert done.err.count("CR LF") == 1
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "The\r\ndog\r", "id": 1}))
    done = run("generate", "--prompts", tmp_path / "p.jsonl", *FEW)
    assert (objects(done.out)[0]["prompt"], objects(done.out)[0]["id"]) == ("The\ndog\r", 1)
    assert done.err.count("CR LF") == 1


def test_prompts_may_be_compressed_or_in_other_encodings(tmp_path):
    written = '{"prompt": "Über", "id": 1}\r\n'
    for data in (written.encode("utf-16"), gzip.compress(written.encode()), written.encode("utf-8-sig")):
        (tmp_path / "p").write_bytes(data)
        with Screen().stop() as stop:
            found = read_prompts(str(tmp_path / "p"), stop, Screen())
        assert found == [("Über".encode(), {"id": 1})]


def test_a_variable_names_the_prompts(run, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XLCLI_PROMPTS", str(tmp_path / "p.jsonl"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "id": 7}\n')
    assert [row["id"] for row in objects(run("generate", "-n", "1").out)] == [7]


def test_no_prompts(run, model, tmp_path):
    (tmp_path / "p").write_bytes(b"\n\n")
    done = run("generate", "--prompts", tmp_path / "p")
    assert (done.code, done.out, str(tmp_path / "p") in done.err) == (0, b"", True)


def test_prompts_that_a_signal_has_interrupted_say_so(capsysbinary):
    def result(tokens, reason):
        return (Generated(0, "", "", tokens, 1, reason, 1.0),)

    events = [result(9, "length"), result(0, "interrupted"), result(3, "interrupted"), result(0, "interrupted")]
    screen = Screen()
    screen.drive(events, Results([(b"", {})] * 6, screen, n_samples=1, without_prompt=False))
    out, err = capsysbinary.readouterr()
    assert [(row["tokens"], row["stop_reason"]) for row in objects(out)] == [
        (9, "length"), (0, "interrupted"), (3, "interrupted"), (0, "interrupted"),
    ]  # fmt: skip
    assert re.search(rb"\b1\b.*\b6\b", err)


@pytest.mark.parametrize(("line", "said"), [
    ("Once", "JSON"), ('{"prompt": 5}', "'prompt'"),
    ('["a"]', "'prompt'"), ('{"text": "a"}', "'prompt'"),
    ('{"prompt": "a", "seed": 1}', "'seed'"),
    ('{"prompt": "\\ud800"}', "JSON"),
    ('{"prompt": "", "id": "\\ud800"}', "JSON"),
    ('{"prompt": "", "id": NaN}', "JSON"),
    ('{"prompt": "", "id": 1e999}', "JSON"),
    ('{"prompt": "a", "prompt": "b"}', "JSON"),
    ("[" * 9999, "JSON"),
    ('{"prompt": "", "id": [1]}', "id"),
    ('{"prompt": "", "id": ' + "[" * 90 + "]" * 90 + "}", "id"),
    ('{"prompt": "", "id": ' + "[" * 900 + "]" * 900 + "}", "JSON"),
    ('{"prompt": "", "id": ' + "9" * 5000 + "}", "JSON"),
])  # fmt: skip
def test_bad_lines_are_named_before_the_model_is_loaded(run, model, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    done = run("generate", "-m", model, "--prompts", "p.jsonl")
    assert (done.code, said in done.err, done.out) == (3, True, b""), done.err
    assert re.search(r"\b[23]\b.*\bp\.jsonl", done.err)  # brackets that do not match are known at the end


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["a", "--prompts", "p"], 2, "PROMPT"),
    (["-i", "--prompts", "p"], 2, "--interactive"),
    (["--prompts", "p", "--state-out", "s"], 2, "--state-out"),
    (["--prompts", "absent"], 3, "absent"),
])  # fmt: skip
def test_impossible_prompts_are_refused(run, model, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.setenv("XLCLI_MODEL", str(model))
    monkeypatch.chdir(tmp_path)
    done = run("generate", *arguments)
    assert (done.code, said in done.err) == (code, True), done.err
