"""GPT-2 in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from xlcli.interchange.format import PARTS, PIECES, SENTENCEPIECE, TOKENIZER, Format
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source

_ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu", "relu": "relu"}


class GPT2(Format):
    """Pre-norm Transformer with LayerNorm, biases and learned positions (Radford et al. 2019)."""

    name = "gpt2"
    model_types = ("gpt2",)
    buffers = (".attn.bias", ".attn.masked_bias")
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

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train`. Texts longer than the table of positions are read in overlapping windows."""
        settings = Settings(source.path, source.config)
        settings.require("model_type", *self.model_types)
        dim, length = settings.take("n_embd", int), settings.take("n_positions", int)
        settings.require("n_ctx", length)
        settings.require("afn", source.config.get("activation_function", "gelu_new"))
        dropout = {"embd_pdrop": "embedding", "attn_pdrop": "attention", "resid_pdrop": "residual"}
        model = {
            "vocab_size": settings.take("vocab_size", int),
            "dim": dim,
            "n_layers": settings.take("n_layer", int),
            "attention": {
                "kind": "full",
                "n_heads": settings.take("n_head", int),
                "bias": "all",
                "scaled": settings.take("scale_attn_weights", bool, default=True),
            },
            "position": {"kind": "learned", "placement": "embedding", "max_len": length, "overflow": "slide"},
            "norm": {"kind": "layer", "epsilon": settings.take("layer_norm_epsilon", float, 1e-5)},
            "feedforward": {
                "kind": settings.take("activation_function", _ACTIVATIONS, "gelu_new"),
                "ffn_dim": settings.take("n_inner", int, 4 * dim),
            },
            "embedding": {"tied": self.is_tied(source, settings.take("tie_word_embeddings", bool, default=True))},
            "dropout": {ours: settings.take(theirs, float, 0.1) for theirs, ours in dropout.items()},
            "bias": True,
        }
        settings.finish("reorder_and_upcast_attn", *(key for key in source.config if key.startswith("summary_")))
        return {"model": model, "train": {"mem_len": 0, "segment_len": length, "batch_size": 1}}
