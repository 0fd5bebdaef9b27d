import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_a_model_is_copied_in_an_encoding(run, model, encoding):
    done = run("models", "copy", "tiny", "models/copy", "--weights", encoding)
    assert (done.code, done.out) == (0, b"")
    assert encoding in done.err
    assert "xlcli eval -m models/copy" in done.err
    shown = json.loads(run("models", "show", "copy", "--json").out)
    before = json.loads(run("models", "show", "tiny", "--json").out)
    assert shown["encoding"] == encoding
    assert shown["parameters"] == before["parameters"]
    assert shown["config"] == before["config"]
    score, other = (json.loads(run("eval", "-m", name, "--json").out)["bits_per_byte"] for name in ("tiny", "copy"))
    assert score == pytest.approx(other, rel=1e-3)
    assert (score == other) == (encoding == "float32")


def test_a_copy_names_the_text_that_goes_along(run, model):
    assert "valid.txt" in run("models", "copy", "tiny", "models/copy").err
    Path("models/copy/valid.txt").unlink()
    done = run("models", "copy", "copy", "models/again")
    assert "valid.txt" not in done.err
    assert "xlcli eval FILE -m models/again" in done.err
    assert run("eval", "-m", "again").code == 3
    assert run("eval", model / "valid.txt", "-m", "again").code == 0


def test_a_copy_of_a_copy_keeps_its_encoding(run, model):
    made = json.loads(run("models", "copy", str(model), "one", "--weights", "int8", "--json").out)
    assert (made["name"], made["encoding"], made["folder"]) == ("one", "int8", "one")
    assert run("models", "copy", "./one", "two").code == 0
    assert Path("two/model.safetensors").read_bytes() == Path("one/model.safetensors").read_bytes()


def test_copies_that_are_refused(run, model):
    done = run("models", "copy", "tiny", "models/tiny")
    assert (done.code, "exists" in done.err) == (2, True)
    done = run("models", "copy", "tny", "models/copy")
    assert (done.code, "tiny?" in done.err) == (3, True)
    (model / "valid.txt").unlink()
    (model / "model.safetensors").write_bytes(b"junk")
    assert run("models", "copy", "tiny", "models/copy").code == 3
    assert not Path("models/copy").exists()
