"""GGUF files, written with the package gguf as the converter of llama.cpp does: numbers, tokens, damage, export."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from converter import add_vocabulary, to_gguf
from safetensors.torch import load_file, save_file
from test_agreement import FIXTURES, expected, read, start
from test_import import make

from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import sha256
from xlcli.interchange import export_model, find_format, import_model
from xlcli.interchange.gguf import ARCHITECTURES
from xlcli.interchange.gguf_file import QUANTIZED, read_file
from xlcli.interchange.gguf_vocabulary import read_vocabulary, write_vocabulary
from xlcli.store.folder import load
from xlcli.store.layout import read_config_file
from xlcli.text.foreign import TokenizersTokenizer
from xlcli.text.tokenizers import TOKENIZERS

NAMES = ["llama", "llama-biases", "llama-linear", "llama-llama3", "llama-smollm", "qwen2", "qwen3", "gpt2"]
NAMES += ["gpt-neox", "gemma3", "gemma3-hub"]
WITH_TEXT = {"llama-text": "llama-bpe", "gpt2-text": "gpt-2", "gpt-neox-text": "olmo", "gemma3-text": "default"}
PRE = {"gpt2": "gpt-2", "smollm": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2"}
BPE = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"]}
TOKENIZER_FILES = Path(__file__).parent / "tokenizers"


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_log_probabilities_are_those_of_transformers(name, tmp_path):
    file, numbers = to_gguf(FIXTURES / name / "source", tmp_path / "m.gguf"), expected(name)
    assert find_format(file) == "gguf"
    import_model(file, tmp_path / "m")
    import_model(FIXTURES / name / "source", tmp_path / "same")
    model, same = load(tmp_path / "m"), load(tmp_path / "same").network.state_dict()
    assert all(tensor.equal(same[key]) for key, tensor in model.network.state_dict().items())
    got = read(model.network, numbers["tokens"], start(model, 2), numbers["segments"].tolist())
    torch.testing.assert_close(got, numbers["log_probs.float32"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WITH_TEXT)
@torch.inference_mode()
def test_a_text_has_the_tokens_and_numbers_of_transformers(name, tmp_path):
    import_model(to_gguf(FIXTURES / name / "source", tmp_path / "m.gguf", pre=WITH_TEXT[name]), tmp_path / "m")
    model, numbers = load(tmp_path / "m"), expected(name)
    ids = model.tokenizer.encode(bytes(numbers["text"].tolist())).tolist()
    assert ids == numbers["text.ids"].tolist()
    tokens = torch.tensor([[model.tokenizer.start_id, *ids]])
    got = read(model.network, tokens, start(model, 1), [len(ids)])[0]
    torch.testing.assert_close(got.double(), numbers["text.log_probs.float64"], rtol=0, atol=1e-5)


def changed(name: str, folder: Path, **settings: object) -> Path:
    """A copy of a source with other settings, and as many layers as they say, which repeat those of the source."""
    shutil.copytree(FIXTURES / name / "source", folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for i in range(config["num_hidden_layers"], settings.get("num_hidden_layers", 0)):
        tensors |= {key.replace(".layers.0.", f".layers.{i}."): each for key, each in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file({key: each.contiguous().clone() for key, each in tensors.items()}, folder / "model.safetensors")
    return folder


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GLOBAL, NO_PATTERN = "rope.freq_base", ("attention.sliding_window_pattern", "rope.freq_base_swa")
CHANGED = {
    "sequential": ("gpt-neox", {"use_parallel_residual": False}, ()),
    "a-whole-head": ("gpt-neox", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, ()),
    "whole-by-default": (
        "gpt-neox",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        ("rope.dimension_count",),
    ),
    "three-quarters": ("gpt-neox", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}}, ()),
    "pattern": ("gemma3-hub", {"sliding_window_pattern": 2}, ()),
    "soft-cap": ("gemma3-hub", {"final_logit_softcapping": 3.0}, ()),
    "linear": ("gemma3-hub", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, ()),
    "bases-by-default": ("gemma3-hub", {"rope_local_base_freq": 1e4, "rope_theta": 1e4}, (GLOBAL, *NO_PATTERN)),
    "27b": ("gemma3-hub", {"num_hidden_layers": 62, "query_pre_attn_scalar": 5}, ()),
}


@pytest.mark.parametrize("case", CHANGED)
def test_settings_are_those_of_the_folder(case, tmp_path):
    """Those that a file need not have are those that llama.cpp takes (`tests/integrations/test_llama_cpp.py`)."""
    name, settings, without = CHANGED[case]
    source = changed(name, tmp_path / "source", **settings)
    import_model(source, tmp_path / "same")
    import_model(to_gguf(source, tmp_path / "m.gguf", without=without), tmp_path / "m")
    found, wanted = (read_config_file(tmp_path / each).config for each in ("m", "same"))
    assert (found.model, found.train) == (wanted.model, wanted.train)
    weights, same = (load_file(tmp_path / each / "model.safetensors") for each in ("m", "same"))
    assert all(tensor.equal(same[key]) for key, tensor in weights.items())


@pytest.mark.parametrize("n_rotated", range(2, 98, 2))
def test_any_number_of_features_of_a_head_can_be_rotated(n_rotated):
    """Also where a share of them has no exact number: 98 * (2 / 98) is below 2."""
    assert int(98 * ARCHITECTURES["gptneox"].adapt({"rotary_pct": n_rotated}, 98)["rotary_pct"]) == n_rotated


@pytest.mark.parametrize("name", PRE)
def test_tokens_are_those_of_the_library(name, tmp_path):
    folder = TOKENIZER_FILES / name
    content = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_vocabulary(writer, content, PRE[name], {"vocab_size": 400})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_file(tmp_path / "v.gguf")[0]
    ours = read_vocabulary("v.gguf", metadata, 400, 0)
    whole = TokenizersTokenizer((folder / "tokenizer.json").read_bytes(), name, vocab_size=400, start_id=0)
    assert ours.texts == whole.texts
    assert [*ours.separate_ids] == [*whole.separate_ids]
    for row in json.loads((folder / "expected.json").read_text()):
        assert ours.encode(row["text"].encode()).tolist() == whole.encode(row["text"].encode()).tolist()
    written = write_vocabulary(whole)
    assert written["tokenizer.ggml.pre"] == PRE[name]
    for key in ("tokens", "token_type", "merges"):
        assert written[f"tokenizer.ggml.{key}"] == metadata[f"tokenizer.ggml.{key}"]


def test_pieces_of_sentencepiece_are_found_by_their_scores(tmp_path):
    """The pieces of a vocabulary that was trained here; llama.cpp has line ends where it has pictures."""
    text = b"the cat sat on the mat\nthe dog sat\ton the log\n" * 40
    own = TOKENIZERS["sentencepiece"].train([text], 330)
    metadata = write_vocabulary(own)
    assert read_vocabulary("v", metadata, own.vocab_size, own.start_id).fingerprint == own.fingerprint
    plain = {key: value for key, value in metadata.items() if not key.startswith("xlcli.")}
    other = read_vocabulary("v", plain, own.vocab_size, own.start_id)
    for sample in (text[:300], "the cät\n\n  sat 漢字\t.".encode(), b"\xff\xfe the"):
        assert other.encode(sample).tolist() == own.encode(sample).tolist()


@pytest.mark.parametrize("kind", [*QUANTIZED, "F16", "BF16", "F32"])
def test_each_type_of_numbers_is_what_the_package_says(kind, tmp_path):
    """Random blocks, since the package writes only some of these types; scales are finite, as in real files."""
    wanted, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    n_block, size = gguf.GGML_QUANT_SIZES[wanted]
    try:
        blocks = gguf.quantize(random.standard_normal((6, 512), np.float32), wanted).view(np.uint8)
    except NotImplementedError:
        blocks = random.integers(0, 60, (6, 512 // n_block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("x", blocks, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_file(tmp_path / "t.gguf")[1]["x"]
    assert tensor.info == (kind, (6, 512))
    found, exact = tensor.read(), gguf.dequantize(blocks, wanted)
    assert found.dtype == getattr(torch, {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32"))
    assert np.array_equal(found.float().numpy(), exact)
    assert np.isfinite(exact).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@torch.inference_mode()
def test_a_quantized_model_is_stored_in_the_smallest_encoding_that_keeps_its_predictions(kind, tmp_path):
    shape = {"dim": 32, "attention": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 16}, "feedforward": {"ffn_dim": 64}}
    made = make(tmp_path / "made", **shape)
    export_model(made, tmp_path / "hf", name="llama")
    file = to_gguf(tmp_path / "hf", tmp_path / "m.gguf", kind=kind, xlcli__tokenizer="bytes")
    import_model(file, tmp_path / "m")
    import_model(file, tmp_path / "whole", encoding="float32")
    assert read_config_file(tmp_path / "whole").encoding == "float32"
    assert read_config_file(tmp_path / "m").encoding in ("int8", "bfloat16")
    a, b = (load(tmp_path / name) for name in ("m", "whole"))
    tokens = torch.randint(256, (1, 8))
    got, want = (read(model.network, tokens, start(model, 1), [7]).mean() for model in (a, b))
    torch.testing.assert_close(got, want, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "qwen2", "qwen3", "llama-text"])
def test_export_and_import_again_is_the_identity_to_the_bit(name, tmp_path):
    import_model(FIXTURES / name / "source", tmp_path / "m", encoding="float32")
    if name != "llama-text":  # has no vocabulary: token ids cannot be held
        with pytest.raises(ConfigError, match="ids"):
            export_model(tmp_path / "m", tmp_path / "out.gguf", name="gguf")
        assert not (tmp_path / "out.gguf").exists()
        return
    identity(tmp_path / "m", tmp_path)


def identity(made: Path, folder: Path) -> None:
    assert export_model(made, folder / "out.gguf", name="gguf")[0] == "gguf"
    import_model(folder / "out.gguf", folder / "back")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert sha256(made / name) == sha256(folder / "back" / name), name
    assert gguf.GGUFReader(folder / "out.gguf").tensors


SHAPES = {
    "llama": {},
    "biases": {"attention": {"bias": "all"}, "bias": True},
    "untied": {"embedding": {"tied": False}},
    "qwen2": {"attention": {"bias": "qkv"}},
    "qwen3": {"attention": {"qk_norm": True}, "norm": {"epsilon": 1e-6}},
    "linear": {"position": {"base": 500.0, "scaling": {"kind": "linear", "factor": 2.0}}},
    "llama3": {"position": {"scaling": {"kind": "llama3", "factor": 8.0, "original_len": 16}}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_that_was_trained_here_comes_back(name, tmp_path):
    identity(make(tmp_path / "made", **SHAPES[name]), tmp_path)


@pytest.mark.parametrize("encoding", ["float16", "bfloat16"])
def test_matrices_are_written_as_they_are_stored(tmp_path, encoding):
    made = make(tmp_path / "made", encoding)
    export_model(made, tmp_path / "out.gguf", name="gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == {"float16": "F16", "bfloat16": "BF16"}[encoding]
    assert kinds["output_norm.weight"] == "F32"
    import_model(tmp_path / "out.gguf", tmp_path / "back", encoding=None)
    before, after = (load(folder).network.state_dict() for folder in (made, tmp_path / "back"))
    assert all(before[key].equal(after[key]) for key in before)


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ({"position": {"kind": "alibi"}}, "position.kind"),
        ({"feedforward": {"kind": "geglu"}}, "feedforward.kind"),
        ({"attention": {"kind": "local", "window": 5}}, "attention"),
        ({"attention": {"qk_norm": True, "bias": "all"}}, "attention.bias"),
        ({"position": {"scaling": {"kind": "llama3", "low_freq_factor": 2.0}}}, "low_freq_factor"),
        ({"norm": {"epsilon": 1.00000001e-5}}, "norm.epsilon"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(shape, key, tmp_path):
    with pytest.raises(ConfigError, match=key):
        export_model(make(tmp_path / "made", **shape), tmp_path / "out.gguf", name="gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_float64_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="float64"):
        export_model(make(tmp_path / "made", "float64"), tmp_path / "out.gguf", name="gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "out.gguf").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"out\.gguf"):
        export_model(make(tmp_path / "made"), tmp_path / "out.gguf", name="gguf")
    assert (tmp_path / "out.gguf").read_bytes() == b"mine"


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    file = to_gguf(FIXTURES / "llama" / "source", tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        import_model(file, tmp_path / "m")


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, "llama.rope.scaling.type"),
        ({"llama__rope__dimension_count": 2}, "rope.dimension_count"),
        ({"llama__attention__value_length": 2}, "attention.value_length"),
        ({"llama__vocab_size": 7}, "llama.vocab_size"),
        ({"llama__logit_scale": 2.0}, "llama.logit_scale"),
        ({"llama__block_count": 2**31}, "llama.block_count"),
        ({"llama__attention__head_count": 0}, "n_heads"),
        ({"llama__attention__head_count": "4"}, "llama.attention.head_count"),
        ({"llama__embedding_length": 2**40}, "llama.embedding_length"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"split__count": 3}, "merge"),
        ({"general__alignment": 32.0}, "TypeError"),
        ({"general__alignment": 0}, "alignment"),
        ({"general__alignment": 3}, "alignment"),
        ({"tokenizer__ggml__model": "t5", "tokenizer__ggml__tokens": ["a"]}, "t5"),
        (BPE | {"tokenizer__ggml__pre": "tekken"}, "tekken"),
        ({"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": [1, 2]}, "TypeError"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__tokens": ["a", "a"]}, "vocabulary"),
        ({"tokenizer__ggml__model": "llama"}, "vocabulary"),
        (BPE | {"tokenizer__ggml__merges": ["b c"]}, "ValueError"),
        (BPE | {"tokenizer__ggml__merges": [1, 2]}, "merges"),
        ({"xlcli__tokenizer": "sentencepiece"}, "sentencepiece"),
        ({"xlcli__config": "{" * 4000}, None),
        ({"xlcli__config": '{"model": []}'}, "cannot be imported"),
        ({"tokenizer__huggingface__json": "{}", "tokenizer__ggml__model": "gpt2"}, "KeyError"),
    ],
)
def test_metadata_that_changes_predictions_or_makes_no_sense_is_refused(metadata, word, tmp_path):
    file = to_gguf(FIXTURES / "llama" / "source", tmp_path / "m.gguf", **metadata)
    if word is None:
        import_model(file, tmp_path / "m")
        return
    with pytest.raises(CheckpointError, match=re.escape(word)):
        import_model(file, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def gpt_neox(key: str, value: object, word: str) -> tuple[str, dict[str, object], str]:
    return "gpt-neox", {f"gptneox__{key}": value}, word


def gemma3(key: str, value: object, word: str) -> tuple[str, dict[str, object], str]:
    return "gemma3", {f"gemma3__{key}": value}, word


@pytest.mark.parametrize(
    ("name", "metadata", "word"),
    [
        gpt_neox("rope__dimension_count", 0, "rotary_dim"),
        gpt_neox("rope__dimension_count", 3, "rotary_dim"),
        gpt_neox("rope__dimension_count", 16, "rope.dimension_count"),
        gpt_neox("rope__dimension_count", 2**63, "rope.dimension_count"),
        gpt_neox("rope__dimension_count", "", "rope.dimension_count"),
        gpt_neox("rope__dimension_count", float("nan"), "rope.dimension_count"),
        gpt_neox("attention__head_count", 0, "rope.dimension_count"),
        gpt_neox("attention__head_count", "2", "attention.head_count"),
        gpt_neox("attention__head_count_kv", 1, "head_count_kv"),
        gpt_neox("attention__key_length", 4, "key_length"),
        gpt_neox("embedding_length", 2**40, "embedding_length"),
        gpt_neox("block_count", 2**31, "n_layers"),
        gpt_neox("use_parallel_residual", 1, "use_parallel_residual"),
        gpt_neox("rope__scaling__type", "yarn", "rope.scaling.type"),
        gpt_neox("expert_count", 8, "expert_count"),
        gemma3("attention__sliding_window", 0, "sliding_window"),
        gemma3("attention__sliding_window", 2**40, "sliding_window"),
        gemma3("attention__sliding_window", "6", "sliding_window"),
        gemma3("attention__sliding_window_pattern", [True, False], "sliding_window_pattern"),
        gemma3("attention__sliding_window_pattern", 2**40, "sliding_window_pattern"),
        gemma3("attention__key_length", 0, "attention.key_length"),
        gemma3("attention__key_length", "8", "attention.key_length"),
        gemma3("attention__head_count", 0, "n_heads"),
        gemma3("attention__head_count", [4, 4], "attention.head_count"),
        gemma3("attention__head_count_kv", 3, "n_kv_heads"),
        gemma3("block_count", 2**40, "block_count"),
        gemma3("rope__freq_base_swa", 0.0, "local_base"),
        gemma3("rope__freq_base_swa", float("nan"), "local_base"),
        gemma3("final_logit_softcapping", -1.0, "logit_softcap"),
        gemma3("attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        gemma3("vision__block_count", 27, "vision"),
    ],
)
def test_metadata_of_other_architectures_is_refused(name, metadata, word, tmp_path):
    file = to_gguf(FIXTURES / name / "source", tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=word) as caught:
        import_model(file, tmp_path / "m")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "m").exists()


def test_a_gemma_without_windows_is_refused(tmp_path):
    """llama.cpp limits its logits unless the file says otherwise."""
    file = to_gguf(FIXTURES / "gemma3" / "source", tmp_path / "m.gguf", without=("attention.sliding_window",))
    with pytest.raises(CheckpointError, match="sliding_window"):
        import_model(file, tmp_path / "m")


def header(*parts: object) -> bytes:
    """Numbers as 8 bytes, bytes as they are, strings with their length."""
    rows = (struct.pack("<Q", part) if isinstance(part, int) else part for part in parts)
    return b"".join(row if isinstance(row, bytes) else header(len(row.encode())) + row.encode() for row in rows)


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


BEGIN = b"GGUF" + u32(3)
FORGED = {
    "empty": b"GGUF",
    "version": b"GGUF" + u32(99) + header(0, 0),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + header(0, 0),
    "tensors": BEGIN + header(2**63, 0),
    "keys": BEGIN + header(0, 2**63),
    "keys-of-nothing": BEGIN + header(0, 2**40) + header("a") + u32(0) + b"\0",
    "string": BEGIN + header(0, 1, 2**62) + b"abc",
    "name-not-utf-8": BEGIN + header(0, 1, 2) + b"\xff\xfe" + u32(4) + u32(1),
    "value-not-utf-8": BEGIN + header(0, 1, "a") + u32(8) + header(2) + b"\xff\xfe",
    "type": BEGIN + header(0, 1, "a") + u32(77) + bytes(64),
    "array": BEGIN + header(0, 1, "a") + u32(9) + u32(4) + header(2**61) + bytes(64),
    "array-of-nothing": BEGIN + header(0, 1, "a") + u32(9) + u32(8) + header(2**40) + bytes(2**20),
    "array-of-type": BEGIN + header(0, 1, "a") + u32(9) + u32(99) + header(2**40),
    "arrays-in-arrays": BEGIN + header(0, 1, "a") + (u32(9) + u32(9) + header(1))[:16] * 5000,
    "twice": BEGIN + header(0, 2) + 2 * (header("a") + u32(4) + u32(1)),
    "many-strings": BEGIN + header(0, 1, "a") + u32(9) + u32(8) + header(2**22) + bytes(2**25),
    "many-keys": BEGIN + header(0, 2**22) + b"".join(header(f"{i:07}") + u32(0) + b"\1" for i in range(2**20)),
    "axes": BEGIN + header(1, 0, "x") + u32(2**31) + bytes(64),
    "shape": BEGIN + header(1, 0, "x") + u32(2) + header(2**62, 2**62) + u32(0) + header(0) + bytes(64),
    "shape-of-nothing": BEGIN + header(1, 0, "x") + u32(2) + header(0, 2**62) + u32(0) + header(0) + bytes(64),
    "blocks": BEGIN + header(1, 0, "x") + u32(1) + header(33) + u32(8) + header(0) + bytes(64),
    "kind": BEGIN + header(1, 0, "x") + u32(1) + header(32) + u32(999) + header(0) + bytes(64),
    "offset": BEGIN + header(1, 0, "x") + u32(1) + header(4) + u32(0) + header(2**63) + bytes(64),
    "same-tensor": BEGIN + header(2, 0) + 2 * (header("x") + u32(1) + header(4) + u32(0) + header(0)) + bytes(64),
    "overlap": BEGIN + header(2, 0)
    + b"".join(header(f"x{i}") + u32(1) + header(16) + u32(0) + header(32 * i) for i in range(2)) + bytes(256),
    "same-place": BEGIN + header(1000, 0)
    + b"".join(header(f"x{i}") + u32(1) + header(16384) + u32(0) + header(0) for i in range(1000)) + bytes(2**17),
    "no-architecture": BEGIN + header(0, 0),
    "architecture": BEGIN + header(0, 1, "general.architecture") + u32(8) + header("mamba"),
    "architecture-of-type": BEGIN + header(0, 1, "general.architecture") + u32(9) + u32(4) + header(1) + u32(0),
    "no-table": BEGIN + header(0, 1, "general.architecture") + u32(8) + header("llama"),
}  # fmt: skip

LIMITED = """
import resource, sys, time
from pathlib import Path
from xlcli.errors import CheckpointError
from xlcli.interchange import import_model
for path in sorted(Path(".").glob("*.gguf")):
    began = time.process_time()
    try:
        import_model(path, Path("model"), name="gguf")
    except CheckpointError as error:
        print(path.stem, error.exit_code, time.process_time() - began, sep="\\t")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_forged_files_are_refused_at_once_and_in_little_memory(tmp_path):
    for name, data in FORGED.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=tmp_path, capture_output=True, text=True)
    assert not done.stderr
    *rows, peak = (line.split("\t") for line in done.stdout.splitlines())
    assert {name: code for name, code, _ in rows} == dict.fromkeys(FORGED, "3")
    assert max(float(seconds) for _, _, seconds in rows) < 10
    assert int(peak[0]) < 2 * 2**20
    assert all(path.suffix == ".gguf" for path in tmp_path.iterdir())


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    data = to_gguf(FIXTURES / "llama-text" / "source", tmp_path / "whole.gguf", pre="llama-bpe").read_bytes()
    for size in [*range(0, 400, 7), *range(400, len(data), len(data) // 40), len(data) - 64]:
        (tmp_path / "m.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            import_model(tmp_path / "m.gguf", tmp_path / "m", name="gguf")


def test_vocabularies_that_would_take_long_are_refused():
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []}
    for tokens, kind in ((["x" * (2**22 + 1)], 1), ([str(i) for i in range(2**14 + 1)], 4)):
        values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [kind] * len(tokens)}
        with pytest.raises(CheckpointError, match="too many or too long"):
            read_vocabulary("v", values, len(tokens), 0)


def test_a_vocabulary_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("xlcli.interchange._MOST_TOKENS", 10)
    file = to_gguf(FIXTURES / "llama" / "source", tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="vocabulary"):
        import_model(file, tmp_path / "m")


def test_pieces_that_consist_of_others_in_too_many_ways_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("xlcli.text.foreign._MOST_MERGES", 10)
    file = to_gguf(FIXTURES / "gemma3-text" / "source", tmp_path / "m.gguf", pre="default")
    with pytest.raises(CheckpointError, match="10 ways"):
        import_model(file, tmp_path / "m")
