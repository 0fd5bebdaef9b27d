"""Gemma 3, its models of text alone, in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.interchange.format import Format
from xlcli.interchange.llama import LAYERS, MOST_LAYERS, Llama
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
}
"""Settings that a source may leave out, where they differ from those of Llama."""


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
        """Sections `model` and `train`: those of Qwen3, which has norms of queries and keys too, and what differs."""
        config = {key: value for key, value in source.config.items() if value is not None}
        settings = Settings(source.path, _DEFAULTS | config)
        settings.require("model_type", *self.model_types)
        settings.require("hidden_activation", "gelu_pytorch_tanh")
        settings.require("attn_logit_softcapping")
        if settings.take("query_pre_attn_scalar", float) <= 0:
            settings.refuse("query_pre_attn_scalar", config["query_pre_attn_scalar"])
        softcap = settings.take("final_logit_softcapping", float, None)
        period = settings.take("sliding_window_pattern", int, settings.take("_sliding_window_pattern", int, 6))
        n_layers = settings.take("num_hidden_layers", int)
        types = [LAYERS[i % max(period, 1) != period - 1] for i in range(min(n_layers, MOST_LAYERS))]
        of_layers = Settings(source.path, settings.take("rope_parameters", dict, {}))
        local = Settings(source.path, of_layers.take(LAYERS[1], dict, {}))
        local.require("rope_type", "default")
        local_base = local.take("rope_theta", float, settings.take("rope_local_base_freq", float, 10_000.0))
        translated = {
            **settings.left,
            "model_type": "qwen3",
            "num_hidden_layers": n_layers,
            "layer_types": config.get("layer_types", types),
            "rope_parameters": of_layers.take(LAYERS[0], dict, None),
        }
        for each in (of_layers, local):
            each.finish()
        tree = Llama().sections(replace(source, config=translated))
        model = tree["model"]
        model["position"]["local_base"] = local_base
        model["norm"]["placement"] = "sandwich"
        model["feedforward"]["kind"] = "geglu-tanh"
        model["embedding"]["scaled"] = True
        model["logit_softcap"] = softcap
        return tree

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        """The weight `name` of xlcli, of this shape."""
        import torch

        weight = super().read(source, name, model, shape)
        if "norm." not in name and not name.startswith("stack.final."):
            return weight
        factor = query_scale(source.config, model) if ".query_norm." in name else 1.0
        return factor * (1 + weight.to(torch.promote_types(weight.dtype, torch.float32)))


def query_scale(config: Mapping[str, Any], model: ModelConfig) -> float:
    """Factor of the norm of queries, with which scores are divided by the root of `query_pre_attn_scalar`."""
    scalar = config.get("query_pre_attn_scalar") or _DEFAULTS["query_pre_attn_scalar"]
    return math.sqrt(model.head_dim / scalar)
