"""Names of files that are not UTF-8, and names in the commands that are printed."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from programs import TEXT
from test_train_command import SMALL

NAME = os.fsdecode(b"caf\xe9")


@pytest.fixture
def text():
    Path(NAME).mkdir()
    for path in (Path(f"{NAME}.txt"), Path(NAME, f"{NAME}.txt")):
        path.write_bytes(TEXT * 40)
    return f"{NAME}.txt"


@pytest.mark.parametrize("corpus", [NAME, f"{NAME}.txt"])
def test_a_run_records_a_name_that_is_not_utf8(corpus, run, text):
    done = run("train", corpus, "-o", f"models/{NAME}", "--max-steps", "2", "--json", *SMALL)
    assert done.code == 0, done.err
    record = json.loads(Path(f"models/{NAME}/record.json").read_text(encoding="utf-8"))
    assert record["corpus"].endswith("caf\ufffd.txt")
    assert run("train", corpus, "-o", f"models/{NAME}", "--max-steps", "4", "--resume", *SMALL).code == 0
    assert run("models", "show", f"models/{NAME}").code == 0
    assert run("models").code == 0


def test_files_of_names_that_are_not_utf8(run, text, model):
    folder, state = f"models/{NAME}", f"{NAME}.state"
    shutil.copytree(model, folder)
    assert run("eval", text, "-m", folder, "--limit", "300", "--json", "--html", f"{NAME}.html").code == 0
    assert run("stream", text, "-m", folder, "--state-out", state).code == 0
    assert run("stream", text, "-m", folder, "--state-in", state).code == 0
    Path(f"{NAME}.jsonl").write_text('{"prompt": "a"}')
    assert run("generate", "--prompts", f"{NAME}.jsonl", "-m", folder, "-n", "2").code == 0


def test_a_plot_of_a_text_whose_name_is_not_utf8(run, text, model):
    pytest.importorskip("matplotlib")
    done = run("eval", text, "-m", "tiny", "--limit", "300", "--plot", f"{NAME}.png")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (["models", "copy", "small", "a b.toml"], "a b.toml"),
        (["models", "copy", "tiny", "models/a b"], "models/a b"),
        (["eval", "models/a $b"], "models/a $b"),
        (["train", "t.txt", "-o", "models/a b", "--max-steps", "1", *SMALL], "models/a b"),
    ],
)
def test_names_in_printed_commands_are_quoted(words, quoted, run, model):
    Path("t.txt").write_bytes(TEXT * 40)
    shutil.copytree(model, "models/a $b")
    done = run(*words)
    assert f" {shlex.quote(quoted)}" in done.out.decode("utf-8", "replace") + done.err
