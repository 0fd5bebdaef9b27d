"""OPT in the format of Hugging Face, to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.interchange.gpt2 import GPT2
from xlcli.interchange.settings import Settings
from xlcli.interchange.source import Source

if TYPE_CHECKING:
    from torch import Tensor


class OPT(GPT2):
    """Transformer with LayerNorm, ReLU, biases and learned positions (Zhang et al. 2022). OPT-350m is post-norm.

    Galactica has neither biases nor weights of norms.
    """

    name = "opt"
    model_types = ("opt",)
    prefix = "model."
    table = "decoder.embed_tokens.weight"
    buffers = ()
    is_fused = False
    is_transposed = False
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
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "dim": ("hidden_size", ...),
        "length": ("max_position_embeddings", ...),
        "n_layers": ("num_hidden_layers", ...),
        "n_heads": ("num_attention_heads", ...),
        "ffn_dim": ("ffn_dim", ...),
        "kind": ("activation_function", "relu"),
        "attention": ("attention_dropout", 0.0),
        "residual": ("dropout", 0.1),
    }
    harmless = ("activation_dropout", "layerdrop", "init_std", "learned_embeddings")

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Norms before or after a branch, and embeddings narrower than the model."""
        inner_dim = settings.take("word_embed_proj_dim", int, model["dim"])
        if inner_dim != model["dim"]:
            model["embedding"] |= {"inner_dim": inner_dim, "tied_projections": "none"}
        if not settings.take("do_layer_norm_before", bool, default=True):
            model["norm"]["placement"] = "post"
        model["norm"]["final"] = not settings.take("_remove_final_layer_norm", bool, default=False)
        has_biases = settings.take("enable_bias", bool, default=True)
        if not has_biases:
            model["attention"]["bias"] = "none"
        model["bias"] = settings.take("layer_norm_elementwise_affine", bool, default=True) or has_biases

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
