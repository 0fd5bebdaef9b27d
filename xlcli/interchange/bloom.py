"""BLOOM in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from xlcli.interchange.format import PARTS, Format
from xlcli.interchange.llama import with_memory
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source


class Bloom(Format):
    """Pre-norm Transformer with ALiBi, LayerNorm, also of the embeddings, and biases (BigScience Workshop 2022)."""

    name = "bloom"
    model_types = ("bloom",)
    prefix = "transformer."
    table = "word_embeddings.weight"
    is_fused = True
    is_by_head = True
    start_keys = ("eos_token_id", "bos_token_id")
    """</s> ends each text of the training data, in which <s> does not occur."""
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "word_embeddings.",
        "embedding_norm.": "word_embeddings_layernorm.",
        "stack.final.": "ln_f.",
        "head.": "lm_head.",
        "stack.blocks.": "h.",
        "attention_residual.norm.": "input_layernorm.",
        "feedforward_residual.norm.": "post_attention_layernorm.",
        "attention.output.": "self_attention.dense.",
        "feedforward.up.": "mlp.dense_h_to_4h.",
        "feedforward.down.": "mlp.dense_4h_to_h.",
        **dict.fromkeys(PARTS, "self_attention.query_key_value."),
    }

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train`. The memory is as long as the texts of training."""
        settings = Settings(source.path, source.config)
        settings.require("model_type", *self.model_types)
        dim = settings.take("n_embed", int, settings.take("hidden_size", int, 64))
        length = settings.take("seq_length", int, 2048)
        tied = settings.take("tie_word_embeddings", bool, default=True)
        settings.require("n_inner", 4 * dim)
        settings.require("apply_residual_connection_post_layernorm", False)
        model = {
            "vocab_size": settings.take("vocab_size", int, 250_880),
            "dim": dim,
            "n_layers": settings.take("n_layer", int, settings.take("num_hidden_layers", int, 2)),
            "attention": {
                "kind": "full",
                "n_heads": settings.take("n_head", int, settings.take("num_attention_heads", int, 8)),
                "bias": "all",
            },
            "position": {"kind": "alibi"},
            "norm": {"kind": "layer", "epsilon": settings.take("layer_norm_epsilon", float, 1e-5)},
            "feedforward": {"kind": "gelu-tanh", "ffn_dim": 4 * dim},
            "embedding": {"norm": True, "tied": self.is_tied(source, tied)},
            "dropout": {
                "attention": settings.take("attention_dropout", float, 0.0),
                "residual": settings.take("hidden_dropout", float, 0.0),
            },
            "bias": True,
        }
        fusions = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add")
        settings.finish(*fusions, "skip_bias_add_qkv", "offset_alibi", "pretraining_tp", "slow_but_exact")
        return {"model": model, "train": with_memory(length - 1, length)}
