"""Import and export of models of Hugging Face: what is refused, and that export and import again is the identity."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from xlcli import config
from xlcli.errors import CheckpointError, ConfigError, ResourceError
from xlcli.files import sha256
from xlcli.interchange import FORMATS, export_model, find_format, import_model
from xlcli.interchange.source import Source
from xlcli.model.build import build_model
from xlcli.store.folder import save_model
from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import TOKENIZERS

LLAMA = {
    "dim": 16,
    "n_layers": 2,
    "attention": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6},
    "position": {"kind": "rope"},
    "feedforward": {"ffn_dim": 24},
}
WORDS = {
    "num_key_value_heads": "n_kv_heads",
    "num_attention_heads": "n_heads",
    "rms_norm_eps": "epsilon",
    "hidden_size": "",
    "max_position_embeddings": "",
    "rope_type": "ro",
}
"""What the refusal of a value that is out of bounds names."""
LOCAL, FULL = {"kind": "local", "window": 5}, {"kind": "full"}
VARIANTS = {
    "llama": {},
    "biases": {"attention": {"bias": "all"}, "bias": True},
    "untied": {"embedding": {"tied": False}, "feedforward": {"kind": "geglu"}},
    "qwen2": {"attention": {"bias": "qkv"}},
    "qwen3": {"attention": {"qk_norm": True}, "norm": {"epsilon": 1e-6}},
    "sliding": {"attention": LOCAL},
    "mixed": {"attention": {"kind": "mixed", "layers": [FULL | {"bias": "qkv"}, LOCAL | {"bias": "qkv"}]}},
    "linear": {"position": {"base": 500.0, "scaling": {"kind": "linear", "factor": 2.0}}},
    "llama3": {"position": {"scaling": {"kind": "llama3", "factor": 8.0, "original_len": 16}}},
    "clamped": {"position": {"clamp_len": 40}},
}


def make(folder: Path, encoding: str = "float32", tokenizer: Tokenizer | None = None, **shape: object) -> Path:
    """A model with random weights, and a vocabulary of bytes unless another one is given."""
    made = config.make({"model": LLAMA, "train": {"mem_len": 12, "segment_len": 8}}, {"model": shape})
    torch.manual_seed(0)
    network = build_model(made.model)
    weights = {
        name: tensor.normal_(0.1, 0.3) if name != "head.bias" else tensor
        for name, tensor in network.state_dict().items()
    }
    save_model(folder, made, weights, tokenizer or TOKENIZERS["bytes"].train([b""]), {}, encoding=encoding)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model in the format of Hugging Face, without settings of xlcli."""
    folder = tmp_path / "source"
    export_model(make(tmp_path / "made"), folder)
    change(folder, xlcli=None)
    return folder


def change(folder: Path, **settings: object) -> None:
    """Sets keys of `config.json`; None removes one."""
    path = folder / "config.json"
    tree = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def refused(source: Path, word: str, error: type[Exception] = CheckpointError) -> None:
    """The import is refused with this word, and leaves nothing."""
    target = source.parent / "models" / "m"
    with pytest.raises(error) as raised:
        import_model(source, target)
    assert word in str(raised.value)
    assert not target.parent.exists() or not any(target.parent.iterdir())


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_export_and_import_is_the_identity_in_every_encoding(tmp_path, name, encoding):
    identity(make(tmp_path / "made", encoding, **VARIANTS[name]), tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_export_and_import_is_the_identity(tmp_path, name):
    identity(make(tmp_path / "made", **VARIANTS[name]), tmp_path)


def identity(made: Path, folder: Path) -> None:
    assert export_model(made, folder / "out")[0] == "llama"
    import_model(folder / "out", folder / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (folder / "back" / name).read_bytes()
    before, after = (load_file(each / "model.safetensors") for each in (made, folder / "back"))
    assert before.keys() == after.keys()
    assert all(tensor.dtype == after[name].dtype and tensor.equal(after[name]) for name, tensor in before.items())


def test_what_another_program_changes_in_an_exported_model_counts(tmp_path):
    export_model(make(tmp_path / "made"), tmp_path / "out")
    change(tmp_path / "out", rms_norm_eps=0.25)
    import_model(tmp_path / "out", tmp_path / "back")
    tree = json.loads((tmp_path / "back" / "config.json").read_text())
    assert tree["model"]["norm"]["epsilon"] == 0.25
    assert tree["train"]["mem_len"] == tree["model"]["position"]["clamp_len"]


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ({"position": {"kind": "alibi"}}, "position.kind"),
        ({"position": {"layout": "interleaved"}}, "position.layout"),
        ({"norm": {"kind": "layer"}}, "norm.kind"),
        ({"norm": {"placement": "sandwich"}}, "norm.placement"),
        ({"norm": {"final": False}}, "norm.final"),
        ({"embedding": {"scaled": True}}, "embedding.scaled"),
        ({"embedding": {"inner_dim": 8}}, "embedding.inner_dim"),
        ({"feedforward": {"kind": "relu"}}, "feedforward.kind"),
        ({"stack": {"kind": "universal"}}, "stack.kind"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
        ({"attention": {"scaled": False}}, "attention.scaled"),
        ({"attention": {"kind": "lsh"}, "position": {"kind": "rope"}}, "attention."),
        ({"attention": {"qk_norm": True, "bias": "qkv"}}, "attention.bias"),
        ({"attention": {"kind": "mixed", "layers": [FULL, LOCAL]}}, "attention"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, shape, key):
    folder = make(tmp_path / "made", **shape)
    with pytest.raises(ConfigError, match=key):
        export_model(folder, tmp_path / "out", name="llama")
    assert not (tmp_path / "out").exists()


def test_a_bias_of_the_head_is_refused(tmp_path):
    folder = make(tmp_path / "made", bias=True)
    weights = load_file(folder / "model.safetensors")
    made = config.make({"model": LLAMA, "train": {"mem_len": 12, "segment_len": 8}}, {"model": {"bias": True}})
    save_model(folder, made, weights | {"head.bias": torch.ones(256)}, TOKENIZERS["bytes"].train([b""]), {})
    with pytest.raises(ConfigError, match="bias"):
        export_model(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_type", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", [2.0]),
        ("rope_type", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("hidden_act", "gelu_new"),
        ("hidden_act", ["silu"]),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("auto_map", {"AutoModel": "code.py"}),
        ("a_new_setting", 1),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**15),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", 2**70),
        ("head_dim", -6),
        ("hidden_size", 2**40),
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1.0),
        ("vocab_size", 2**30),
        ("num_hidden_layers", 2**30),
        ("num_hidden_layers", 2**80),
        ("rope_theta", 10**400),
    ],
)
def test_a_setting_that_changes_numbers_is_refused_by_name(source, key, value):
    change(source, **{"rope_scaling" if key == "rope_type" else key: value})
    refused(source, WORDS.get(key, key))


def test_settings_that_change_no_number_are_ignored(source):
    change(
        source, _name_or_path="x", use_cache=True, torch_dtype="float16", rope_interleaved=False, is_llama_config=True
    )
    import_model(source, source.parent / "m")


def test_keys_of_current_and_of_older_releases_mean_the_same(source):
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    tree = json.loads((source / "config.json").read_text()) | {"rope_theta": None, "rope_scaling": None}
    older = tree | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3"} | scaling}
    newer = tree | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0} | scaling}
    made = [FORMATS["llama"].sections(Source(source, each, {})) for each in (older, newer)]
    assert made[0] == made[1]
    assert made[0]["model"]["position"]["scaling"]["kind"] == "llama3"
    assert made[0]["model"]["position"]["base"] == 500.0


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_keys_that_are_left_out_have_the_defaults_of_transformers(source, kind):
    tree = json.loads((source / "config.json").read_text()) | {"model_type": kind, "num_hidden_layers": 30}
    left_out = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "use_sliding_window",
    )
    tree = {key: value for key, value in tree.items() if key not in (*left_out, "attention_bias", "mlp_bias")}
    tree |= {"max_position_embeddings": 9000} | ({"use_sliding_window": True} if kind.startswith("qwen") else {})
    made = config.make(FORMATS["llama"].sections(Source(source, tree, {}))).model
    assert made.position.base == 10_000.0
    windows = [getattr(layer, "window", None) for layer in made.attentions]
    first = {"llama": 30, "mistral": 0}.get(kind, 28)
    assert windows == [None] * first + [4095] * (30 - first)  # 4,096 tokens, itself included


def gpt2(folder: Path, **settings: object) -> Path:
    """The smallest GPT-2."""
    folder.mkdir()
    tree = {"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 6}
    (folder / "config.json").write_text(json.dumps(tree | settings))
    shapes = {"wte.weight": (6, 4), "wpe.weight": (8, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    shapes |= {f"h.0.ln_{i}.{part}": (4,) for i in (1, 2) for part in ("weight", "bias")}
    for name, shape in {
        "attn.c_attn": (4, 12),
        "attn.c_proj": (4, 4),
        "mlp.c_fc": (4, 16),
        "mlp.c_proj": (16, 4),
    }.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    weights = {f"transformer.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors")
    return folder


def test_gpt2_has_its_biases_and_transposed_matrices(tmp_path):
    folder = gpt2(tmp_path / "gpt2", n_ctx=8, task_specific_params={"text-generation": {"max_length": 50}})
    assert find_format(folder) == find_format(folder / "model.safetensors") == "gpt2"
    about = import_model(folder, tmp_path / "m")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    name = "stack.blocks.0.attention.value.weight"
    assert after[name].equal(before["transformer.h.0.attn.c_attn.weight"].T[8:])
    assert not after["head.bias"].any()
    assert about["check_bits"] is None  # it has no vocabulary


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_gpt2_refuses_other_attention(tmp_path, key):
    refused(gpt2(tmp_path / "gpt2", **{key: True}), key)


FAMILIES = ["opt", "bloom", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [("hidden_size", 10**9), ("vocab_size", -1), ("a_new_setting", 1)])
def test_settings_of_other_families_are_checked(tmp_path, family, key, value):
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).parent / "fixtures" / family / "source", source)
    change(source, **{key: value})
    refused(source, WORDS.get(key, key))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("bloom", "n_inner", 5),
        ("opt", "activation_function", "silu"),
        ("opt", "word_embed_proj_dim", -1),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "hidden_activation", "silu"),
        ("gemma3", "query_pre_attn_scalar", 0),
        ("gemma3", "query_pre_attn_scalar", [8]),
        ("gemma3", "num_hidden_layers", 10**9),
        ("gemma3", "layer_types", ["full_attention"]),
        ("gemma3", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3", "rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 2.0}}),
        ("gemma3", "rope_parameters", {"full_attention": "default"}),
        ("gemma3", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_what_other_families_have_and_xlcli_lacks_is_refused_by_name(tmp_path, family, key, value):
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).parent / "fixtures" / family / "source", source)
    change(source, **{key: value})
    refused(source, {"rope_parameters": "", "word_embed_proj_dim": "inner_dim"}.get(key, key))


def test_gemma_3_has_norms_of_one_more_than_their_weights_in_float32(tmp_path):
    folder = Path(__file__).parent / "fixtures" / "gemma3-linear" / "source"
    before = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    before = {name: tensor for shard in before for name, tensor in shard.items()}
    import_model(folder, tmp_path / "m")
    after = load_file(tmp_path / "m" / "model.safetensors")
    names = {"norm": "stack.final", "layers.0.self_attn.q_norm": "stack.blocks.0.attention.query_norm"}
    for theirs, ours in names.items():
        stored, made = before[f"model.{theirs}.weight"], after[f"{ours}.weight"]
        assert (stored.dtype, made.dtype) == (torch.bfloat16, torch.float32)
        assert made.double().equal((0.5 if "query" in ours else 1) * (1 + stored.double()))


@pytest.mark.parametrize("period", [3, None])
def test_local_layers_of_gemma_3_follow_from_their_period(tmp_path, period):
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).parent / "fixtures" / "gemma3" / "source", source)
    change(source, layer_types=None, sliding_window_pattern=None, _sliding_window_pattern=period)
    import_model(source, tmp_path / "m")
    attention = json.loads((tmp_path / "m" / "config.json").read_text())["model"]["attention"]
    kinds = [layer["kind"] for layer in attention.get("layers", [attention] * 3)]
    assert kinds == ["local", "local", "full" if period else "local"]


def test_shards_are_one_model(source):
    weights = load_file(source / "model.safetensors")
    names = sorted(weights)
    (source / "model.safetensors").unlink()
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, source / file)
    index = source / "model.safetensors.index.json"
    named = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": named}))
    import_model(source, source.parent / "m")
    outside = source.parent / "c.safetensors"
    save_file({"c": torch.ones(1)}, outside)
    for file in ("../c.safetensors", str(outside), "..", "", ".hidden", "a\0.safetensors"):
        index.write_text(json.dumps({"weight_map": {**named, "c": file}}))
        refused(source, "index.json")
    index.write_text(json.dumps({"weight_map": named}))
    save_file({name: weights[name] for name in names[6:]}, source / "b.safetensors")
    refused(source, "fewer" if weights[names[5]].ndim > 1 else names[5])
    (source / "a.safetensors").unlink()
    refused(source, "a.safetensors")


def test_tensors_that_do_not_fit_the_settings_are_refused(source):
    path = source / "model.safetensors"
    weights, name = load_file(path), "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in weights.items() if key != name}, path)
    refused(source, "")
    save_file(weights | {"score.weight": torch.ones(2, 16)}, path)
    refused(source, "score.weight")
    save_file(weights | {name: weights[name].T.contiguous()}, path)
    refused(source, name)
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, path)
    refused(source, name)
    save_file(weights | {name: weights[name] * torch.nan}, path)
    refused(source, "NaN")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    save_file(load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, path)
    import_model(source, source.parent / "m")


def test_damaged_files_are_refused(source):
    for name, data in (
        ("model.safetensors", b"\xff" * 99),
        ("model.safetensors", (2**40).to_bytes(8, "little")),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "llama", "hidden_size": NaN}'),
    ):
        path = source / name
        before = path.read_bytes()
        path.write_bytes(data)
        refused(source, name)
        path.write_bytes(before)


def test_links_of_a_cache_are_followed(source):
    cache = source.parent / "cache"
    cache.mkdir()
    for path in source.iterdir():
        blob = source.parent / f"blob{path.stat().st_ino}"
        path.rename(blob)
        (cache / path.name).symlink_to(blob)
    import_model(cache, source.parent / "m")
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        for there in ("nowhere", name):
            (cache / name).unlink(missing_ok=True)
            (cache / name).symlink_to(there)
            refused(cache, there)


def test_pointers_of_git_lfs_are_named(source):
    for name in ("config.json", "model.safetensors"):
        path = source / name
        before = path.read_bytes()
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        refused(source, "LFS")
        path.write_bytes(before)


def test_a_full_disk_leaves_nothing(source, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    refused(source, "", ResourceError)


def test_an_existing_target_is_left_as_it_is(source):
    digest = sha256(source / "config.json")
    with pytest.raises(ConfigError):
        import_model(source, source)
    assert sha256(source / "config.json") == digest


def test_mixed_number_types_become_float32(source):
    path = source / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in weights.items()}, path)
    import_model(source, source.parent / "m")
    assert {tensor.dtype for tensor in load_file(source.parent / "m" / "model.safetensors").values()} == {torch.float32}
    import_model(source, source.parent / "small", encoding="int8")
    assert load_file(source.parent / "small" / "model.safetensors")["embedding.table.weight"].dtype == torch.int8


def test_a_format_that_is_given_is_not_taken_for_another_type_of_model(source):
    change(source, model_type="gemma")
    with pytest.raises(CheckpointError, match="model_type"):
        import_model(source, source.parent / "m", name="llama")
    change(source, model_type=None)
    refused(source, "format")
    assert import_model(source, source.parent / "m", name="llama")["format"] == "llama"


def test_models_of_no_format_are_declined_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "reformer"}')
    assert find_format(tmp_path) is None
    refused(tmp_path, "memory")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused(tmp_path, "bert")


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({"config.json": '{"model_type": "mamba"}', "model.safetensors": ""}, "docs/models.md"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "merge"),
        ({"adapter_config.json": "{}", "config.json": '{"model_type": "llama"}'}, "merge"),
        ({"adapter_config.json": "{}", "config.json": '{"model_type": "llama"}', "model.safetensors": ""}, "merge"),
        ({"model.gguf": "GGUF"}, "model.gguf"),
        ({"notes.txt": ""}, "folder that has config.json"),
    ],
)
def test_what_is_no_model_is_told_what_to_give(files, remedy, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        import_model(source, tmp_path / "m")
    assert remedy in caught.value.remedy
    assert not (tmp_path / "m").exists()


def test_quantized_weights_are_refused_with_a_way_out(tmp_path):
    source = export_model(make(tmp_path / "own"), tmp_path / "source") and tmp_path / "source"
    tree = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(tree | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match="quantization_config") as caught:
        import_model(source, tmp_path / "m")
    assert "GGUF" in caught.value.remedy
