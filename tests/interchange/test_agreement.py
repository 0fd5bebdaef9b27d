"""Models of other programs predict what they do there; the numbers are from `make_fixtures.py`."""

import itertools
import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import RUNTIME
from variants import thinned

from xlcli.config import GenerateConfig, InferenceConfig
from xlcli.errors import ConfigError
from xlcli.files import sha256
from xlcli.inference import InferenceSession
from xlcli.interchange import export_model, find_format, import_model
from xlcli.model.decoder import Decoder
from xlcli.store.folder import load
from xlcli.text.foreign import TokenizersTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.safetensors"))
ORIGINAL = [name for name in NAMES if name.startswith("original")]
GROWING = [name for name in NAMES if "growing" in name or name in ORIGINAL]
for _name in ("original-div4", "original-softmax"):
    GROWING.remove(_name)
WITH_TEXT = [name for name in NAMES if name.endswith("-text")]
LONG = ["gpt2", "gpt2-cerebras", "gpt-neo", "opt"]
"""Models with learned positions, and the numbers of a text that has more."""
IMPORTED_ONLY = ("original", "transfo-xl", "gpt", "olmo", "opt", "bloom", "gemma3")
EXPORTED = [name for name in NAMES if not name.startswith(IMPORTED_ONLY)]
OF_BYTES = ["gpt2", "smollm", "llama3", "qwen2", "gpt_neox", "bloom"]
OF_CHARACTERS = ["gemma", "llama2", "mistral", "unigram"]
"""Tokenizers, by what their tokens are made of."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function from the name of a fixture to the model that it becomes."""
    models = tmp_path_factory.mktemp("models")

    def imported(name):
        if not (models / name).exists():
            import_model(source_of(name), models / name)
        return models / name

    return imported


def source_of(name):
    """The folder or file that is imported."""
    source = FIXTURES / name / "source"
    return source / "model.pt" if name.startswith("original") else source


def expected(name):
    """Tensors that the program computed."""
    return load_file(FIXTURES / name / "expected.safetensors")


def start(model, batch):
    """State at the beginning of texts, with the memory that the model was trained with."""
    train = model.config.train
    return model.network.init_state(batch, mem_len=train.mem_len, segment_len=train.segment_len, span=train.span)


def read(network, tokens, state, sizes):
    """Log probability (b t) of each token (b t + 1) after the first, read in calls of these sizes."""
    rows, at = [], 0
    for n in sizes:
        out = network.score(tokens[:, at : at + n], tokens[:, at + 1 : at + n + 1], state)
        rows, state, at = [*rows, -out.nll], out.state, at + n
    assert at == tokens.shape[1] - 1
    return torch.cat(rows, dim=1)


READ = [*itertools.product(NAMES, (torch.float32, torch.float64))]


@pytest.mark.parametrize("case", thinned(READ, READ[::3]), ids=str)
@torch.inference_mode()
def test_log_probabilities_are_those_of_the_source_with_memory_carried_over_calls(folder, case):
    name, dtype = case
    model, numbers = load(folder(name)), expected(name)
    model.network.to(dtype)
    tokens, want = numbers["tokens"], numbers[f"log_probs.{str(dtype).removeprefix('torch.')}"]
    sizes = numbers["segments"].tolist()
    divisions = [sizes]
    assert (start(model, 1).span.kind == "growing") == (name in GROWING)
    if name not in GROWING:
        divisions += [[sum(sizes)], [1, sum(sizes) - 3, 2]]
    for division in divisions:
        got = read(model.network, tokens, start(model, 2), division)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_greedy_continuations_are_those_of_the_source(folder, name):
    model, numbers = load(folder(name)), expected(name)
    logits, state = model.network.logits(numbers["prompt"][None], start(model, 1))
    chosen = []
    for _ in numbers["greedy"]:
        chosen.append(int(logits.argmax()))
        logits, state = model.decoder.logits(torch.tensor([chosen[-1:]]), state)
    assert isinstance(model.decoder, Decoder)
    assert chosen == numbers["greedy"].tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GROWING])
@torch.inference_mode()
def test_kernels_predict_each_token_as_the_source(folder, name):
    model, numbers = load(folder(name)), expected(name)
    tokens, state = numbers["tokens"], start(model, 2)
    for i in range(tokens.shape[1] - 1):
        logits, state = model.decoder.logits(tokens[:, i : i + 1], state)
        got = logits.log_softmax(-1).gather(1, tokens[:, i + 1 :][:, :1])[:, 0]
        torch.testing.assert_close(got, numbers["log_probs.float32"][:, i], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_distances_clamped_at_evaluation_are_those_of_the_source(tmp_path):
    source, numbers = tmp_path / "source", expected("transfo-xl-softmax")
    shutil.copytree(source_of("transfo-xl-softmax"), source)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"clamp_len": -1}))
    import_model(source, tmp_path / "model")
    for clamp_len in (settings["clamp_len"], "none"):
        model = load(tmp_path / "model", InferenceConfig(clamp_len=clamp_len))
        got = read(model.network, numbers["tokens"], start(model, 2), numbers["segments"].tolist())
        assert got.allclose(numbers["log_probs.float32"], rtol=0, atol=1e-5) == (clamp_len != "none")


@pytest.mark.parametrize("name", LONG)
@torch.inference_mode()
def test_a_text_beyond_learned_positions_is_read_in_overlapping_windows(folder, name):
    model, numbers = load(folder(name)), expected(name)
    session = InferenceSession.open(model, RUNTIME, GenerateConfig(), None)
    got = read(session.scorer, numbers["long.tokens"], session.state, [1, 70, 128])
    torch.testing.assert_close(got, numbers["long.log_probs.float32"], rtol=0, atol=1e-5)
    model.network.double()
    session = InferenceSession.open(model, RUNTIME, GenerateConfig(), None)
    got = read(model.network, numbers["long.tokens"], session.state, [199])
    torch.testing.assert_close(got, numbers["long.log_probs.float64"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", WITH_TEXT)
def test_a_text_is_scored_with_the_tokens_of_the_source(folder, name):
    model, numbers = load(folder(name)), expected(name)
    begin = b" " if name == "mistral-text" else b""  # which its tokenizer puts before a text, and xlcli does not
    ids = model.tokenizer.encode(begin + bytes(numbers["text"].tolist()))
    assert list(ids) == numbers["text.ids"].tolist()
    session = InferenceSession.open(model, RUNTIME, GenerateConfig(), None)
    surprisal, _ = session.score(ids)
    torch.testing.assert_close(-torch.from_numpy(surprisal), numbers["text.log_probs.float64"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OF_BYTES + OF_CHARACTERS)
def test_tokens_are_those_of_the_library_without_its_changes_of_the_text(name):
    """The library composes characters for Qwen; of characters "▁" is taken for a space, and begins a text."""
    folder = FIXTURES.parent / "tokenizers" / name
    tokenizer = TokenizersTokenizer((folder / "tokenizer.json").read_bytes(), name, vocab_size=400, start_id=0)
    rows = json.loads((folder / "expected.json").read_text())
    if name in OF_CHARACTERS:
        rows = [row for row in rows if row["text"] and "▁" not in row["text"] and "<s>" not in row["text"]]
    for row in rows:
        text = unicodedata.normalize("NFC", row["text"]) if name in ("qwen2", "gpt_neox") else row["text"]
        if name == "llama2" or (name in ("mistral", "unigram") and not text.startswith(" ")):
            text = " " + text
        assert tokenizer.encode(text.encode()).tolist() == row["ids"], text


def test_a_vocabulary_of_transformer_xl_gives_the_tokens_of_the_source(folder):
    model, numbers = load(folder("transfo-xl-div4")), expected("transfo-xl-div4")
    assert list(model.tokenizer.encode(bytes(numbers["text"].tolist()))) == numbers["text.ids"].tolist()


@pytest.mark.parametrize("name", EXPORTED)
def test_export_and_import_again_is_the_identity_to_the_bit(folder, name, tmp_path):
    export_model(folder(name), tmp_path / "out")
    assert find_format(tmp_path / "out") == "llama"
    import_model(tmp_path / "out", tmp_path / "again")
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert sha256(tmp_path / "again" / file) == sha256(folder(name) / file)


def test_a_window_that_was_changed_after_the_export_holds(folder, tmp_path):
    name = EXPORTED[0]
    export_model(folder(name), tmp_path / "out")
    path = tmp_path / "out/config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"max_position_embeddings": 4 * tree["max_position_embeddings"]}))
    import_model(tmp_path / "out", tmp_path / "again")
    before, after = load(folder(name)).config.model, load(tmp_path / "again").config.model
    assert after.position.clamp_len == 4 * (before.position.clamp_len + 1) - 1


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo", "gptj", "gpt-neox", "olmo"])
def test_models_that_a_format_cannot_hold_are_not_exported(folder, name, tmp_path):
    with pytest.raises(ConfigError, match=r"llama cannot hold .*model\.\w+\.kind"):
        export_model(folder(name), tmp_path / "out")


SUMMARY = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
}
PUBLISHED = {
    "transfo-xl-div4": {
        "ext_len": 0,
        "tgt_len": 128,
        "tie_weight": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    },
    "gpt2": {
        "n_ctx": 64,
        "n_special": 10,
        "predict_special_tokens": True,
        "output_past": True,
        "finetuning_task": "lm",
        "afn": "gelu_new",
        "pruned_heads": {},
        "torchscript": True,
        "use_bfloat16": True,
        "_num_labels": 1,
        "is_decoder": True,
        "do_sample": True,
        "normalize_attention_scores": True,
        "summary_type": "cls_index",
        "summary_proj_to_labels": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama-text": {
        "eos_token_id": [1, 2, 3],
        "pretraining_tp": 1,
        "_name_or_path": "somewhere/llama",
        "max_sequence_length": 2048,
        "unsloth_version": "2024.9.post4",
        "unsloth_fixed": True,
        "is_causal": True,
    },
    "llama-smollm": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "mistral": {"sliding_window": None, "output_attentions": False, "use_cache": False},
    "qwen2": {"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": False, "use_mrope": False},
    "qwen3": {"sliding_window": None, "max_window_layers": 28, "use_sliding_window": False, "rope_scaling": None},
    "gpt2-cerebras": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "gpt2-mgpt": {"gradient_checkpointing": False, "n_special": 0, "predict_special_tokens": True, **SUMMARY},
    "gpt-neo": {
        "attention_dropout": 0,
        "gradient_checkpointing": False,
        "tokenizer_class": "GPT2Tokenizer",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 0.9}},
        **SUMMARY,
    },
    "gptj": {
        "gradient_checkpointing": False,
        "rotary": True,
        "scale_attn_weights": True,
        "tokenizer_class": "GPT2Tokenizer",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
        **SUMMARY,
    },
    "gpt-neox-pythia": {
        "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0,
        "bos_token_id": 1,
        "rope_scaling": None,
    },
    "olmo-text": {"clip_qkv": None, "pretraining_tp": 1, "rope_scaling": None},
    "bloom-heads": {
        "n_embed": 24,
        "num_attention_heads": 6,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "n_inner": None,
        "offset_alibi": 100,
        "pretraining_tp": 2,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
    },
    "gemma3-hub": {
        "_sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "use_bidirectional_attention": False,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 43],
        "transformers_version": "4.55.0.dev0",
    },
    "opt": {"activation_dropout": 0.0, "init_std": 0.02, "layerdrop": 0.1, "prefix": "</s>", "use_cache": True},
    "opt-galactica": {"learned_embeddings": True, "scale_embeddings": False, "tokenizer_class": "PreTrainedTokenizer"},
}
"""Further keys of configurations as they are published."""
BUFFERS = {
    "gpt2": ["h.0.attn.bias"],
    "gpt-neo": [f"transformer.h.0.attn.attention.{end}" for end in ("bias", "masked_bias")],
    "gptj": [f"transformer.h.0.attn.{end}" for end in ("bias", "masked_bias")],
    "gpt-neox-pythia": [f"gpt_neox.layers.0.attention.{end}" for end in ("bias", "masked_bias", "rotary_emb.inv_freq")],
}
"""Tensors of published files that follow from the settings. In GPT-2 no name has a prefix."""
LEFT_OUT = {"gpt2": "transformer.", "opt": "model.", "bloom-heads": "transformer."}
"""Beginnings of names of tensors that the published files of some models lack."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_and_names_as_they_are_published_are_taken(folder, name, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(source_of(name), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | PUBLISHED[name]))
    if name in BUFFERS or name in LEFT_OUT:
        weights = load_file(source / "model.safetensors")
        weights = {key.removeprefix(LEFT_OUT.get(name, " ")): value for key, value in weights.items()}
        weights |= {each: torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() for each in BUFFERS.get(name, ())}
        save_file(weights, source / "model.safetensors")
    import_model(source, tmp_path / "m")
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert sha256(tmp_path / "m" / file) == sha256(folder(name) / file)
