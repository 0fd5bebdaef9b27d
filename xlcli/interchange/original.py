"""Transformer-XL in `model.pt` of the original code (kimiyoung/transformer-xl), to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.config import ModelConfig
from xlcli.errors import CheckpointError
from xlcli.interchange.pickles import LONGEST_KEY, REMEDY, StoredTensor, read_checkpoint
from xlcli.interchange.source import Source, follow
from xlcli.interchange.transfo_xl import TransfoXL

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.pt"
MOST_PARTS = 2**17


class Original(TransfoXL):
    """Transformer-XL as its authors published it. The whole module is pickled, and the first memory is empty."""

    name = "transfo-xl-original"
    model_types = ()
    prefix = ""
    zero_memory = False

    def recognizes(self, path: Path) -> bool:
        """True if it is, or holds, a file `model.pt`."""
        return path.name == MODEL or (path / MODEL).is_file()

    def open(self, path: Path) -> Source:
        """The source at `path`, a file or its folder, with the settings of Hugging Face."""
        path = path / MODEL if path.is_dir() else path
        model = read_checkpoint(follow(path))
        try:
            stored = dict(_tensors(model))
            return Source(path, _settings(model.state, stored), stored)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{path} is no model of the original Transformer-XL.", REMEDY) from None

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        """The weight `name` of xlcli. The original code counts the tails of clusters from the last one."""
        tensor = super().read(source, name, model, shape)
        return tensor.flip(0) if name.startswith("head.tails.") else tensor


def _tensors(model: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a module and of those in it, by name. Each module has one place."""
    todo, seen, n_parts = [("", model)], {id(model)}, 0
    while todo:
        prefix, module = todo.pop()
        parts = {**module.state["_parameters"], **module.state["_buffers"], **module.state["_modules"]}
        n_parts += len(parts)
        if n_parts > MOST_PARTS or any(len(prefix) + len(name) > LONGEST_KEY for name in parts):
            raise ValueError("modules are nested without end")
        for name, part in parts.items():
            if isinstance(part, StoredTensor):
                yield prefix + name, part
            elif part is not None:
                if id(part) in seen:
                    raise ValueError("a module is part of two others")
                seen.add(id(part))
                todo.append((f"{prefix}{name}.", part))


def _settings(state: dict[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The settings of a module by their names in Hugging Face. What is shared is one tensor under two names."""
    embedding, layer = state["_modules"]["word_emb"].state, state["_modules"]["layers"].state["_modules"]["0"].state
    attention = layer["_modules"]["dec_attn"].state
    cutoffs, is_divided = list(embedding["cutoffs"][:-1]), embedding["div_val"] > 1
    pairs = [(f"crit.out_projs.{i}", f"word_emb.emb_projs.{i if is_divided else 0}") for i in range(len(cutoffs) + 1)]
    same = ("attn_type", "clamp_len", "d_embed", "d_head", "d_model", "ext_len", "mem_len", "n_head", "n_layer")
    settings = {key: state[key] for key in (*same, "same_length", "sample_softmax", "tgt_len")} | {
        "vocab_size": state["n_token"],
        "div_val": embedding["div_val"],
        "d_inner": stored["layers.0.pos_ff.CoreNet.0.weight"].info.shape[0],
        "pre_lnorm": attention["pre_lnorm"],
        "tie_word_embeddings": stored["crit.out_layers.0.weight"] is stored["word_emb.emb_layers.0.weight"],
        "untie_r": False,
        "dropout": state["_modules"]["drop"].state["p"],
        "dropatt": attention["_modules"]["dropatt"].state["p"],
        "layer_norm_epsilon": attention["_modules"]["layer_norm"].state["eps"],
    }
    if not all(type(value) in (bool, int, float) for value in (*settings.values(), *cutoffs)):
        raise TypeError("a setting that is no number")
    return settings | {
        "cutoffs": cutoffs,
        "tie_projs": [stored.get(head) is stored.get(table) for head, table in pairs],
    }
