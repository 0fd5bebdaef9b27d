import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

from xlcli.config import make
from xlcli.errors import CheckpointError, ResourceError, XLError
from xlcli.files import write_tensors
from xlcli.model.build import build_model
from xlcli.store import folder as store
from xlcli.store.layout import CONFIG, WEIGHTS, config_fingerprint, held_out, read_config, write_config
from xlcli.text.tokenizers.bytes import BytesTokenizer

MODEL = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}, "feedforward": {"ffn_dim": 24}}


def tiny(**more):
    config = make({"model": MODEL | more})
    return config, build_model(config.model, torch.Generator().manual_seed(0))


def saved(folder: Path, **more) -> Path:
    config, network = tiny(**more)
    store.save_model(folder, config, store.weights(network), BytesTokenizer(), {"step": "7"})
    return folder


@pytest.fixture
def model(tmp_path):
    return saved(tmp_path / "model")


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
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(tmp_path, variant):
    config, network = tiny(**VARIANTS[variant])
    store.save_model(tmp_path / "m", config, network.state_dict(), BytesTokenizer(), {"step": "7"})
    store.write_record(tmp_path / "m", {"corpus": "x"})
    loaded = store.load(tmp_path / "m")
    assert (loaded.name, loaded.config, loaded.record, loaded.warnings) == ("m", config, {"corpus": "x"}, ())
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


def test_stored_in_half(tmp_path):
    config, network = tiny()
    half = {name: tensor.bfloat16() for name, tensor in store.weights(network).items()}
    store.save_model(tmp_path / "m", config, half, BytesTokenizer(), {})
    assert {p.dtype for p in store.load(tmp_path / "m").network.parameters()} == {torch.float32}
    loaded = store.load(tmp_path / "m", dtype=torch.float64).network
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, half[name].double())


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
                try:
                    store.load(model)
                except CheckpointError as error:
                    complaint = error.message
                else:
                    complaint = None
                assert complaint is not None or name != WEIGHTS, place
        path.unlink()
        path.write_bytes(whole)
    store.load(model)


def test_files_of_two_models(tmp_path, model):
    other = saved(tmp_path / "other", n_layers=3)
    (model / CONFIG).write_bytes((other / CONFIG).read_bytes())
    with pytest.raises(CheckpointError, match=r"no tensor '.*2\."):
        store.load(model)
    (other / CONFIG).write_bytes(json.dumps(json.loads((saved(tmp_path / "third") / CONFIG).read_text())).encode())
    with pytest.raises(CheckpointError, match="a tensor too many"):
        store.load(other)


def test_a_configuration_of_the_same_shape_but_another_meaning(model):
    config = read_config(model)
    changed = config.model_copy(update={"model": config.model.model_copy(update={"init_std": 0.5})})
    write_config(model, changed)
    with pytest.raises(CheckpointError, match="another model configuration"):
        store.load(model)
    write_config(model, config.model_copy(update={"train": config.train.model_copy(update={"mem_len": 5})}))
    assert store.load(model).config.train.mem_len == 5


def test_another_tokenizer(model, monkeypatch):
    class Other(BytesTokenizer):
        fingerprint = "0" * 64

    monkeypatch.setattr("xlcli.text.tokenizers.registry.load_tokenizer", lambda folder: Other())
    with pytest.raises(CheckpointError, match="another tokenizer"):
        store.load(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "format 2; this xlcli reads up to 1"),
        ({"schema": None}, "does not say its format"),
        ({"schema": True}, "does not say its format"),
        ({"schema": "1"}, "does not say its format"),
        ({"schema": 0}, "does not say its format"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"model": {"_target_": "os.system"}}, "unknown key"),
        ({"model": {"dim": "big"}}, "dim"),
        ({"model": {"dim": -1}}, "dim"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_configurations_that_are_refused(model, change, message):
    tree = json.loads((model / CONFIG).read_text())
    for key, value in change.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    (model / CONFIG).write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=message):
        store.load(model)


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


@pytest.mark.parametrize("change", ABSURD, ids=lambda change: str(change)[:60])
def test_absurd_sizes_allocate_nothing(model, change):
    tree = json.loads((model / CONFIG).read_text())
    tree["model"] |= change
    (model / CONFIG).write_text(json.dumps(tree))
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"larger network|is needed|has no tensor"):
        store.load(model)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-42])
def test_weights_that_make_no_sense_are_pointed_at(tmp_path, value):
    config, network = tiny()
    name, parameter = next(iter(network.named_parameters()))
    with torch.no_grad():
        parameter.fill_(value)
    store.save_model(tmp_path / "m", config, store.weights(network), BytesTokenizer(), {})
    (warning,) = store.load(tmp_path / "m").warnings
    assert name in warning


def test_a_weight_of_the_wrong_type(model):
    config, network = tiny()
    bad = {name: tensor.long() for name, tensor in store.weights(network).items()}
    write_tensors(model / WEIGHTS, bad, {"config": config_fingerprint(config)})
    with pytest.raises(CheckpointError, match="is I64"):
        store.load(model)


def test_saving_again_replaces_only_the_weights(model):
    config, network = tiny()
    before = {path.name: path.stat().st_ino for path in model.iterdir()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    store.save_model(model, config, store.weights(network), BytesTokenizer(), {"step": "8"})
    after = {path.name: path.stat().st_ino for path in model.iterdir()}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after[WEIGHTS] != before[WEIGHTS]
    loaded = store.load(model).network
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), loaded.parameters(), strict=True))


def test_another_model_never_leaves_a_mixture(model, monkeypatch):
    config, network = tiny(n_layers=3)

    def full(*_args):
        raise ResourceError("disk full.")

    monkeypatch.setattr(store, "write_tensors", full)
    with pytest.raises(ResourceError):
        store.save_model(model, config, store.weights(network), BytesTokenizer(), {})
    assert not store.is_model(model)


def test_a_missing_weight_is_a_bug(tmp_path):
    config, network = tiny()
    weights = store.weights(network)
    weights.popitem()
    with pytest.raises(KeyError):
        store.save_model(tmp_path / "m", config, weights, BytesTokenizer(), {})


def test_read_only_folder_says_so(tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(XLError, match="permission denied") as caught:
        saved(tmp_path / "m")
    assert caught.value.exit_code == 4


def test_clear_removes_the_model_and_nothing_else(model):
    for name in ("record.json", "metrics.jsonl", "valid.txt", "test.txt", "mine.txt", ".lock", ".tmp-1-a"):
        (model / name).touch()
    (model / "checkpoints" / "step-00000001").mkdir(parents=True)
    (model / "notes").mkdir()
    store.clear(model)
    assert sorted(path.name for path in model.iterdir()) == [".lock", "mine.txt", "notes"]


def test_clear_follows_no_link(tmp_path, model):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (model / "checkpoints").symlink_to(outside)
    store.clear(model)
    assert (outside / "precious").exists()


def test_held_out(model):
    assert held_out(model, "valid") is None
    (model / "valid.txt").write_text("x")
    assert held_out(model, "valid") == model / "valid.txt"
    (model / "test.txt").symlink_to("/etc/passwd")
    assert held_out(model, "test") is None


def test_name_of_the_working_folder(model, monkeypatch):
    monkeypatch.chdir(model)
    assert store.load(Path()).name == "model"
