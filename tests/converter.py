"""Models of Hugging Face as GGUF files, written with the package gguf as the converter of llama.cpp does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {"gpt_neox": "gptneox", "gemma3_text": "gemma3"}
"""Names in llama.cpp, where they are others than in Hugging Face."""


def to_gguf(
    source: Path, path: Path, *, kind: str = "F32", pre: str = "", without: tuple[str, ...] = (), **metadata: object
) -> Path:
    """Writes the model of a Hugging Face folder with the names and the order of rows of the converter of llama.cpp.

    Args:
        source: The folder.
        path: The file.
        kind: Type of the numbers in matrices.
        pre: Name of the patterns of its vocabulary; empty: without one.
        without: Settings that are left out.
        metadata: Other keys and values, with two underscores for each dot.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    settings = {"gpt2": add_gpt2, "gptneox": add_gpt_neox}.get(arch, add_llama)
    n_layers, n_heads = settings(writer, config)
    writer.add_block_count(n_layers)
    writer.add_head_count(n_heads)
    for key in without:
        del writer.kv_data[0][f"{arch}.{key}"]
    for key, value in metadata.items():
        kind_of_value = gguf.GGUFValueType.UINT64 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key.replace("__", "."), value, kind_of_value)
    if pre:
        add = add_pieces if pre == "default" else add_vocabulary
        add(writer, json.loads((source / "tokenizer.json").read_text()), pre, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], n_layers)
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
            values = values.T
        if arch == "llama" and re.search(r"(q|k)_proj", name):
            heads = n_heads if "q_proj" in name else config["num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if arch == "gptneox" and "query_key_value" in name:
            values = values.reshape(n_heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        values, quantization = (
            np.ascontiguousarray(values),
            gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"],
        )
        name = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_gpt2(writer: gguf.GGUFWriter, config: dict) -> tuple[int, int]:
    """Writes the settings of a GPT-2; returns its number of layers and of heads."""
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    return config["n_layer"], config["n_head"]


def add_gpt_neox(writer: gguf.GGUFWriter, config: dict) -> tuple[int, int]:
    """Writes the settings of a GPT-NeoX; no base of rotary positions, as in the converter."""
    rope, n_heads = config.get("rope_parameters") or {}, config["num_attention_heads"]
    share = rope.get("partial_rotary_factor") or config["rotary_pct"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(int(share * (config["hidden_size"] // n_heads)))
    writer.add_parallel_residual(config["use_parallel_residual"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    return config["num_hidden_layers"], n_heads


def add_llama(writer: gguf.GGUFWriter, config: dict) -> tuple[int, int]:
    """Writes the settings of a Llama, Qwen2, Qwen3 or Gemma 3."""
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_rope_freq_base_swa(
            rope.get("sliding_attention", {}).get("rope_theta") or config["rope_local_base_freq"]
        )
        rope = rope.get("full_attention", rope)
    width = config.get("head_dim") or dim // n_heads
    base = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope.get("rope_type", rope.get("type")) == "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_tensor("rope_freqs.weight", frequency_factors(base, width, rope))
    return config["num_hidden_layers"], n_heads


def frequency_factors(base: float, width: int, rope: dict[str, float]) -> np.ndarray:
    """As the converter of llama.cpp computes them for Llama 3.1."""
    factors = []
    for frequency in 1.0 / base ** (np.arange(0, width, 2) / width):
        periods = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
        share = (periods - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        share = min(max(share, 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)


def add_vocabulary(writer: gguf.GGUFWriter, content: dict, pre: str, config: dict) -> None:
    """A byte BPE as llama.cpp holds it."""
    rows = {i: (token, gguf.TokenType.NORMAL) for token, i in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        rows[token["id"]] = token["content"], kind
    size = config.get("vocab_size", len(rows))
    rows = [rows.get(i, (f"[PAD{i}]", gguf.TokenType.UNUSED)) for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    add_special(writer, config)


def add_pieces(writer: gguf.GGUFWriter, content: dict, pre: str, config: dict) -> None:
    """The pieces of a Gemma as llama.cpp holds them: with scores, the higher the earlier two pieces become one."""
    names, kind = {i: name for name, i in content["model"]["vocab"].items()}, gguf.TokenType
    ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(content["model"]["merges"])])}
    kinds = [kind.BYTE if re.fullmatch("<0x..>", names[i]) else kind.NORMAL for i in range(len(names))]
    for token in content["added_tokens"]:
        kinds[token["id"]] = kind.CONTROL if token["special"] else kind.USER_DEFINED
        if token["content"] == "<unk>":
            kinds[token["id"]] = kind.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names[i] for i in range(len(names))])
    writer.add_token_scores([-float(ranks.get(names[i], len(ranks))) for i in range(len(names))])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    add_special(writer, config)


def add_special(writer: gguf.GGUFWriter, config: dict) -> None:
    """The ids of the tokens that begin and end a text."""
    for key in ("bos", "eos"):
        if isinstance(config.get(f"{key}_token_id"), int):
            getattr(writer, f"add_{key}_token_id")(config[f"{key}_token_id"])
