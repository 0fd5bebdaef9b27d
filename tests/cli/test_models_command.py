import json
import re
import tomllib
from pathlib import Path

import pytest

from xlcli import presets

pytestmark = pytest.mark.usefixtures("without_torch")


def test_list(run, model):
    text = run("models").out.decode()
    assert "tiny" in text
    assert all(preset.name in text for preset in presets.list_presets())
    tree = json.loads(run("models", "--json").out)
    assert [entry["name"] for entry in tree["local"]] == ["tiny"]
    assert {entry["name"] for entry in tree["presets"]} == {preset.name for preset in presets.list_presets()}


def test_an_empty_folder_says_how_to_begin(run):
    assert "xlcli train FILE" in run("models").out.decode()


def test_a_damaged_model_is_listed_with_its_problem(run, model):
    (model / "model.safetensors").write_bytes(b"junk")
    done = run("models")
    assert done.code == 0
    assert "tiny" in done.out.decode()


def test_show_a_model_and_a_preset(run, model):
    shown = run("models", "show", "tiny")
    assert "n_layers = 2" in shown.out.decode()
    assert json.loads(run("models", "show", str(model), "--json").out)["config"]["model"]["dim"] == 16
    preset = run("models", "show", "small")
    assert preset.out == (presets.models_folder() / "small.toml").read_bytes()
    assert "train" in json.loads(run("models", "show", "small", "--json").out)["config"]


def test_show_what_does_not_exist(run, model):
    done = run("models", "show", "smal")
    assert done.code == 3
    assert "small" in done.err


def test_encoding_and_size_are_listed(run, model):
    assert re.search(r"^tiny +\d+\.\dk +\d+\.\d KiB +float32 ", run("models").out.decode(), re.MULTILINE)
    [listed] = json.loads(run("models", "--json").out)["local"]
    shown = json.loads(run("models", "show", "tiny", "--json").out)
    size = (model / "model.safetensors").stat().st_size
    assert (listed["encoding"], listed["bytes"]) == (shown["encoding"], shown["bytes"]) == ("float32", size)


def test_weights_are_an_option_of_copy_only(run, model, monkeypatch):
    for arguments in ([], ["show", "tiny"]):
        done = run("models", *arguments, "--weights", "int8")
        assert (done.code, "copies of models" in done.err) == (2, True)
    done = run("models", "copy", "small", "mine.toml", "--weights", "int8")
    assert (done.code, "copies of models" in done.err) == (2, True)
    assert not Path("mine.toml").exists()
    monkeypatch.setenv("XLCLI_WEIGHTS", "int8")  # for train
    assert run("models").code == 0


def test_a_preset_is_copied_to_a_file(run):
    done = run("models", "copy", "small", "models/mine")
    assert (done.code, "xlcli models copy small FILE.toml" in done.err) == (3, True)
    assert run("models", "copy", "small").code == 2


def test_copy(run):
    assert run("models", "copy", "small", "mine.toml").code == 0
    assert Path("mine.toml").read_bytes() == (presets.models_folder() / "small.toml").read_bytes()
    assert run("train", "--print-config", "--config", "mine.toml").code == 0
    again = run("models", "copy", "small", "mine.toml")
    assert (again.code, "exists" in again.err) == (2, True)
    assert tomllib.loads(run("models", "copy", "small", "-").out.decode())
    assert run("models", "copy", "smal", "x.toml").code == 2
