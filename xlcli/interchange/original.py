"""Transformer-XL in `model.pt` of the original code (kimiyoung/transformer-xl), to be imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.errors import CheckpointError
from xlcli.interchange.pickles import REMEDY, StoredTensor, read_checkpoint
from xlcli.interchange.settings import CAN, Settings
from xlcli.interchange.source import Source, Stored
from xlcli.interchange.transfo_xl import TransfoXL

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.pt"
_PLACEMENTS = {2: "embedding", 3: "layers"}
"""Where models with absolute positions add them, by `attn_type`: sinusoids, or tables of the layers."""
_LACKS = "learns a vector for each distance, an encoding that xlcli lacks"
_RAW = "with pre_lnorm takes its queries from inputs without a norm"
_SHIFTS = "adds positions to its memory anew at each call, so that predictions depend on how a text is cut"
_MOST_PARTS = 2**20


class Original(TransfoXL):
    """Transformer-XL as its authors published it. The whole module is pickled, and the first memory is empty.

    Absolute positions (`attn_type` 2 and 3) count down to the end of a segment, so they are those of the source in
    segments of the length of training.
    """

    name = "transfo-xl-original"
    model_types = ()
    exports = False
    prefix = ""
    absolute_parts: ClassVar[Mapping[str, tuple[str, int, int]]] = {
        "attention.query.weight": ("dec_attn.q_net.weight", 0, 0),
        "attention.key.weight": ("dec_attn.kv_net.weight", 0, 2),
        "attention.value.weight": ("dec_attn.kv_net.weight", 1, 2),
    }
    zero_memory = False

    def recognizes(self, path: Path) -> bool:
        """True if it is, or holds, a file `model.pt`."""
        return path.name == MODEL or (path / MODEL).is_file()

    def open(self, path: Path) -> Source:
        """The source at `path`, a file or its folder, with the settings of Hugging Face."""
        path = path / MODEL if path.is_dir() else path
        model = read_checkpoint(path.resolve())
        try:
            stored: dict[str, Stored] = dict(_tensors(model))
            return Source(path, _settings(model.state, stored), stored)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{path} is no model of the original Transformer-XL.", REMEDY) from None

    def position(
        self, settings: Settings, clamp_len: int | None, placement: str, train: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The section `model.position`."""
        kind, length = settings.take("attn_type", int), settings.take("max_klen", int)
        if kind == 0:
            return super().position(settings, clamp_len, placement, train)
        reason = (
            _LACKS if kind not in _PLACEMENTS else _RAW if placement == "pre" else _SHIFTS if train["mem_len"] else ""
        )
        if reason:
            raise CheckpointError(f"{settings.path}: attn_type {kind} {reason}.", CAN)
        settings.require("untie_r", False)
        if train["segment_len"] > length:
            settings.refuse("tgt_len", train["segment_len"])
        table = {"kind": "learned", "placement": _PLACEMENTS[kind], "max_len": train["segment_len"]}
        return table | {"overflow": "error"}

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        """The weight `name` of xlcli. The original code counts the tails of clusters from the last one."""
        import torch

        if name == "position.axes.0.weight":
            n, dim = shape
            limit = source.config["clamp_len"]
            position = torch.arange(n - 1, -1, -1.0).clamp(max=limit if limit > 0 else n)
            angle = position[:, None] / 10_000 ** (torch.arange(0.0, dim, 2.0) / dim)
            return torch.cat((angle.sin(), angle.cos()), dim=-1)
        if name.endswith("position.axes.0.weight"):
            heads = (model.attention.n_heads, model.head_dim)
            tables = source.take("r_emb", (model.n_layers, source.config["max_klen"], *heads))
            return tables[int(name.split(".")[2]), -shape[0] :].reshape(shape)
        tensor = super().read(source, name, model, shape)
        return tensor.flip(0) if name.startswith("head.tails.") else tensor

    def parts_of(self, model: ModelConfig) -> Mapping[str, tuple[str, int, int]]:
        """Absolute positions have another tensor for queries."""
        return self.parts if model.position.kind == "xl" else self.absolute_parts

    def notes(self, model: ModelConfig, mem_len: int) -> list[str]:
        """How far the results are those of the source."""
        if model.position.kind == "xl":
            return super().notes(model, mem_len)
        return ["exact in whole segments: positions count down to the end of a segment"]


def _tensors(model: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a module and of those in it, by name. Each module has one place."""
    todo, n_parts = [("", model)], 0
    while todo:
        prefix, module = todo.pop()
        parts = {**module.state["_parameters"], **module.state["_buffers"], **module.state["_modules"]}
        n_parts += len(parts)
        if n_parts > _MOST_PARTS:
            raise ValueError("the modules are nested without end")
        yield from ((prefix + name, part) for name, part in parts.items() if isinstance(part, StoredTensor))
        todo += [(f"{prefix}{name}.", part) for name, part in module.state["_modules"].items() if part is not None]


def _settings(state: dict[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The settings of a module by their names in Hugging Face. What is shared is one tensor under two names."""
    embedding, layer = state["_modules"]["word_emb"].state, state["_modules"]["layers"].state["_modules"]["0"].state
    attention = layer["_modules"]["dec_attn"].state
    cutoffs, is_divided = embedding["cutoffs"][:-1], embedding["div_val"] > 1
    pairs = [(f"crit.out_projs.{i}", f"word_emb.emb_projs.{i if is_divided else 0}") for i in range(len(cutoffs) + 1)]
    same = ("attn_type", "clamp_len", "d_embed", "d_head", "d_model", "ext_len", "mem_len", "n_head", "n_layer")
    return {key: state[key] for key in (*same, "max_klen", "same_length", "sample_softmax", "tgt_len")} | {
        "vocab_size": state["n_token"],
        "cutoffs": cutoffs,
        "div_val": embedding["div_val"],
        "d_inner": stored["layers.0.pos_ff.CoreNet.0.weight"].info.shape[0],
        "pre_lnorm": attention["pre_lnorm"],
        "tie_word_embeddings": stored["crit.out_layers.0.weight"] is stored["word_emb.emb_layers.0.weight"],
        "tie_projs": [stored.get(head) is stored.get(table) for head, table in pairs],
        "untie_r": False,
        "dropout": state["_modules"]["drop"].state["p"],
        "dropatt": attention["_modules"]["dropatt"].state["p"],
        "layer_norm_epsilon": attention["_modules"]["layer_norm"].state["eps"],
    }
