"""GPT-Neo, GPT-J and GPT-NeoX (Pythia) in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from xlcli.interchange.format import HEAD_BIAS, PARTS
from xlcli.interchange.gpt2 import GPT2
from xlcli.interchange.llama import MOST_LAYERS, N_SINKS, rotary, with_memory
from xlcli.interchange.settings import Settings

_PROJECTIONS = ("q_proj.", "k_proj.", "v_proj.")


class GPTNeo(GPT2):
    """GPT-2 with scores that are not scaled, and local attention in every other layer (Black et al. 2021)."""

    name = "gpt-neo"
    model_types = ("gpt_neo",)
    buffers = (".attention.bias", ".attention.masked_bias")
    zeros = (*HEAD_BIAS, *(f"{part}bias" for part in _PROJECTIONS))
    is_fused = False
    is_transposed = False
    names: ClassVar[Mapping[str, str]] = {
        **GPT2.names,
        "attention.output.": "attn.attention.out_proj.",
        **{part: f"attn.attention.{name}" for part, name in zip(PARTS, _PROJECTIONS, strict=True)},
    }
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "dim": ("hidden_size", ...),
        "length": ("max_position_embeddings", ...),
        "n_layers": ("num_layers", ...),
        "n_heads": ("num_heads", ...),
        "ffn_dim": ("intermediate_size", None),
        "kind": ("activation_function", "gelu_new"),
        "epsilon": ("layer_norm_epsilon", 1e-5),
        "embedding": ("embed_dropout", 0.0),
        "attention": ("attention_dropout", 0.0),
        "residual": ("resid_dropout", 0.0),
    }

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """A local layer sees `window_size` tokens, its own included."""
        n_layers, types = model["n_layers"], settings.take("attention_types", list, [[["global", "local"], 12]])
        kinds: list[Any] = []
        for pattern in types:
            match pattern:
                case [list(names), int(n)] if len(names) * n <= MOST_LAYERS >= len(kinds):
                    kinds += names * n
                case _:
                    settings.refuse("attention_types", types)
        if len(kinds) != n_layers or not all(kind in ("global", "local") for kind in kinds):
            settings.refuse("attention_types", types)
        settings.require("attention_layers", kinds)
        window = settings.take("window_size", int, 256)
        if window < 2:
            settings.refuse("window_size", window)
        softmax = {"bias": "all", "scaled": False}
        layers = [{"kind": "local", "window": window - 1} if kind == "local" else {"kind": "full"} for kind in kinds]
        model["attention"] = {
            "kind": "mixed",
            "n_heads": model["attention"]["n_heads"],
            "layers": [layer | softmax for layer in layers],
        }


class GPTJ(GPT2):
    """Both branches read the same norm; rotary positions in the first features of a head (Wang and Komatsuzaki 2021).

    Each branch has a norm here, with the same values.
    """

    name = "gpt-j"
    model_types = ("gptj",)
    zeros = ()
    is_fused = False
    is_transposed = False
    names: ClassVar[Mapping[str, str]] = {
        **GPT2.names,
        "feedforward_residual.norm.": "ln_1.",
        "attention.output.": "attn.out_proj.",
        "feedforward.up.": "mlp.fc_in.",
        "feedforward.down.": "mlp.fc_out.",
        **{part: f"attn.{name}" for part, name in zip(PARTS, _PROJECTIONS, strict=True)},
    }

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Beyond the trained window there are sinks, as in Llama."""
        settings.require("rotary", True)
        settings.require("scale_attn_weights", True)
        model["attention"]["bias"] = "none"
        model["norm"]["placement"] = "parallel"
        rotate(model, train, layout="interleaved", rotary_dim=settings.take("rotary_dim", int))


class GPTNeoX(GPT2):
    """Parallel branches with a norm each, and rotary positions in a part of each head (Black et al. 2022; Pythia)."""

    name = "gpt-neox"
    model_types = ("gpt_neox",)
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    prefix = "gpt_neox."
    head = "embed_out.weight"
    table = "embed_in.weight"
    copies = r"embed_out\.weight"
    zeros = ("embed_out.bias",)
    is_by_head = True
    is_transposed = False
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "embed_in.",
        "stack.final.": "final_layer_norm.",
        "head.": "embed_out.",
        "stack.blocks.": "layers.",
        "attention_residual.norm.": "input_layernorm.",
        "feedforward_residual.norm.": "post_attention_layernorm.",
        "attention.output.": "attention.dense.",
        "feedforward.up.": "mlp.dense_h_to_4h.",
        "feedforward.down.": "mlp.dense_4h_to_h.",
        **dict.fromkeys(PARTS, "attention.query_key_value."),
    }
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        **GPTNeo.keys,
        "n_layers": ("num_hidden_layers", ...),
        "n_heads": ("num_attention_heads", ...),
        "kind": ("hidden_act", "gelu"),
        "epsilon": ("layer_norm_eps", 1e-5),
        "embedding": ("hidden_dropout", 0.0),
        "residual": ("hidden_dropout", 0.0),
    }

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Beyond the trained window there are sinks, as in Llama."""
        if not settings.take("attention_bias", bool, default=True):
            model["attention"]["bias"] = "none"
        is_parallel = settings.take("use_parallel_residual", bool, default=True)
        model["norm"]["placement"] = "parallel" if is_parallel else "pre"
        base, scaling, share = rotary(settings, "rotary_emb_base", "rotary_pct", 0.25)
        if not 0 < share <= 1:
            settings.refuse("rotary_pct", share)
        head_dim = model["dim"] // max(model["attention"]["n_heads"], 1)
        rotary_dim = None if share == 1 else int(head_dim * share)
        rotate(model, train, layout="half", base=base, scaling=scaling, rotary_dim=rotary_dim)


def rotate(model: dict[str, Any], train: dict[str, Any], **position: Any) -> None:
    """Gives the sections rotary positions: distances end at the trained window, whose first tokens are sinks."""
    length = train["segment_len"]
    model["position"] = {"kind": "rope", "clamp_len": length - 1, "n_sinks": N_SINKS} | position
    train |= with_memory(length - 1, length)
