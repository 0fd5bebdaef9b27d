"""GGUF files of llama.cpp, to be imported and exported: their settings and tensors are those of other formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from xlcli.config import ModelConfig, Tree
from xlcli.config.position import RopePositionConfig
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import open_regular, parse_json
from xlcli.files.tensors import TensorInfo, with_prefix
from xlcli.interchange.format import OWN, PARTS, Format
from xlcli.interchange.gguf_file import MAGIC, read_file, shortest, write_file
from xlcli.interchange.gguf_vocabulary import read_vocabulary, unused_id, write_vocabulary
from xlcli.interchange.gpt2 import GPT2, GPTNeoX
from xlcli.interchange.llama import Gemma3, Llama, model_kind, query_scale
from xlcli.interchange.pickles import StoredTensor
from xlcli.interchange.source import CAN, END, START, Source, follow
from xlcli.interchange.vocabulary import DEFAULT
from xlcli.model.position.rope import rope_frequencies
from xlcli.store.layout import SavedConfig
from xlcli.text.base import Tokenizer

_FUSED = ".attn_qkv."
_FREQUENCIES = "rope_freqs.weight"
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.causal": "is_causal",
}
_LLAMA = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GEMMA3 = _LLAMA | {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GPT2 = _SIZES | {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_GPT_NEOX = _SIZES | {
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.dimension_count": "rotary_pct",
    "rope.freq_base": "rotary_emb_base",
    "use_parallel_residual": "use_parallel_residual",
}
_LAYERS_OF_27B = 62  # layers of the one Gemma 3 whose scores are not divided by the root of the width of a head


def _as_gpt_neox(config: Mapping[str, Any], width: Any) -> dict[str, Any]:
    """The settings of a GPT-NeoX, in which a share of each head is rotated, not a number of features."""
    share = config.get("rotary_pct", width)
    with suppress(TypeError, ArithmeticError):  # refused later
        share = math.nextafter(share / width, 1)  # its product is not below the number
    return {**config, "model_type": "gpt_neox", "rotary_pct": share}


def _as_gemma3(config: Mapping[str, Any], width: Any) -> dict[str, Any]:
    """The settings of a Gemma 3, with those that llama.cpp takes where a file has none."""
    scalar = config.get("head_dim", width)
    if config.get("num_hidden_layers") == _LAYERS_OF_27B:
        scalar = width
    implied = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": width, "rope_theta": 10_000.0}
    implied |= {"sliding_window": 0, "query_pre_attn_scalar": scalar}
    return {**implied, **config, "model_type": "gemma3_text"}


_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
_PERMUTED = ("llama",)  # architectures with the layout `interleaved` of queries and keys, not `half`
_WIDTHS = ("attention.value_length", "rope.dimension_count")
_UNUSED = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout")  # change nothing
_LENGTH = "llama.rope.scaling.original_context_length"
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # what files do not say of the scaling of Llama 3
_METADATA, _OWN_CONFIG = "_metadata", f"{OWN}.config"
_COMPUTED = {  # keys of settings that are computed
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": _ORIGINAL,
    "attention.key_length": "query_pre_attn_scalar",
}
_START, _TEMPLATE = "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # ends of a text, a turn, a message


class Architecture(NamedTuple):
    """An architecture of llama.cpp: the format whose settings it has, and their names there.

    `adapt` makes the settings of the format, of these and the width of the model divided by the number of heads.
    """

    format: Format
    keys: Mapping[str, str]
    biases: Mapping[str, str] = {}  # settings that are true if there is a tensor
    adapt: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = lambda config, _: config
    assumed: str = ""  # the activation function, where a file names none


ARCHITECTURES = {  # by name. A new one is added here
    "llama": Architecture(Llama(), _LLAMA, _BIASES),
    "qwen2": Architecture(Llama(), _LLAMA),
    "qwen3": Architecture(Llama(), _LLAMA),
    "gemma3": Architecture(Gemma3(), _GEMMA3, adapt=_as_gemma3),
    "gpt2": Architecture(GPT2(), _GPT2, assumed="approximate GELU (gelu_new), as in the published GPT-2"),
    "gptneox": Architecture(GPTNeoX(), _GPT_NEOX, adapt=_as_gpt_neox, assumed="exact GELU, as in Pythia"),
}


class GGUF(Format):
    """One file with settings, vocabulary and weights. Names of tensors are the same in all architectures."""

    name = "gguf"
    head = "output.weight"
    table = "token_embd.weight"
    copies = r"output\.weight"
    names: ClassVar[Mapping[str, str]] = {
        "embedding.table.": "token_embd.",
        "position.axes.0.": "position_embd.",
        "stack.final.": "output_norm.",
        "head.": "output.",
        "stack.blocks.": "blk.",
        "attention_residual.norm.": "attn_norm.",
        "feedforward_residual.norm.": "ffn_norm.",
        "attention_residual.last_norm.": "post_attention_norm.",
        "feedforward_residual.last_norm.": "post_ffw_norm.",
        "attention.query_norm.": "attn_q_norm.",
        "attention.key_norm.": "attn_k_norm.",
        "attention.query.": "attn_q.",
        "attention.key.": "attn_k.",
        "attention.value.": "attn_v.",
        "attention.output.": "attn_output.",
        "feedforward.gate.": "ffn_gate.",
        "feedforward.up.": "ffn_up.",
        "feedforward.down.": "ffn_down.",
    }

    def recognizes(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with open_regular(path) as (file, _):
            return file.read(len(MAGIC)) == MAGIC

    def open(self, path: Path) -> Source:
        """The source, with settings as in the `config.json` of its architecture, and its metadata."""
        metadata, stored = read_file(follow(path))
        name = metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            problem = f"has the architecture {ascii(name)[:80]}, which xlcli cannot import"
            raise CheckpointError(f"{path} {problem}.", f"xlcli imports {', '.join(ARCHITECTURES)}.")
        if metadata.get("split.count", 1) != 1:
            raise CheckpointError(f"{path} is one part of a model.", "Merge the parts with llama-gguf-split --merge.")
        if self.table not in stored:
            raise CheckpointError(f"{path} has no tensor '{self.table}'.", "Download it again.")
        config = {"model_type": name, **_config(name, metadata, stored), _METADATA: metadata}
        config |= {START: metadata.get(_START), END: [metadata[key] for key in _ENDS if key in metadata]}
        with suppress(ValueError):  # other programs write no such entry
            config[OWN] = parse_json(str(metadata.get(_OWN_CONFIG)).encode())
        names_in_file = {START: _START, END: _ENDS[0]}
        for settings in (ARCHITECTURES[name].keys, _COMPUTED):
            names_in_file |= {setting: f"{name}.{key}" for key, setting in settings.items()}
        return Source(path, config, dict(_divided(stored)), names_in_file)

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        config: dict[str, Any] = {"tie_word_embeddings": self.is_tied(source, tied=True)}
        if _FREQUENCIES in source.stored:  # divisors of frequencies, of which the largest is the factor
            factor = source.take(_FREQUENCIES).max().item()
            length = source.config[_METADATA].get(_LENGTH, 8192)
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor} | _LLAMA3 | {_ORIGINAL: length}
        config |= source.config
        config.pop(OWN, None)
        return _architecture(source).format.sections(replace(source, config=config, stored={}))

    def weights(self, source: Source, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        if _FREQUENCIES in source.stored:
            stored, wanted = source.take(_FREQUENCIES), _factors(model)
            if stored.shape != wanted.shape or not stored.allclose(wanted, rtol=1e-5, atol=0):
                raise CheckpointError(f"{source.path}: {_FREQUENCIES} is not the scaling of Llama 3.", CAN)
        yield from super().weights(source, model)

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        tensor = super().read(source, name, model, shape)
        if "query_pre_attn_scalar" in source.config and ".query_norm." in name:
            return tensor * query_scale(source.config, model)
        if source.config["model_type"] in _PERMUTED:
            return _reordered(name, tensor, model, "(h f two) ... -> (h two f) ...")
        return tensor

    def tokenizer(self, source: Source, model: ModelConfig) -> Tokenizer:
        size = model.vocab_size or 0
        return read_vocabulary(str(source.path), source.config[_METADATA], size, source.first_id(size))

    def chat_templates(self, source: Source) -> dict[str, Any]:
        templates = {}
        for key, value in source.config[_METADATA].items():
            if f"{key}.".startswith(f"{_TEMPLATE}."):  # the one without a name, or another one
                templates[key.removeprefix(_TEMPLATE).removeprefix(".") or DEFAULT] = value
        return templates

    def notices(self, source: Source, tokenizer: Tokenizer) -> list[str]:
        notices = super().notices(source, tokenizer)
        assumed = _architecture(source).assumed
        if assumed:
            notices.append(f"GGUF files of this model do not name its activation function: {assumed}, is used")
        return notices

    def export_config(self, config: SavedConfig) -> dict[str, Any]:
        whole = ARCHITECTURES["llama"].format.export_config(config)
        name = "llama" if whole["model_type"] == "mistral" else whole["model_type"]
        # What a file cannot hold is left out, and found by importing it again.
        keys = (*_LLAMA.values(), "vocab_size", "tie_word_embeddings", "rope_scaling", *ARCHITECTURES[name].biases)
        tree = {key: whole[key] for key in keys if key in whole}
        tree |= {"model_type": name, _METADATA: {"general.architecture": name}}
        for key in ("rms_norm_eps", "rope_theta"):  # numbers of a file are float32
            if tree[key]:
                tree[key] = shortest(tree[key])
        if tree["rope_scaling"] and tree["rope_scaling"]["rope_type"] == "llama3":
            tree["rope_scaling"] |= _LLAMA3
        return tree

    def export_weights(self, weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
        if model_kind(model) in _PERMUTED:
            order = "(h two f) ... -> (h f two) ..."
            weights = {name: _reordered(name, tensor, model, order) for name, tensor in weights.items()}
        tensors = super().export_weights(weights, model)
        if model.position.model_dump()["scaling"]["kind"] == "llama3":
            tensors[_FREQUENCIES] = _factors(model)
        return tensors

    def write(
        self, target: Path, config: Mapping[str, Any], weights: dict[str, Tensor], tokenizer: Tokenizer, templates: Tree
    ) -> list[str]:
        if config["torch_dtype"] == "float64":
            raise ConfigError("the format gguf cannot hold float64.", "Copy the model with --weights float32 first.")
        # The architecture has its settings under its name.
        name = config["model_type"]
        scaling = config["rope_scaling"] or {}
        values = {key: config[setting] for key, setting in _LLAMA.items() if config.get(setting) is not None}
        values |= {"vocab_size": config["vocab_size"], **dict.fromkeys(_WIDTHS, config["head_dim"])}
        if scaling.get("rope_type") == "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
        elif scaling:
            values["rope.scaling.original_context_length"] = scaling[_ORIGINAL]
        metadata = {"general.architecture": name, "general.name": target.stem, _OWN_CONFIG: json.dumps(config[OWN])}
        metadata |= {f"{name}.{key}": value for key, value in values.items()} | write_vocabulary(tokenizer)
        for template, text in templates.items():
            metadata[_TEMPLATE if template == DEFAULT else f"{_TEMPLATE}.{template}"] = text
        # llama.cpp needs a token at which it ends a text, and reads at most as many as there are keys.
        end_ids = config[END]
        notices = []
        if not end_ids:
            end_id = unused_id(tokenizer)
            end_ids = [end_id]
            shown = ascii(tokenizer.texts[end_id]) if tokenizer.texts[end_id] else "no text"
            problem = "the model names no token that ends a text, but llama.cpp needs one"
            notices.append(f"{problem}: the file names {end_id} ({shown})")
        metadata |= dict(zip(_ENDS, end_ids, strict=False))
        unnamed_ids = end_ids[len(_ENDS) :]
        if unnamed_ids:
            notices.append(f"llama.cpp will not end at the tokens {unnamed_ids}: the file names the first {len(_ENDS)}")
        write_file(target, metadata, weights)
        return notices


def _architecture(source: Source) -> Architecture:
    return ARCHITECTURES[source.config[_METADATA]["general.architecture"]]


def _config(name: str, metadata: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Mapping[str, Any]:
    """Translates the settings of a file into those of a `config.json`; unknown ones, refused later, stay."""
    architecture = ARCHITECTURES[name]
    values = with_prefix(f"{name}.", metadata)
    tree: dict[str, Any] = {setting: tensor in stored for setting, tensor in architecture.biases.items()}
    kind = values.pop("rope.scaling.type", "linear")
    factor = values.pop("rope.scaling.factor", None)
    is_unscaled = kind == "none" or (kind == "linear" and not factor)
    if not is_unscaled:
        tree["rope_scaling"] = {"rope_type": kind, "factor": factor}
    n_heads = values.get("attention.head_count")
    head_width = None
    with suppress(LookupError, TypeError, ArithmeticError):
        head_width = values["embedding_length"] // n_heads
    # A key whose value others imply is left out; with another value it stays, and may be refused.
    vocab_size = stored[GGUF.table].info.shape[0]
    implied = {"vocab_size": vocab_size, "attention.head_count_kv": n_heads}
    implied |= dict.fromkeys(_WIDTHS, values.get("attention.key_length", head_width))
    for key, value in values.items():
        if key not in _UNUSED and implied.get(key) != value:
            tree[architecture.keys.get(key, f"{name}.{key}")] = value
    return architecture.adapt(tree | {"vocab_size": vocab_size}, head_width)


def _divided(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors by name, of which one of queries, keys and values in turn is three with a third of the rows each."""
    for name, tensor in stored.items():
        n_rows, *row_shape = tensor.info.shape
        is_fused = _FUSED in name and n_rows % len(PARTS) == 0
        if not is_fused or name.replace(_FUSED, ".attn_q.") in stored:
            yield name, tensor
            continue
        info = TensorInfo(tensor.info.dtype, (n_rows // len(PARTS), *row_shape))
        for i, part in enumerate((".attn_q.", ".attn_k.", ".attn_v.")):
            first_number = i * math.prod(info.shape)
            yield name.replace(_FUSED, part), replace(tensor, info=info, offset=first_number)


def _reordered(name: str, tensor: Tensor, model: ModelConfig, order: str) -> Tensor:
    """A weight or bias of queries or keys with the two halves of each head in another order; others as they are."""
    query, key, _ = PARTS
    is_rotated = query in name or key in name
    if is_rotated:
        return rearrange(tensor, order, two=2, f=model.head_dim // 2)
    return tensor


def _factors(model: ModelConfig) -> Tensor:
    """What the scaling of a model divides each frequency of its rotary positions by, in float32."""
    position, cpu = model.position, torch.device("cpu")
    assert isinstance(position, RopePositionConfig)
    unscaled = rope_frequencies(model.head_dim, cpu, position.base, None)
    scaled = rope_frequencies(model.head_dim, cpu, position.base, position.scaling)
    return (unscaled / scaled).float()
