"""docs/developers/format.md names every file and every key that is written."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from toys import RUNTIME, toy

from xlcli import presets, training
from xlcli.config import GenerateConfig, StreamConfig
from xlcli.files.tensors import read_tensors
from xlcli.generation import generate
from xlcli.store.layout import ENCODINGS, SCHEMA
from xlcli.store.state_files import save_state
from xlcli.streaming import stream
from xlcli.text.follow import FilePosition, LogPosition

PAGE = (Path(__file__).parents[2] / "docs" / "developers" / "format.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", PAGE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained model."""
    place = tmp_path_factory.mktemp("format")
    text = place / "text.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(300)))
    tree = {
        "model": {"dim": 16, "n_layers": 1, "attention": {"n_heads": 2}},
        "text": {"tokenizer": "bytes"},
        "train": {"segment_len": 16, "mem_len": 16, "batch_size": 2, "max_steps": 2},
        "runtime": {"threads": 1, "dtype": "float32"},
    }
    list(training.train([str(text)], place / "m", presets.configurations(tree, "tiny")))
    return place / "m"


def keys(path):
    return json.loads(path.read_text()).keys()


def test_every_file_is_named(folder):
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    found = {path.name for path in (*folder.iterdir(), *checkpoint.iterdir()) if not path.name.startswith(".lock")}
    assert found - {"checkpoints"} <= NAMED


def test_every_key_is_named(folder):
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    found = {*keys(folder / "config.json"), *keys(folder / "record.json"), *keys(checkpoint / "state.json")}
    for row in (folder / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(row).keys()
    found |= read_tensors(folder / "model.safetensors", expected=None)[1].keys()
    found |= read_tensors(checkpoint / "random.safetensors", expected=None)[0].keys()
    assert found <= NAMED


def test_every_entry_of_a_state_file_is_named(tmp_path):
    model, saved = toy(), []
    list(generate(model, b"The", GenerateConfig(max_new_tokens=2), RUNTIME, seed=1, save=saved.append))
    for emit in ("lines", "words", "tokens"):
        options = StreamConfig(emit=emit, top=0.5)
        list(stream(model, [b"A\nThe end"], options, RUNTIME, save=lambda session: saved.append(session.fork())))
    place = FilePosition(1, 3, b"end")
    saved.append(replace(saved[-1], source=LogPosition(b"/app.log", (place,), ((1, 2, 3),), 1)))
    for session in saved:
        save_state(tmp_path / "s", session, model=model)
        tensors, metadata = read_tensors(tmp_path / "s", expected=None)
        values = json.loads(tensors["session.values"].numpy().tobytes())
        below = [key for name in ("sampler", "stream", "source") for key in values[name] or ()]
        below += values["stream"]["words"] or () if values["stream"] else ()
        below += values["source"]["files"][0] if values["source"] else ()
        for name in (*tensors, *metadata, *values, *below):
            assert re.sub(r"^state\.\d+\.", "", name.removeprefix("session.")) in NAMED, name


def test_numbers_and_encodings_are_named():
    assert PAGE.startswith(f"# File formats, schema {SCHEMA}\n")
    assert ENCODINGS.keys() <= NAMED
