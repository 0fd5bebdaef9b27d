"""Transformer-XL of Hugging Face (transformers 4.35), and `model.pt` of kimiyoung/transformer-xl (import only)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from xlcli.config import ModelConfig
from xlcli.errors import CheckpointError
from xlcli.files import VOCABULARY_LIMIT, read_bounded
from xlcli.interchange.format import PARTS, Format, Place
from xlcli.interchange.pickles import LONGEST_KEY, REMEDY, Record, StoredTensor, read_checkpoint
from xlcli.interchange.source import Settings, Source, folder_of, follow
from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import WordsTokenizer

SEGMENT_LEN = 128  # tokens per call of a model that does not say it, as of the published one
MOST_CUTOFFS = 64
WORDS = "vocab.txt"
PICKLED_WORDS = ("vocab.pkl", "vocab.bin", "cache.pt")  # of Hugging Face and of the original code
ORIGINAL = "model.pt"
MOST_PARTS = 2**17
_CLUSTER = re.compile(r"\.(clusters|rest)\.(\d+)\.")


class TransfoXL(Format):
    """Transformer-XL (Dai et al. 2019)."""

    name = "transfo-xl"
    model_types: ClassVar[tuple[str, ...]] = ("transfo-xl",)
    buffers = ("pos_emb.inv_freq",)
    prefix = "transformer."
    head = "crit.out_layers.0.weight"
    table = "word_emb.emb_layers.0.weight"
    copies = r"crit\.out_.*|.*\.?r_[wr]_bias"
    is_fused = True
    names: ClassVar[Mapping[str, str]] = {
        "stack.blocks.": "layers.",
        **dict.fromkeys(PARTS, "dec_attn.qkv_net."),
        "attention.output.weight": "dec_attn.o_net.weight",
        "attention.position.relative.weight": "dec_attn.r_net.weight",
        "attention.position.biases.content": "dec_attn.r_w_bias",
        "attention.position.biases.position": "dec_attn.r_r_bias",
        "attention_residual.norm.": "dec_attn.layer_norm.",
        "feedforward.up.": "pos_ff.CoreNet.0.",
        "feedforward.down.": "pos_ff.CoreNet.3.",
        "feedforward_residual.norm.": "pos_ff.layer_norm.",
    }
    zero_memory = True  # the first memory is full of zeros

    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        settings = Settings(source, source.config)
        settings.require("model_type", *self.model_types)
        settings.require("sample_softmax", -1, 0)
        settings.require("ext_len", 0)
        settings.require("attn_type", 0)
        vocab_size = settings.take("vocab_size", int, 267_735)
        dim = settings.take("d_model", int, 1024)
        settings.require("n_token", vocab_size)
        older_tied = settings.take("tie_weight", bool, default=True)
        tied = settings.take("tie_word_embeddings", bool, older_tied)
        embedding = _embedding(settings, vocab_size, dim, tied=self.is_tied(source, tied))
        dropout = dict.fromkeys(("embedding", "residual", "feedforward"), settings.take("dropout", float, 0.1))
        is_pre = settings.take("pre_lnorm", bool, default=False)
        n_keys = settings.take("mem_len", int, 1600)
        clamp_len = settings.take("clamp_len", int, 1000)
        same_length = settings.take("same_length", bool, default=True)
        if same_length and n_keys < 2:
            settings.refuse("mem_len", n_keys)
        train = {
            "mem_len": n_keys - 1 if same_length else n_keys,  # with `same_length` the token's own key is one of them
            "segment_len": settings.take("tgt_len", int, SEGMENT_LEN),
            "span": "uniform" if same_length else "growing",
            "batch_size": 1,
        }
        model = {
            "vocab_size": vocab_size,
            "dim": dim,
            "n_layers": settings.take("n_layer", int, 18),
            "attention": {
                "kind": "full",
                "n_heads": settings.take("n_head", int, 16),
                "head_dim": settings.take("d_head", int, 64),
            },
            "position": {
                "kind": "xl",
                "tied": not settings.take("untie_r", bool, default=True),
                "clamp_len": clamp_len if clamp_len > 0 else None,
            },
            "norm": {
                "kind": "layer",
                "placement": "pre" if is_pre else "post",
                "epsilon": settings.take("layer_norm_epsilon", float, 1e-5),
                "final": not is_pre,
            },
            "feedforward": {"kind": "relu", "ffn_dim": settings.take("d_inner", int, 4096)},
            "embedding": embedding,
            "dropout": dropout | {"attention": settings.take("dropatt", float, 0.0)},
            "bias": True,
            "zero_memory": self.zero_memory and n_keys > 0,
        }
        settings.finish("adaptive", "init", "init_range", "init_std", "proj_init_std", "trainer_compatible")
        return {"model": model, "train": train}

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        is_untied = name.endswith(".projection") and not model.embedding.tied
        if is_untied and self.place(name, model).tensor not in source.stored:  # one that is shared is stored once
            name = f"embedding.clusters.{_cluster(name)}.up.weight"
        return super().read(source, name, model, shape)

    def place(self, name: str, model: ModelConfig) -> Place:
        if name.startswith("stack."):
            place = super().place(name, model)
            is_shared = place.tensor.endswith("_bias") and getattr(model.position, "tied", False)
            if is_shared:  # one for all layers
                _, _, last_part = place.tensor.rpartition(".")
                return place._replace(tensor=self.prefix + last_part)
            return place
        # The others belong to a cluster of words: table (weight, bias) and projection, in embedding and head.
        _, _, last_part = name.rpartition(".")
        cluster = _cluster(name)
        if name.startswith("head.tails."):
            return Place(f"crit.cluster_{last_part}")
        if last_part == "projection":
            return Place(f"crit.out_projs.{cluster}")
        # Clusters of one width are parts of one table.
        is_one_table = bool(model.cutoffs) and model.embedding.div_val == 1
        table = 0 if is_one_table else cluster
        if name.endswith(".up.weight"):
            return Place(f"{self.prefix}word_emb.emb_projs.{table}")
        tables = "crit.out_layers"
        if name.startswith("embedding."):
            tables = f"{self.prefix}word_emb.emb_layers"
        tensor = f"{tables}.{table}.{last_part}"
        if not is_one_table:
            return Place(tensor)
        first_word = (0, *model.cutoffs)[cluster]
        return Place(tensor, first_word, model.vocab_size)

    def tokenizer(self, source: Source, model: ModelConfig) -> Tokenizer:
        folder = folder_of(source.path)
        paths = [folder / name for name in (*PICKLED_WORDS, WORDS) if os.path.lexists(folder / name)]
        if not paths:
            return super().tokenizer(source, model)
        path, *_ = paths
        if path.name == WORDS:
            data = read_bounded(follow(path), VOCABULARY_LIMIT)
        else:
            data = _words(follow(path))
        words = data.split()
        if not {b"<unk>", b"<eos>"} <= {*words}:  # then texts are token ids
            return super().tokenizer(source, model)
        if len(words) != model.vocab_size:
            problem = f"has {len(words):,} words, but the model {model.vocab_size:,}"
            raise CheckpointError(f"{path} {problem}.", "Remove it from the folder, and token ids are read.")
        return WordsTokenizer(data, str(path))


def _embedding(settings: Settings, vocab_size: int, dim: int, *, tied: bool) -> dict[str, Any]:
    """Section `model.embedding`: clusters of words, of which each may have a projection of its own."""
    cutoffs = settings.take("cutoffs", list, [20_000, 40_000, 200_000])
    div_val = settings.take("div_val", int, 4)
    if len(cutoffs) > MOST_CUTOFFS or not all(type(cutoff) is int and cutoff < vocab_size for cutoff in cutoffs):
        settings.refuse("cutoffs", cutoffs)
    n_clusters = len(cutoffs) + 1
    inner_dim = settings.take("d_embed", int, 1024)
    share = settings.take("proj_share_all_but_first", bool, default=True)
    ties = settings.take("tie_projs", list, [False] + [share] * len(cutoffs))
    embedding = {"scaled": True, "tied": tied, "cutoffs": cutoffs, "div_val": div_val if cutoffs else 1}
    if inner_dim != dim or (div_val != 1 and not cutoffs):
        embedding["inner_dim"] = inner_dim
    has_projections = div_val > 1 or inner_dim != dim
    if tied and has_projections:
        is_tied = [bool(tie) for tie in ties[:n_clusters]]
        is_tied += [False] * (n_clusters - len(is_tied))  # the list may be shorter
        names = [name for name, pattern in _tie_projs(n_clusters).items() if pattern == is_tied]
        if not names:
            settings.refuse("tie_projs", ties)
        embedding["tied_projections"] = names[0]
    return embedding


def _cluster(name: str) -> int:
    """Cluster of words that a weight of embedding or head belongs to."""
    match = _CLUSTER.search(name)
    if match is None:
        return 0
    return int(match[2]) + 1 if match[1] == "rest" else int(match[2])


def _tie_projs(n: int) -> dict[str, list[bool]]:
    """For each value of `model.embedding.tied_projections`, whether each of `n` projections is shared."""
    return {"all": [True] * n, "none": [False] * n, "rest": [False] + [True] * (n - 1)}


def _words(path: Path) -> bytes:
    """The words of a pickled vocabulary, or of one in a pickled corpus, one in each line."""
    tree = read_checkpoint(path)
    for _ in range(2):  # the state of a corpus has its vocabulary, whose state has the words
        if isinstance(tree, Record):
            tree = tree.state
        if isinstance(tree, dict) and "vocab" in tree:
            tree = tree["vocab"]
    words = tree.get("idx2sym") if isinstance(tree, dict) else None
    if isinstance(words, list) and {*map(type, words)} == {str} and sum(map(len, words)) <= VOCABULARY_LIMIT:
        return b"".join(word.encode("utf-8", "replace") + b"\n" for word in words)
    raise CheckpointError(f"{path} holds no vocabulary.", "Remove it from the folder, and token ids are read.")


class Original(TransfoXL):
    """Transformer-XL as its authors published it. The whole module is pickled, and the first memory is empty."""

    name = "transfo-xl-original"
    model_types = ()
    prefix = ""
    zero_memory = False

    def recognizes(self, path: Path) -> bool:
        return path.name == ORIGINAL or (path / ORIGINAL).is_file()

    def open(self, path: Path) -> Source:
        path = path / ORIGINAL if path.is_dir() else path
        model = read_checkpoint(follow(path))
        try:
            stored = dict(_tensors(model))
            return Source(path, _settings(model.state, stored), stored)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{path} is no model of the original Transformer-XL.", REMEDY) from None

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        tensor = super().read(source, name, model, shape)
        if name.startswith("head.tails."):
            return tensor.flip(0)  # the original code counts the tails of clusters from the last one
        return tensor


def _tensors(model: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a module and of those in it, by names such as `layers.0.weight`. Each module has one place."""
    unread = [("", model)]  # modules with the prefix of the names of what they hold
    module_ids = {id(model)}
    n_parts = 0
    while unread:
        prefix, module = unread.pop()
        parts = {**module.state["_parameters"], **module.state["_buffers"], **module.state["_modules"]}
        n_parts += len(parts)
        if n_parts > MOST_PARTS or any(len(prefix) + len(name) > LONGEST_KEY for name in parts):
            raise ValueError("modules are nested without end")
        for name, part in parts.items():
            if isinstance(part, StoredTensor):
                yield prefix + name, part
            elif part is not None:
                if id(part) in module_ids:
                    raise ValueError("a module is part of two others")
                module_ids.add(id(part))
                unread.append((f"{prefix}{name}.", part))


def _settings(state: dict[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The settings of a module by their names in Hugging Face. What is shared is one tensor under two names."""
    modules = state["_modules"]
    embedding = modules["word_emb"].state
    first_layer = modules["layers"].state["_modules"]["0"].state
    attention = first_layer["_modules"]["dec_attn"].state
    cutoffs = list(embedding["cutoffs"][:-1])  # without the size of the vocabulary
    has_several_projections = embedding["div_val"] > 1
    tie_projs = []
    for i in range(len(cutoffs) + 1):
        projection = stored.get(f"word_emb.emb_projs.{i if has_several_projections else 0}")
        tie_projs.append(stored.get(f"crit.out_projs.{i}") is projection)
    same = ("attn_type", "clamp_len", "d_embed", "d_head", "d_model", "ext_len", "mem_len", "n_head", "n_layer")
    settings = {key: state[key] for key in (*same, "same_length", "sample_softmax", "tgt_len")} | {
        "vocab_size": state["n_token"],
        "div_val": embedding["div_val"],
        "d_inner": stored["layers.0.pos_ff.CoreNet.0.weight"].info.shape[0],
        "pre_lnorm": attention["pre_lnorm"],
        "tie_word_embeddings": stored["crit.out_layers.0.weight"] is stored["word_emb.emb_layers.0.weight"],
        "untie_r": False,
        "dropout": modules["drop"].state["p"],
        "dropatt": attention["_modules"]["dropatt"].state["p"],
        "layer_norm_epsilon": attention["_modules"]["layer_norm"].state["eps"],
    }
    if not all(type(value) in (bool, int, float) for value in (*settings.values(), *cutoffs)):
        raise TypeError("a setting that is no number")
    return settings | {"cutoffs": cutoffs, "tie_projs": tie_projs}
