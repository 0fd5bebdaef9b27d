"""Llama and its kind in the format of Hugging Face: Mistral, Qwen2, Qwen3, SmolLM2, OLMo, Gemma 3 (text alone)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from xlcli.config import ModelConfig
from xlcli.interchange.format import PARTS, Format
from xlcli.interchange.source import Settings, Source
from xlcli.store.layout import SavedConfig

N_SINKS = 4  # number of first tokens of a text that stay visible (Xiao et al. 2024)
SEGMENT_LEN = 512  # largest number of tokens that evaluation reads at once
MOST_LAYERS = 1024
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
LAYERS = ("full_attention", "sliding_attention")
_FACTORS = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
_SCALING: Mapping[str, Mapping[str, str]] = {  # settings of each scaling of rotary positions, here and in a source
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": _FACTORS | {"original_len": "original_max_position_embeddings"},
}
_DEFAULTS = {  # settings that a Gemma 3 may leave out, where they differ from those of Llama
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
}


def projections(attention: str) -> dict[str, str]:
    """Parts of the names of queries, keys and values in xlcli and in the module `attention` of a format."""
    query, key, value = PARTS
    return {query: f"{attention}q_proj.", key: f"{attention}k_proj.", value: f"{attention}v_proj."}


class Llama(Format):
    """Pre-norm Transformer with RMSNorm, rotary positions and a gated feed-forward branch (Touvron et al. 2023)."""

    name = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "olmo")
    buffers = ("rotary_emb.inv_freq",)
    prefix = "model."
    table = "embed_tokens.weight"
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "embed_tokens.",
        "stack.final.": "norm.",
        "head.": "lm_head.",
        "stack.blocks.": "layers.",
        "attention_residual.norm.": "input_layernorm.",
        "feedforward_residual.norm.": "post_attention_layernorm.",
        **projections("self_attn."),
        "attention.output.": "self_attn.o_proj.",
        "attention.query_norm.": "self_attn.q_norm.",
        "attention.key_norm.": "self_attn.k_norm.",
        "feedforward.gate.": "mlp.gate_proj.",
        "feedforward.up.": "mlp.up_proj.",
        "feedforward.down.": "mlp.down_proj.",
    }

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        settings = Settings(source, source.config)
        kind = settings.take("model_type", {name: name for name in self.model_types}, "llama")
        dim = settings.take("hidden_size", int)
        n_layers = settings.take("num_hidden_layers", int)
        n_heads = settings.take("num_attention_heads", int)
        length = settings.take("max_position_embeddings", int)
        if not 0 < n_layers <= MOST_LAYERS:
            settings.refuse("num_hidden_layers", n_layers)
        bias = "none"
        if kind == "qwen2":
            bias = "qkv"
        elif kind in ("llama", "qwen3", "olmo") and settings.take("attention_bias", bool, default=False):
            bias = "all"
        windows = _windows(kind, n_layers, settings)
        layers: list[dict[str, Any]] = []
        for window in windows:
            # xlcli counts the tokens before a token, a source also the token itself.
            span: dict[str, Any] = {"kind": "full"} if window is None else {"kind": "local", "window": window - 1}
            layers.append(span | {"bias": bias, "qk_norm": kind == "qwen3"})
        is_uniform = len(set(windows)) == 1
        attention = layers[0] if is_uniform else {"kind": "mixed", "layers": layers}
        attention = attention | {
            "n_heads": n_heads,
            "n_kv_heads": settings.take("num_key_value_heads", int, n_heads),
            "head_dim": settings.take("head_dim", int, dim // max(n_heads, 1)),
        }
        base, scaling, share = rotary(settings)
        if share != 1:
            settings.refuse("partial_rotary_factor", share)
        # Distances are clamped to the trained window, whose first tokens are sinks.
        position = {"kind": "rope", "layout": "half", "base": base, "scaling": scaling}
        reach = min(length, max(length if window is None else window for window in windows)) - 1
        if None in windows:
            position |= {"clamp_len": reach, "n_sinks": N_SINKS}
        if kind == "olmo":
            settings.require("clip_qkv")
            norm = {"kind": "layer", "epsilon": 1e-5}
        else:
            norm = {"kind": "rms", "epsilon": settings.take("rms_norm_eps", float, 1e-6)}
        model = {
            "vocab_size": settings.take("vocab_size", int),
            "dim": dim,
            "n_layers": n_layers,
            "attention": attention,
            "position": position,
            "norm": norm,
            "feedforward": {
                "kind": settings.take("hidden_act", _ACTIVATIONS, "silu"),
                "ffn_dim": settings.take("intermediate_size", int),
            },
            "embedding": {"tied": self.is_tied(source, settings.take("tie_word_embeddings", bool, default=False))},
            "dropout": {"attention": settings.take("attention_dropout", float, 0.0)},
            "bias": settings.take("mlp_bias", bool, default=False) if kind == "llama" else False,
        }
        settings.finish("is_llama_config", "pretraining_tp")
        return {"model": model, "train": with_memory(reach, length)}

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        if model.norm.kind == "layer" and name.endswith(("norm.weight", "final.weight")):
            return torch.ones(shape)  # the norms of OLMo have no weights
        return super().read(source, name, model, shape)

    def export_config(self, config: SavedConfig) -> dict[str, Any]:
        model = config.model
        attention = model.attention
        kind = model_kind(model)
        bias = getattr(model.attentions[0], "bias", None)
        windows: list[int | None] = [getattr(layer, "window", None) for layer in model.attentions]
        slides = any(windows) and kind != "llama"
        scaling = model.position.model_dump().get("scaling", {"kind": "none"})
        rope_scaling = {theirs: scaling[ours] for ours, theirs in _SCALING[scaling["kind"]].items()}
        if rope_scaling:
            rope_scaling = {"rope_type": scaling["kind"], **rope_scaling}
        reach = model.clamp_len or (config.train.max_distance(model) if model.has_softmax else 1)
        tree: dict[str, Any] = {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "intermediate_size": model.ffn_dim,
            "num_hidden_layers": model.n_layers,
            "num_attention_heads": attention.n_heads,
            "num_key_value_heads": getattr(attention, "n_kv_heads", None) or attention.n_heads,
            "head_dim": model.head_dim,
            "hidden_act": {"geglu": "gelu"}.get(model.feedforward.kind, "silu"),
            "max_position_embeddings": reach + 1,
            "rms_norm_eps": model.norm.epsilon,
            "rope_theta": getattr(model.position, "base", None),
            "rope_scaling": rope_scaling or None,
            "tie_word_embeddings": model.embedding.tied,
            "attention_dropout": model.dropout.attention,
            "attention_bias": bias == "all" and kind in ("llama", "qwen3"),
            "mlp_bias": model.bias and kind == "llama",
            "sliding_window": None,
            "use_sliding_window": slides,
        }
        if slides:
            tree["sliding_window"] = max(window for window in windows if window) + 1  # with the token itself
        if kind.startswith("qwen"):
            full, sliding = LAYERS
            types = [sliding if window else full for window in windows]
            tree["max_window_layers"] = types.index(sliding) if sliding in types else model.n_layers
            tree["layer_types"] = types
        return tree


class Gemma3(Llama):
    """Llama with norms before and after branches and local layers between those that see all (Gemma Team 2025).

    Norms multiply by 1 + weight, and scores are divided by the root of `query_pre_attn_scalar`: both become weights of
    norms, in float32, which holds them exactly if those of the source are in bfloat16 and the number is head_dim.
    """

    name = "gemma3"
    model_types = ("gemma3_text",)
    keeps_types = False
    names: ClassVar[Mapping[str, str]] = {
        **Llama.names,
        "attention_residual.last_norm.": "post_attention_layernorm.",
        "feedforward_residual.norm.": "pre_feedforward_layernorm.",
        "feedforward_residual.last_norm.": "post_feedforward_layernorm.",
    }
    export_config = Format.export_config

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        config = {key: value for key, value in source.config.items() if value is not None}
        settings = Settings(source, _DEFAULTS | config)
        settings.require("model_type", *self.model_types)
        settings.require("hidden_activation", "gelu_pytorch_tanh")
        settings.require("attn_logit_softcapping")
        if settings.take("query_pre_attn_scalar", float) <= 0:
            settings.refuse("query_pre_attn_scalar", config["query_pre_attn_scalar"])
        softcap = settings.take("final_logit_softcapping", float, None)
        period = settings.take("sliding_window_pattern", int, settings.take("_sliding_window_pattern", int, 6))
        n_layers = settings.take("num_hidden_layers", int)
        # The last layer of each period sees all, the others a window; rotary positions have a base for each type.
        full, sliding = LAYERS
        types = [full if i % max(period, 1) == period - 1 else sliding for i in range(min(n_layers, MOST_LAYERS))]
        rotary_of_types = Settings(source, settings.take("rope_parameters", dict, {}))
        rotary_of_sliding = Settings(source, rotary_of_types.take(sliding, dict, {}))
        rotary_of_sliding.require("rope_type", "default")
        older_base = settings.take("rope_local_base_freq", float, 10_000.0)
        local_base = rotary_of_sliding.take("rope_theta", float, older_base)
        # What is left is as in a Qwen3, which has norms of queries and keys, too.
        as_qwen3 = {
            **settings.left,
            "model_type": "qwen3",
            "num_hidden_layers": n_layers,
            "layer_types": config.get("layer_types", types),
            "rope_parameters": rotary_of_types.take(full, dict, None),
        }
        rotary_of_types.finish()
        rotary_of_sliding.finish()
        tree = Llama().sections(replace(source, config=as_qwen3))
        model = tree["model"]
        model["position"]["local_base"] = local_base
        model["norm"]["placement"] = "sandwich"
        model["feedforward"]["kind"] = "geglu-tanh"
        model["embedding"]["scaled"] = True
        model["logit_softcap"] = softcap
        return tree

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        weight = super().read(source, name, model, shape)
        if "norm." not in name and not name.startswith("stack.final."):
            return weight
        factor = query_scale(source.config, model) if ".query_norm." in name else 1.0
        return factor * (1 + weight.to(torch.promote_types(weight.dtype, torch.float32)))


def query_scale(config: Mapping[str, Any], model: ModelConfig) -> float:
    """Factor of the norm of queries, with which scores are divided by the root of `query_pre_attn_scalar`."""
    scalar = config.get("query_pre_attn_scalar") or _DEFAULTS["query_pre_attn_scalar"]
    return math.sqrt(model.head_dim / scalar)


def model_kind(model: ModelConfig) -> str:
    """The `model_type` that can hold a model, if one can."""
    first = model.attentions[0]
    if getattr(first, "qk_norm", None):
        return "qwen3"
    if getattr(first, "bias", None) == "qkv":
        return "qwen2"
    slides = all(getattr(layer, "window", None) for layer in model.attentions)
    return "mistral" if slides else "llama"


def with_memory(reach: int, length: int) -> dict[str, Any]:
    """Section `train` of a model of windows of `length` tokens, in which a token sees `reach` earlier ones."""
    return {"mem_len": reach, "segment_len": min(length, SEGMENT_LEN), "span": "uniform", "batch_size": 1}


def _windows(kind: str, n_layers: int, settings: Settings) -> list[int | None]:
    """Reads how many tokens a token sees in each layer, itself included; None for a layer in which it sees all.

    The source gives the types of layers one by one, or the number of the first layer that has a window.
    """
    full, sliding = LAYERS
    if kind in ("llama", "olmo"):
        settings.require("layer_types", [full] * n_layers)
        return [None] * n_layers
    is_mistral = kind == "mistral"  # in the others no layer has a window unless they say so
    window = settings.take("sliding_window", int, None if "sliding_window" in settings.config else 4096)
    first_sliding = settings.take("max_window_layers", int, 0 if is_mistral else 28)
    is_used = settings.take("use_sliding_window", bool, is_mistral)
    implied = [sliding if is_used and i >= first_sliding else full for i in range(n_layers)]
    types = settings.take("layer_types", list, implied)
    if len(types) != n_layers or not all(name in LAYERS for name in types):
        settings.refuse("layer_types", types)
    if window is not None and window < 2:
        settings.refuse("sliding_window", window)
    return [window if name == sliding else None for name in types]


def rotary(
    settings: Settings, base_key: str = "rope_theta", share_key: str = "partial_rotary_factor", share: float = 1.0
) -> tuple[float, dict[str, Any], float]:
    """Reads the `base` and `scaling` of rotary positions, and the share of the features of a head that are rotated.

    Current releases of transformers have them in the table `rope_parameters`, older ones in a table `rope_scaling` and
    in `base_key` and `share_key` beside it; `share` is the default. All are taken from `settings`, also those that do
    not count, so that `settings.finish` does not refuse them.
    """
    older_table = settings.take("rope_scaling", dict, {})
    table = Settings(settings.source, settings.take("rope_parameters", dict, older_table))
    older_base = settings.take(base_key, float, 10000.0)
    base = table.take("rope_theta", float, older_base)
    older_share = settings.take(share_key, float, share)
    share = table.take("partial_rotary_factor", float, older_share)
    older_kind = table.take("type", str, "default")
    kind = table.take("rope_type", {"default": "none", "linear": "linear", "llama3": "llama3"}, older_kind)
    scaling = {"kind": kind}
    for ours, theirs in _SCALING[kind].items():
        scaling[ours] = table.take(theirs, int if ours == "original_len" else float)
    table.finish()
    return base, scaling, share
