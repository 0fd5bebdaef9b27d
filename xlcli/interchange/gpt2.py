"""GPT-2 and its kind in the format of Hugging Face, to be imported: GPT-Neo, GPT-J, GPT-NeoX (Pythia), OPT, BLOOM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from xlcli.config import ModelConfig
from xlcli.config.position import LearnedPositionConfig
from xlcli.interchange.format import HEAD_BIAS, PARTS, PIECES, SENTENCEPIECE, TOKENIZER, Format, Place
from xlcli.interchange.llama import MOST_LAYERS, N_SINKS, projections, rotary, with_memory
from xlcli.interchange.source import Settings, Source

_TANH = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu-tanh")
_ACTIVATIONS = {**_TANH, "gelu": "gelu", "relu": "relu"}
_DROPOUTS = ("embedding", "attention", "residual")
_KEYS = {  # settings by their names here, and the names that families give them
    "vocab_size": ("vocab_size",),
    "dim": ("n_embd", "n_embed", "hidden_size"),
    "length": ("n_positions", "max_position_embeddings", "seq_length"),
    "n_layers": ("n_layer", "num_layers", "num_hidden_layers"),
    "n_heads": ("n_head", "num_heads", "num_attention_heads"),
    "ffn_dim": ("n_inner", "intermediate_size", "ffn_dim"),
    "kind": ("activation_function", "hidden_act"),
    "epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "embedding": ("embd_pdrop", "embed_dropout"),
    "attention": ("attn_pdrop", "attention_dropout"),
    "residual": ("resid_pdrop", "resid_dropout", "hidden_dropout", "dropout"),
}
N_PADDING = 2  # rows of padding before those of the positions, in the table of an OPT


class GPT2(Format):
    """Pre-norm Transformer with LayerNorm, biases and learned positions (Radford et al. 2019)."""

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

    # Values of settings that a model may leave out, by their names here.
    defaults: ClassVar[Mapping[str, Any]] = {
        "ffn_dim": None,
        "kind": "gelu_new",
        "epsilon": 1e-5,
        **dict.fromkeys(_DROPOUTS, 0.1),
    }
    harmless: ClassVar[tuple[str, ...]] = ("reorder_and_upcast_attn",)  # settings that change no prediction

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        settings = Settings(source, source.config)
        settings.require("model_type", *self.model_types)

        def take(kind: Any, *names: str) -> dict[str, Any]:
            """Settings of one type by their names here."""
            return {name: settings.take_any(_KEYS[name], kind, self.defaults.get(name, ...)) for name in names}

        sizes = take(int, "vocab_size", "dim", "n_layers", "ffn_dim")
        length = take(int, "length")["length"]
        settings.require("n_ctx", length)
        settings.require("afn", source.config.get("activation_function", "gelu_new"))
        ffn_dim = sizes.pop("ffn_dim") or 4 * sizes["dim"]
        model = sizes | {
            "attention": {"kind": "full", "bias": "all"} | take(int, "n_heads"),
            # Texts longer than the table of positions are read in overlapping windows.
            "position": {"kind": "learned", "placement": "embedding", "max_len": length, "overflow": "slide"},
            "norm": {"kind": "layer"} | take(float, "epsilon"),
            "feedforward": {"ffn_dim": ffn_dim} | take(_ACTIVATIONS, "kind"),
            "embedding": {"tied": self.is_tied(source, settings.take("tie_word_embeddings", bool, default=True))},
            "dropout": take(float, *_DROPOUTS),
            "bias": True,
        }
        train = with_memory(0, length) | {"segment_len": length, "span": "growing"}
        self.adapt(settings, model, train)
        settings.finish(*self.harmless, *(key for key in source.config if key.startswith("summary_")))
        return {"model": model, "train": train}

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Changes the sections where a family differs from the others."""
        model["attention"]["scaled"] = settings.take("scale_attn_weights", bool, default=True)


class GPTNeo(GPT2):
    """GPT-2 with scores that are not scaled, and local attention in every other layer (Black et al. 2021)."""

    name = "gpt-neo"
    model_types = ("gpt_neo",)
    buffers = (".attention.bias", ".attention.masked_bias")
    zeros = (*HEAD_BIAS, "q_proj.bias", "k_proj.bias", "v_proj.bias")
    is_fused = False
    is_transposed = False
    names: ClassVar[Mapping[str, str]] = {
        **GPT2.names,
        "attention.output.": "attn.attention.out_proj.",
        **projections("attn.attention."),
    }
    defaults: ClassVar[Mapping[str, Any]] = {**GPT2.defaults, **dict.fromkeys(_DROPOUTS, 0.0)}

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        types = settings.take("attention_types", list, [[["global", "local"], 12]])
        kinds: list[Any] = []  # of the layers; a pattern is a list of kinds and how often it is repeated
        for pattern in types:
            match pattern:
                case [list(names), int(n)] if len(names) * n <= MOST_LAYERS >= len(kinds):
                    kinds += names * n
                case _:
                    settings.refuse("attention_types", types)
        if len(kinds) != model["n_layers"] or not all(kind in ("global", "local") for kind in kinds):
            settings.refuse("attention_types", types)
        settings.require("attention_layers", kinds)
        window = settings.take("window_size", int, 256)  # of the tokens that a layer sees, its own included
        if window < 2:
            settings.refuse("window_size", window)
        layers = {"local": {"kind": "local", "window": window - 1}, "global": {"kind": "full"}}
        model["attention"] = {
            "kind": "mixed",
            "n_heads": model["attention"]["n_heads"],
            "layers": [layers[kind] | {"bias": "all", "scaled": False} for kind in kinds],
        }


class GPTJ(GPT2):
    """Both branches read one norm (here stored twice); rotary positions in part of a head (Wang & Komatsuzaki 2021)."""

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
        **projections("attn."),
    }

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
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
    defaults: ClassVar[Mapping[str, Any]] = {**GPTNeo.defaults, "kind": "gelu"}

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        if not settings.take("attention_bias", bool, default=True):
            model["attention"]["bias"] = "none"
        model["dropout"]["embedding"] = model["dropout"]["residual"]  # one setting
        is_parallel = settings.take("use_parallel_residual", bool, default=True)
        model["norm"]["placement"] = "parallel" if is_parallel else "pre"
        base, scaling, share = rotary(settings, "rotary_emb_base", "rotary_pct", 0.25)
        if not 0 < share <= 1:
            settings.refuse("rotary_pct", share)
        head_dim = model["dim"] // max(model["attention"]["n_heads"], 1)
        rotary_dim = None if share == 1 else int(head_dim * share)
        rotate(model, train, layout="half", base=base, scaling=scaling, rotary_dim=rotary_dim)


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
        **projections("self_attn."),
        "attention.output.": "self_attn.out_proj.",
        "feedforward.up.": "fc1.",
        "feedforward.down.": "fc2.",
    }
    defaults: ClassVar[Mapping[str, Any]] = {**GPTNeo.defaults, "kind": "relu", "residual": 0.1}
    harmless = ("activation_dropout", "layerdrop", "init_std", "learned_embeddings")

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
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
        is_norm = "norm." in name or name.startswith("stack.final.")
        key = "layer_norm_elementwise_affine" if is_norm else "enable_bias"
        if source.config.get(key) is False and name.endswith(".bias"):
            return torch.zeros(shape)
        if source.config.get(key) is False and is_norm:
            return torch.ones(shape)
        if name == "head.projection":
            return super().read(source, name, model, shape[::-1]).T
        return super().read(source, name, model, shape)

    def place(self, name: str, model: ModelConfig) -> Place:
        place = super().place(name, model)
        if isinstance(model.position, LearnedPositionConfig) and name.startswith("position."):
            return Place(place.tensor, N_PADDING, N_PADDING + model.position.max_len)
        return place


class Bloom(GPT2):
    """Pre-norm Transformer with ALiBi, LayerNorm, also of the embeddings, and biases (BigScience Workshop 2022)."""

    name = "bloom"
    model_types = ("bloom",)
    table = "word_embeddings.weight"
    is_by_head = True
    is_transposed = False
    start_keys = ("eos_token_id", "bos_token_id")  # </s> ends each text of the training data, which is without <s>
    names: ClassVar[Mapping[str, str]] = {
        **GPT2.names,
        "embedding.table.": "word_embeddings.",
        "embedding_norm.": "word_embeddings_layernorm.",
        "attention_residual.norm.": "input_layernorm.",
        "feedforward_residual.norm.": "post_attention_layernorm.",
        "attention.output.": "self_attention.dense.",
        "feedforward.up.": "mlp.dense_h_to_4h.",
        "feedforward.down.": "mlp.dense_4h_to_h.",
        **dict.fromkeys(PARTS, "self_attention.query_key_value."),
    }
    defaults: ClassVar[Mapping[str, Any]] = {**GPTNeo.defaults, "length": 2048}
    harmless = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add",
                "skip_bias_add_qkv", "offset_alibi", "pretraining_tp", "slow_but_exact")  # fmt: skip

    def adapt(self, settings: Settings, model: dict[str, Any], train: dict[str, Any]) -> None:
        ffn_dim = model["feedforward"]["ffn_dim"]
        if ffn_dim != 4 * model["dim"]:
            settings.refuse("n_inner", ffn_dim)
        settings.require("apply_residual_connection_post_layernorm", False)
        model["position"] = {"kind": "alibi"}
        model["feedforward"]["kind"] = "gelu-tanh"
        model["embedding"]["norm"] = True
        length = train["segment_len"]  # of the texts of training
        train |= with_memory(length - 1, length)


def rotate(model: dict[str, Any], train: dict[str, Any], **position: Any) -> None:
    """Gives the sections rotary positions: distances end at the trained window, whose first tokens are sinks."""
    length = train["segment_len"]
    model["position"] = {"kind": "rope", "clamp_len": length - 1, "n_sinks": N_SINKS} | position
    train |= with_memory(length - 1, length)
