"""OPT in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.interchange.format import PIECES, SENTENCEPIECE, TOKENIZER, Format
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


class OPT(Format):
    """Transformer with LayerNorm, ReLU, biases and learned positions (Zhang et al. 2022). OPT-350m is post-norm.

    Galactica has neither biases nor weights of norms.
    """

    name = "opt"
    model_types = ("opt",)
    prefix = "model."
    table = "decoder.embed_tokens.weight"
    vocabularies = (TOKENIZER, PIECES, SENTENCEPIECE)
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "decoder.embed_tokens.",
        "embedding.up.": "decoder.project_in.",
        "position.axes.0.": "decoder.embed_positions.",
        "head.projection": "model.decoder.project_out.weight",
        "head.": "lm_head.",
        "stack.final.": "decoder.final_layer_norm.",
        "stack.blocks.": "decoder.layers.",
        "attention_residual.norm.": "self_attn_layer_norm.",
        "feedforward_residual.norm.": "final_layer_norm.",
        "attention.query.": "self_attn.q_proj.",
        "attention.key.": "self_attn.k_proj.",
        "attention.value.": "self_attn.v_proj.",
        "attention.output.": "self_attn.out_proj.",
        "feedforward.up.": "fc1.",
        "feedforward.down.": "fc2.",
    }

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train`. Texts longer than the table of positions are read in overlapping windows."""
        settings = Settings(source.path, source.config)
        settings.require("model_type", *self.model_types)
        dim, length = settings.take("hidden_size", int), settings.take("max_position_embeddings", int)
        inner_dim = settings.take("word_embed_proj_dim", int, dim)
        is_pre = settings.take("do_layer_norm_before", bool, default=True)
        has_biases = settings.take("enable_bias", bool, default=True)
        embedding = {"tied": self.is_tied(source, settings.take("tie_word_embeddings", bool, default=True))}
        model = {
            "vocab_size": settings.take("vocab_size", int),
            "dim": dim,
            "n_layers": settings.take("num_hidden_layers", int),
            "attention": {
                "kind": "full",
                "n_heads": settings.take("num_attention_heads", int),
                "bias": "all" if has_biases else "none",
            },
            "position": {"kind": "learned", "placement": "embedding", "max_len": length, "overflow": "slide"},
            "norm": {
                "kind": "layer",
                "placement": "pre" if is_pre else "post",
                "final": not settings.take("_remove_final_layer_norm", bool, default=False),
            },
            "feedforward": {
                "kind": settings.take("activation_function", _ACTIVATIONS, "relu"),
                "ffn_dim": settings.take("ffn_dim", int),
            },
            "embedding": embedding | ({} if inner_dim == dim else {"inner_dim": inner_dim, "tied_projections": "none"}),
            "dropout": {
                "attention": settings.take("attention_dropout", float, 0.0),
                "residual": settings.take("dropout", float, 0.1),
            },
            "bias": settings.take("layer_norm_elementwise_affine", bool, default=True) or has_biases,
        }
        settings.finish("activation_dropout", "layerdrop", "init_std", "learned_embeddings")
        return {"model": model, "train": {"mem_len": 0, "segment_len": length, "batch_size": 1}}

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        """The weight `name` of xlcli, of this shape. Biases and norms that the settings leave out are 0 and 1."""
        import torch

        is_norm = "norm." in name or name.startswith("stack.final.")
        is_off = source.config.get("layer_norm_elementwise_affine" if is_norm else "enable_bias") is False
        if is_off and (is_norm or name.endswith(".bias")):
            return torch.full(shape, float(name.endswith(".weight")))
        if name == "head.projection":
            return super().read(source, name, model, shape[::-1]).T
        return super().read(source, name, model, shape)

    def place(self, name: str, model: ModelConfig) -> tuple[str, int, int]:
        """Where the weight `name` of xlcli is. The first two rows of the table of positions are those of padding."""
        foreign, start, n = super().place(name, model)
        if name.startswith("position."):
            return foreign, 2, 2 + getattr(model.position, "max_len", 0)
        return foreign, start, n
