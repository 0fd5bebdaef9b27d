"""GPT-2 in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from xlcli.interchange.format import PARTS, PIECES, SENTENCEPIECE, TOKENIZER, Format
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source

_TANH = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu-tanh")
_ACTIVATIONS = {**_TANH, "gelu": "gelu", "relu": "relu"}


class GPT2(Format):
    """Pre-norm Transformer with LayerNorm, biases and learned positions (Radford et al. 2019).

    Attributes:
        keys: Names of settings, and their values where they are missing (`...`: they must not be).
        harmless: Settings that change no prediction.
    """

    name = "gpt2"
    model_types = ("gpt2",)
    buffers: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")
    prefix = "transformer."
    table = "wte.weight"
    vocabularies = (TOKENIZER, PIECES, SENTENCEPIECE)
    is_fused = True
    is_transposed = True
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "wte.",
        "position.axes.0.": "wpe.",
        "stack.final.": "ln_f.",
        "head.": "lm_head.",
        "stack.blocks.": "h.",
        "attention_residual.norm.": "ln_1.",
        "feedforward_residual.norm.": "ln_2.",
        "attention.output.": "attn.c_proj.",
        "feedforward.up.": "mlp.c_fc.",
        "feedforward.down.": "mlp.c_proj.",
        **dict.fromkeys(PARTS, "attn.c_attn."),
    }

    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "dim": ("n_embd", ...),
        "length": ("n_positions", ...),
        "n_layers": ("n_layer", ...),
        "n_heads": ("n_head", ...),
        "ffn_dim": ("n_inner", None),
        "kind": ("activation_function", "gelu_new"),
        "epsilon": ("layer_norm_epsilon", 1e-5),
        "embedding": ("embd_pdrop", 0.1),
        "attention": ("attn_pdrop", 0.1),
        "residual": ("resid_pdrop", 0.1),
    }
    harmless: ClassVar[tuple[str, ...]] = ("reorder_and_upcast_attn",)

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train`. Texts longer than the table of positions are read in overlapping windows."""
        settings = Settings(source.path, source.config)
        settings.require("model_type", *self.model_types)

        def take(kind: Any, *names: str) -> dict[str, Any]:
            """Settings of a type by their names here; several may have one name in the source."""
            keys = {name: self.keys[name] for name in names if name in self.keys}
            found = {key: settings.take(key[0], kind, key[1]) for key in dict.fromkeys(keys.values())}
            return {name: found[key] for name, key in keys.items()}

        sizes = take(int, "dim", "n_layers", "ffn_dim")
        length = take(int, "length")["length"]
        settings.require("n_ctx", length)
        settings.require("afn", source.config.get("activation_function", "gelu_new"))
        model = {
            "vocab_size": settings.take("vocab_size", int),
            "dim": sizes["dim"],
            "n_layers": sizes["n_layers"],
            "attention": {"kind": "full", "bias": "all"} | take(int, "n_heads"),
            "position": {"kind": "learned", "placement": "embedding", "max_len": length, "overflow": "slide"},
            "norm": {"kind": "layer"} | take(float, "epsilon"),
            "feedforward": {"ffn_dim": sizes["ffn_dim"] or 4 * sizes["dim"]} | take(_ACTIVATIONS, "kind"),
            "embedding": {"tied": self.is_tied(source, settings.take("tie_word_embeddings", bool, default=True))},
            "dropout": take(float, "embedding", "attention", "residual"),
            "bias": True,
        }
        train = {"mem_len": 0, "segment_len": length, "batch_size": 1}
        self.adapt(settings, model, train)
        settings.finish(*self.harmless, *(key for key in source.config if key.startswith("summary_")))
        return {"model": model, "train": train}

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Changes the sections where a family differs from the others."""
        model["attention"]["scaled"] = settings.take("scale_attn_weights", bool, default=True)
