import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Literal

import pytest
import safetensors
import torch

from xlcli.config import ModelConfig, TrainConfig, make
from xlcli.errors import CheckpointError, ResourceError, XLError
from xlcli.files import write_atomic
from xlcli.files.tensors import read_header, read_tensors, write_tensors
from xlcli.model.build import build_model
from xlcli.store import folder as store
from xlcli.store import layout
from xlcli.store.layout import (
    CONFIG,
    ENCODINGS,
    WEIGHTS,
    is_model,
    read_config,
    read_config_file,
    write_config,
    write_record,
)
from xlcli.store.weights import decode, encode, stored_infos, weights_bytes
from xlcli.store.weights import weights as weights_of
from xlcli.text.tokenizers import BytesTokenizer

MODEL = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}, "feedforward": {"ffn_dim": 24}}


def tiny(**more):
    config = make({"model": MODEL | more})
    return config, build_model(config.model, torch.Generator().manual_seed(0))


def saved(folder: Path, *, encoding: str = "float32", **more) -> Path:
    config, network = tiny(**more)
    store.save_model(folder, config, weights_of(network), BytesTokenizer(), {"step": "7"}, encoding=encoding)
    return folder


@pytest.fixture
def model(tmp_path):
    return saved(tmp_path / "model")


def digest(tree) -> str:
    """SHA-256 of canonical JSON, as docs/developers/format.md defines it."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rewrite_config(folder: Path, *, without: str = "", **changes) -> None:
    """Changes keys of `config.json` and makes its checksum right again; tables are merged one level deep."""
    tree = json.loads((folder / CONFIG).read_text())
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    tree.pop(without, None)
    if "sha256" in tree and "sha256" not in changes:
        tree["sha256"] = digest({key: value for key, value in tree.items() if key != "sha256"})
    (folder / CONFIG).write_text(json.dumps(tree))


def retie(folder: Path) -> None:
    """Writes into the weights file the fingerprint of the model section as it stands in `config.json`."""
    tree = json.loads((folder / CONFIG).read_text())
    tensors, metadata = read_tensors(folder / WEIGHTS, expected=None)
    del metadata["sha256"]
    metadata["config"] = digest({"schema": tree["schema"], "model": tree["model"]})
    write_tensors(folder / WEIGHTS, tensors, metadata)


MATRIX = "embedding.table.weight"
VARIANTS = {
    "plain": {},
    "untied": {"embedding": {"tied": False}},
    "shared biases": {"position": {"kind": "xl", "tied": True}},
    "published": {
        "norm": {"kind": "layer", "placement": "post"},
        "bias": True,
        "position": {"kind": "xl", "clamp_len": 8},
    },
    "no positions": {"position": {"kind": "none"}},
    "token vectors": {"embedding": {"n_bigrams": 64, "per_layer": True}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(tmp_path, variant):
    config, network = tiny(**VARIANTS[variant])
    store.save_model(tmp_path / "m", config, network.state_dict(), BytesTokenizer(), {"step": "7"})
    write_record(tmp_path / "m", {"corpus": "x"})
    loaded = store.load(tmp_path / "m")
    assert (loaded.name, loaded.record, loaded.warnings) == ("m", {"corpus": "x"}, ())
    assert (loaded.config.text, loaded.config.train) == (config.text, config.train)
    assert loaded.fingerprints.keys() == {"config", "weights", "tokenizer"}
    assert not loaded.network.training
    assert loaded.network.n_parameters == network.n_parameters
    assert loaded.network.state_dict().keys() == network.state_dict().keys()
    for (name, was), (found, now) in zip(network.named_parameters(), loaded.network.named_parameters(), strict=True):
        assert name == found
        assert torch.equal(was, now)
        assert now.requires_grad
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    state = [part.init_state(1, mem_len=4, segment_len=4) for part in (network.eval(), loaded.network)]
    with torch.inference_mode():
        assert torch.equal(network.logits(tokens, state[0])[0], loaded.network.logits(tokens, state[1])[0])


HASHED = {"attention": {"kind": "lsh", "n_heads": 2, "n_buckets": 4, "bucket_size": 4}, "position": {"kind": "none"}}
LINEAR = {"attention": {"kind": "linear", "n_heads": 2, "n_features": 8}, "position": {"kind": "none"}}


@pytest.mark.parametrize("variant", [*VARIANTS.values(), HASHED, LINEAR], ids=[*VARIANTS, "hashed", "linear"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_encoding(tmp_path, encoding, variant):
    config, network = tiny(**variant)
    store.save_model(tmp_path / "m", config, network.state_dict(), BytesTokenizer(), {}, encoding=encoding)
    infos = stored_infos(weights_of(network), encoding)
    assert read_header(tmp_path / "m" / WEIGHTS)[0] == infos
    assert json.loads((tmp_path / "m" / CONFIG).read_text())["weights"] == {"encoding": encoding}
    loaded = store.load(tmp_path / "m")
    expected = decode(encode(weights_of(network), infos))
    found = weights_of(loaded.network)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])
    assert loaded.network.state_dict().keys() == network.state_dict().keys()
    assert loaded.network.n_parameters == network.n_parameters
    header, data = read_size(tmp_path / "m" / WEIGHTS)
    assert data == weights_bytes(config.model, encoding)
    assert header < 2**14
    store.save_model(tmp_path / "again", loaded.config, found, BytesTokenizer(), {}, encoding=encoding)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "m" / WEIGHTS).read_bytes()
    assert store.load(tmp_path / "again").fingerprints == loaded.fingerprints


def read_size(path: Path) -> tuple[int, int]:
    """Size of the header of a safetensors file and of the data behind it."""
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    return header, len(data) - header


@pytest.mark.parametrize("said", ENCODINGS)
@pytest.mark.parametrize("stored", ENCODINGS)
def test_weights_stored_in_another_encoding_than_said(tmp_path, stored, said):
    model = saved(tmp_path / "m", encoding=stored)
    rewrite_config(model, weights={"encoding": said})
    if said == stored:
        store.load(model)
        return
    with pytest.raises(CheckpointError, match=r"needed|:scale"):
        store.load(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {f"{MATRIX}:scale": t[f"{MATRIX}:scale"] * 0}, "positive"),
        (lambda t: t | {f"{MATRIX}:scale": t[f"{MATRIX}:scale"] / 0}, "positive"),
        (lambda t: t | {f"{MATRIX}:scale": -t[f"{MATRIX}:scale"]}, "positive"),
        (lambda t: t | {f"{MATRIX}:scale": t[f"{MATRIX}:scale"].float()}, "needed"),
        (lambda t: t | {f"{MATRIX}:scale": t[f"{MATRIX}:scale"][1:]}, "needed"),
        (lambda t: t | {f"{MATRIX}:scale": t[f"{MATRIX}:scale"][:, None]}, "needed"),
        (lambda t: t | {MATRIX: torch.full_like(t[MATRIX], -128)}, "-128"),
        (lambda t: t | {MATRIX: t[MATRIX].view(torch.uint8)}, "needed"),
        (lambda t: t | {"stack.final.weight:scale": t[f"{MATRIX}:scale"]}, "unexpected"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != f"{MATRIX}:scale"}, f"{MATRIX}:scale"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != MATRIX}, f"'{MATRIX}'"),
    ],
)
def test_int8_weights_that_are_refused(tmp_path, change, message):
    model = saved(tmp_path / "m", encoding="int8")
    tensors, metadata = read_tensors(model / WEIGHTS, expected=None)
    write_tensors(model / WEIGHTS, change(tensors), metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.load(model)
    assert caught.value.remedy


def test_an_enormous_scale_is_pointed_at(tmp_path):
    model = saved(tmp_path / "m", encoding="int8")
    tensors, metadata = read_tensors(model / WEIGHTS, expected=None)
    tensors[f"{MATRIX}:scale"].fill_(3e38)
    write_tensors(model / WEIGHTS, tensors, metadata)
    (warning,) = store.load(model).warnings
    assert MATRIX in warning


def test_loading_draws_no_random_numbers(model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    store.load(model)
    assert torch.equal(before, torch.get_rng_state())


def test_weights_are_not_read_again(model):
    loaded = store.load(model)
    before = [p.clone() for p in loaded.network.parameters()]
    with (model / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * 5000)
        file.truncate(100)
    assert all(torch.equal(p, was) for p, was in zip(loaded.network.parameters(), before, strict=True))


def test_same_model_same_bytes(tmp_path):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert (one / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()
    assert store.load(one).fingerprints == store.load(two).fingerprints


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(tmp_path, mask):
    old = os.umask(mask)
    try:
        model = saved(tmp_path / "models" / "m")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in model.iterdir()} == {0o666 & ~mask}
    assert model.stat().st_mode & 0o777 == 0o777 & ~mask


def test_every_file_is_needed_and_every_damage_named(model):
    draw = random.Random(0)
    names = sorted(path.name for path in model.iterdir())
    assert names == [CONFIG, WEIGHTS, "tokenizer.json"]
    for name in names:
        path = model / name
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=name):
            store.load(model)
        path.mkdir()
        with pytest.raises(CheckpointError, match=name):
            store.load(model)
        path.rmdir()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match=name):
            store.load(model)
        path.unlink()
        (model.parent / "elsewhere").write_bytes(whole)
        path.symlink_to(model.parent / "elsewhere")
        store.load(model)
        (model.parent / "elsewhere").unlink()
        with pytest.raises(CheckpointError, match=name):
            store.load(model)
        path.unlink()
        for _ in range(30):
            place = draw.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draw.randrange(8)
            for data in (bytes(damaged), whole[:place]):
                path.unlink(missing_ok=True)
                path.write_bytes(data)
                if data == whole.removesuffix(b"\n"):
                    continue
                with pytest.raises(CheckpointError):
                    store.load(model)
        path.unlink()
        path.write_bytes(whole)
    store.load(model)


def test_files_of_two_models(tmp_path, model):
    other = saved(tmp_path / "other", n_layers=3)
    (model / CONFIG).write_bytes((other / CONFIG).read_bytes())
    with pytest.raises(CheckpointError, match=r"'.*2\."):
        store.load(model)
    (other / CONFIG).write_bytes((saved(tmp_path / "third") / CONFIG).read_bytes())
    with pytest.raises(CheckpointError, match="unexpected"):
        store.load(other)


def test_a_configuration_of_the_same_shape_but_another_meaning(model):
    config = read_config(model)
    write_config(model, config.model_copy(update={"model": config.model.model_copy(update={"init_std": 0.5})}))
    with pytest.raises(CheckpointError, match=r"model\b.*\bconfig\.json"):
        store.load(model)
    write_config(model, config.model_copy(update={"train": config.train.model_copy(update={"mem_len": 5})}))
    assert store.load(model).config.train.mem_len == 5


# config.json


def test_only_model_text_and_train_are_stored(model):
    tree = json.loads((model / CONFIG).read_text())
    assert tree.keys() == {"schema", "model", "text", "train", "weights", "files", "adapted_from", "sha256"}
    assert tree["schema"] == 2
    assert tree["weights"] == {"encoding": "float32"}
    assert tree["adapted_from"] is None
    assert tree["files"] == {
        "tokenizer.json": hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest(),
    }
    assert tree["sha256"] == digest({key: value for key, value in tree.items() if key != "sha256"})


def test_derived_sizes_are_stored(tmp_path):
    """A later release may derive them by another rule."""
    tree = json.loads((saved(tmp_path / "m", feedforward={"kind": "relu"}) / CONFIG).read_text())["model"]
    assert (tree["attention"]["head_dim"], tree["feedforward"]["ffn_dim"]) == (8, 64)
    axial = {"position": {"kind": "axial", "shape": [4, 4]}}
    assert json.loads((saved(tmp_path / "a", **axial) / CONFIG).read_text())["model"]["position"]["dims"] == [8, 8]


def test_the_fingerprint_is_that_of_the_stored_section(model):
    tree = json.loads((model / CONFIG).read_text())
    expected = digest({"schema": 2, "model": tree["model"]})
    assert store.load(model).fingerprints["config"] == expected
    assert read_header(model / WEIGHTS)[1]["config"] == expected


class LaterModelConfig(ModelConfig):
    """The model section of a later release: one more key, another default."""

    init_std: float = 0.5
    logit_cap: float | None = None


class LaterTrainConfig(TrainConfig):
    """The train section of a later release."""

    ema: float = 0.999


class LaterConfig(layout.SavedConfig):
    """What a later release stores."""

    model: LaterModelConfig
    train: LaterTrainConfig


def test_a_later_release_reads_the_model_under_the_same_fingerprint(model, monkeypatch):
    rewrite_config(model, model={"n_layers": 2})
    before = store.load(model)
    monkeypatch.setattr(layout, "SavedConfig", LaterConfig)
    after = store.load(model)
    assert after.config.model.logit_cap is None
    assert after.config.model.init_std == before.config.model.init_std == 0.02
    assert after.config.train.ema == 0.999
    assert after.fingerprints == before.fingerprints


def test_a_run_resumed_by_a_later_release_keeps_the_fingerprint(model, monkeypatch):
    """The later release writes the configuration again, with its additional key."""
    before = store.load(model)
    monkeypatch.setattr(layout, "SavedConfig", LaterConfig)
    monkeypatch.setattr(layout, "ModelConfig", LaterModelConfig)
    config = read_config(model)
    write_config(model, config)
    assert store.load(model).fingerprints == before.fingerprints
    weights = {name: tensor + 1 for name, tensor in weights_of(before.network).items()}
    store.save_model(model, config, weights, BytesTokenizer(), {})
    assert store.load(model).fingerprints["config"] == before.fingerprints["config"]


def test_options_of_a_later_release_do_not_make_a_model_unreadable(model):
    rewrite_config(model, train={"ema": 0.999}, text={"lowercase": False})
    assert store.load(model).config == read_config(model)
    with pytest.raises(CheckpointError, match=r"text\.lowercase") as caught:
        read_config_file(model, strict=True)
    assert "newer" in caught.value.remedy


def test_a_key_of_a_later_release_that_changes_the_model_is_refused(model):
    rewrite_config(model, model={"logit_cap": 30.0})
    retie(model)
    with pytest.raises(CheckpointError, match=r"model\.logit_cap"):
        store.load(model)


def test_a_changed_value_is_damage(model):
    text = (model / CONFIG).read_text()
    assert text.count('"mem_len": 128') == 1
    (model / CONFIG).write_text(text.replace('"mem_len": 128', '"mem_len": 129'))
    with pytest.raises(CheckpointError, match=r"config\.json.*checksum"):
        store.load(model)
    (model / CONFIG).write_text(json.dumps(json.loads(text)))  # only white space is different
    assert store.load(model).config.train.mem_len == 128


def test_another_tokenizer(model, monkeypatch):
    class Other(BytesTokenizer):
        fingerprint = "0" * 64

    monkeypatch.setattr(store, "load_tokenizer", lambda folder: Other())
    with pytest.raises(CheckpointError, match="trained"):
        store.load(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, r"format\D+3\D+2\b"),
        ({"schema": 1}, r"format\D+1\D+2\b"),
        ({"schema": None}, "format"),
        ({"schema": True}, "format"),
        ({"schema": "2"}, "format"),
        ({"schema": 0}, "format"),
        ({"extra": 1}, "'extra'"),
        ({"without": "files"}, "'files'"),
        ({"without": "sha256"}, "'sha256'"),
        ({"sha256": None}, "checksum"),
        ({"sha256": ["0" * 64]}, "checksum"),
        ({"weights": {"encoding": "int4"}}, "int4"),
        ({"weights": {"encoding": None}}, "None"),
        ({"weights": {"encoding": ["float32"]}}, r"\['float32'\]"),
        ({"weights": {"group": 32}}, "encoded"),
        ({"weights": "float32"}, "None"),
        ({"adapted_from": "0" * 64}, "adaptation"),
        ({"files": 3}, "'files'"),
        ({"files": {"tokenizer.json": 3}}, r"tokenizer\.json"),
        ({"model": {"_target_": "os.system"}}, "_target_"),
        ({"model": {"dim": "big"}}, "dim"),
        ({"model": {"dim": -1}}, "dim"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"train": 3}, "train"),
        ({"train": {"lr": "fast"}}, "lr"),
        ({"text": []}, "text"),
    ],
)
def test_configurations_that_are_refused(model, change, message):
    rewrite_config(model, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.load(model)
    assert caught.value.remedy


def test_a_newer_format_needs_a_newer_program(model):
    """Before anything else is compared: a later format may have another checksum, other keys and other sections."""
    (model / CONFIG).write_text('{"schema": 3, "network": {}}')
    with pytest.raises(CheckpointError) as caught:
        store.load(model)
    assert "newer" in caught.value.remedy


ABSURD = [
    {"dim": 2**31, "attention": {"kind": "full", "n_heads": 1}},
    {"dim": 2**20, "n_layers": 1024},
    {"n_layers": 1024},
    {"vocab_size": 2**24},
    {"attention": {"kind": "full", "n_heads": 2**31, "head_dim": 2**31}},
    {"attention": {"kind": "full", "n_heads": 2**30, "head_dim": 1}},
    {"attention": {"kind": "linear", "n_features": 2**16}, "position": {"kind": "none"}},
    {"attention": {"kind": "local", "n_heads": 2**30, "head_dim": 1}},
    {"feedforward": {"kind": "relu", "ffn_dim": 2**31}},
    {"position": {"kind": "xl", "n_features": 2**16}},
    {"position": {"kind": "learned", "max_len": 2**31}},
    {"position": {"kind": "axial", "shape": [2**31] * 8}},
    {"position": {"kind": "shaw", "max_distance": 2**31}},
    {"position": {"kind": "t5", "n_buckets": 2**16, "max_distance": 2**31}},
    {"position": {"kind": "contextual-1", "n_buckets": 2**16, "max_distance": 2**31}},
    {"embedding": {"inner_dim": 2**31}},
    {"vocab_size": 2**24, "embedding": {"cutoffs": list(range(1, 100_000))}},
    {"stack": {"kind": "universal", "n_steps": 1024, "act": True}},
]


@pytest.mark.parametrize("encoding", ["float32", "int8"])
@pytest.mark.parametrize("change", ABSURD, ids=lambda change: str(change)[:60])
def test_absurd_sizes_allocate_nothing(tmp_path, change, encoding):
    model = saved(tmp_path / "m", encoding=encoding)
    rewrite_config(model, model=change)
    retie(model)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"larger|needed|\bno\b"):
        store.load(model)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_make_no_sense_are_pointed_at(tmp_path, value):
    config, network = tiny()
    name, parameter = next(iter(network.named_parameters()))
    with torch.no_grad():
        parameter.fill_(value)
    store.save_model(tmp_path / "m", config, weights_of(network), BytesTokenizer(), {})
    (warning,) = store.load(tmp_path / "m").warnings
    assert name in warning


def test_a_weight_of_the_wrong_type(model):
    _, network = tiny()
    bad = {name: tensor.long() for name, tensor in weights_of(network).items()}
    write_tensors(model / WEIGHTS, bad, {})
    with pytest.raises(CheckpointError, match="I64"):
        store.load(model)


def test_saving_again_replaces_only_the_weights(model):
    config, network = tiny()
    before = {path.name: path.stat().st_ino for path in model.iterdir()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    store.save_model(model, config, weights_of(network), BytesTokenizer(), {"step": "8"})
    after = {path.name: path.stat().st_ino for path in model.iterdir()}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after[WEIGHTS] != before[WEIGHTS]
    loaded = store.load(model).network
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), loaded.parameters(), strict=True))


def test_another_model_never_leaves_a_mixture(model, monkeypatch):
    config, network = tiny(n_layers=3)

    def full(*_args):
        raise ResourceError("disk full.")

    monkeypatch.setattr(store, "write_in_order", full)
    with pytest.raises(ResourceError):
        store.save_model(model, config, weights_of(network), BytesTokenizer(), {})
    assert not is_model(model)


@pytest.mark.parametrize(("before", "after"), [("float32", "int8"), ("int8", "bfloat16")])
def test_another_encoding_never_leaves_a_mixture(tmp_path, monkeypatch, before, after):
    model = saved(tmp_path / "m", encoding=before)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_in_order", lambda *_: (_ for _ in ()).throw(ResourceError("disk full.")))
        with pytest.raises(ResourceError):
            saved(model, encoding=after)
    assert not is_model(model)
    saved(model, encoding=after)
    assert read_config_file(model).encoding == after
    store.load(model)


@pytest.mark.parametrize(("change", "problem"), [(None, "missing"), (torch.zeros(3, 5), r"\[3, 5\]")])
def test_weights_that_do_not_fit_the_configuration_are_not_saved(change, problem, tmp_path):
    config, network = tiny()
    weights = weights_of(network)
    name, _ = weights.popitem()
    weights |= {} if change is None else {name: change}
    with pytest.raises(CheckpointError, match=f"'{name}'.*{problem}"):
        store.save_model(tmp_path / "m", config, weights, BytesTokenizer(), {})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
def test_weights_that_an_encoding_cannot_represent_are_not_saved(encoding, tmp_path):
    config, network = tiny()
    weights = weights_of(network) | {MATRIX: torch.full((256, 16), float("nan"))}
    with pytest.raises(CheckpointError, match=f"'{MATRIX}'"):
        store.save_model(tmp_path / "m", config, weights, BytesTokenizer(), {}, encoding=encoding)
    assert not (tmp_path / "m").exists()


def test_read_only_folder_says_so(tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(XLError, match="permission") as caught:
        saved(tmp_path / "m")
    assert caught.value.exit_code == 4


def with_held_out(folder: Path, split: Literal["valid", "test"], text: str) -> Path:
    """A model saved beside a held-out text, as training does it."""
    folder.mkdir()
    (folder / f"{split}.txt").write_text(text)
    return saved(folder)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_text(tmp_path, split):
    folder = with_held_out(tmp_path / "m", split, "some text")
    path = folder / f"{split}.txt"
    assert store.load(folder).held_out(split) == path
    path.write_text("some test")
    with pytest.raises(CheckpointError, match=rf"{split}\.txt"):
        store.load(folder).held_out(split)
    path.unlink()
    assert store.load(folder).held_out(split) is None
    (tmp_path / "elsewhere").write_text("some text")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.load(folder).held_out(split) == path
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=rf"{split}\.txt"):
        store.load(folder).held_out(split)
    assert store.load(saved(tmp_path / "n")).held_out(split) is None
    (tmp_path / "n" / f"{split}.txt").symlink_to("/etc/passwd")  # without a checksum
    assert store.load(tmp_path / "n").held_out(split) is None


def test_the_content_of_linked_files_is_copied_and_that_of_other_files_is_not(tmp_path):
    folder = with_held_out(tmp_path / "m", "test", "some text")
    write_record(folder, {"finished": True, "corpus": "c"})
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    store.copy_model(linked, tmp_path / "copy")
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == content
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())
    (tmp_path / "secret.json").write_text('{"password": "x"}')
    (linked / "record.json").unlink()
    (linked / "record.json").symlink_to(tmp_path / "secret.json")
    store.copy_model(linked, tmp_path / "second")
    assert not (tmp_path / "second" / "record.json").exists()
    assert store.load(linked).warnings


def test_saving_replaces_links(tmp_path, model):
    linked = tmp_path / "linked"
    linked.mkdir()
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for name in before:
        (linked / name).symlink_to(model / name)
    saved(linked, n_layers=3)
    assert not any(path.is_symlink() for path in linked.iterdir())
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("at", [1, 2, -1])
def test_a_model_is_read_while_its_weights_are_replaced(model, monkeypatch, at):
    """At one of the times when the file is opened, or (-1) at each of them."""
    data, opened, real = (model / WEIGHTS).read_bytes(), [0], safetensors.safe_open

    def replacing(*args, **options):
        file = real(*args, **options)
        opened[0] += 1
        if at in (opened[0], -1):
            write_atomic(model / WEIGHTS, data)
        return file

    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(safetensors, "safe_open", replacing)
    if at > 0:
        assert store.load(model).name == "model"
        assert opened[0] >= at
    else:
        with pytest.raises(CheckpointError, match="changed"):
            store.load(model)


def test_held_out_text_without_a_checksum(model):
    assert store.load(model).held_out("valid") is None
    (model / "valid.txt").write_text("x")
    assert store.load(model).held_out("valid") == model / "valid.txt"


def test_a_tokenizer_file_that_changed(model):
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        store.load(model)


def test_name_of_the_working_folder(model, monkeypatch):
    monkeypatch.chdir(model)
    assert store.load(Path()).name == "model"
