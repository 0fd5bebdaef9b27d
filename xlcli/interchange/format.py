"""The base class of formats: how the models of another program become those of xlcli, and back."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from xlcli.config import ModelConfig, Tree
from xlcli.errors import ConfigError
from xlcli.files import JSON_LIMIT, VOCABULARY_LIMIT, parse_json, read_bounded, read_json, write_atomic
from xlcli.files.tensors import write_tensors
from xlcli.interchange.source import CONFIG, END, START_KEYS, Source, folder_of, follow, open_folder
from xlcli.interchange.vocabulary import DEFAULT, differences, tokenizer_config, tokenizer_json
from xlcli.store.folder import new_folder
from xlcli.store.layout import WEIGHTS, SavedConfig
from xlcli.store.weights import empty_weights
from xlcli.text.base import Tokenizer
from xlcli.text.foreign import IdsTokenizer, TokenizersTokenizer, converted

PARTS = ("attention.query.", "attention.key.", "attention.value.")  # one tensor in some formats
HEAD_BIAS = ("lm_head.bias", "output.bias")  # names of a tensor that formats do not have
OWN = "xlcli"  # key of an exported `config.json` with the sections of the model, and folder of its tokenizer
TOKENIZER, PIECES, SENTENCEPIECE = "tokenizer.json", "vocab.json", "tokenizer.model"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
BESIDE_PIECES = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
UNREAD = (PIECES, "vocab.txt", "spiece.model", "tekken.json", "vocab.bpe", "qwen.tiktoken")


class Place(NamedTuple):
    """Where a weight is in a format: rows from `start` of a tensor of `n_rows`; all of the tensor if `n_rows` is 0."""

    tensor: str
    start: int = 0
    n_rows: int = 0


class Format(ABC):
    """A format of models."""

    name: ClassVar[str]  # as `--format` takes it
    model_types: ClassVar[tuple[str, ...]] = ()  # values of `model_type` in the `config.json` of its folders
    buffers: ClassVar[tuple[str, ...]] = ()  # ends of names of tensors that follow from the settings, and are not read
    names: ClassVar[Mapping[str, str]] = {}  # parts of the names of weights in xlcli and in the format
    prefix: ClassVar[str] = ""  # of names of all tensors but the head; files of a model without its head lack it
    head: ClassVar[str] = "lm_head.weight"  # name of the matrix of the head
    table: ClassVar[str] = ""  # name of the embedding, without `prefix`
    copies: ClassVar[str] = r"lm_head\.weight"  # pattern of names of copies of other tensors, which need not be read
    zeros: ClassVar[tuple[str, ...]] = HEAD_BIAS  # ends of names of biases that may be missing though xlcli has them
    vocabularies: ClassVar[tuple[str, ...]] = (TOKENIZER, SENTENCEPIECE)  # files; the first one that is there is read
    start_keys: ClassVar[tuple[str, ...]] = START_KEYS  # settings with the id of the token that begins a text
    keeps_types: ClassVar[bool] = True  # weights have the values of the source, so that its number type holds them
    is_fused: ClassVar[bool] = False  # queries, keys and values are one tensor
    is_by_head: ClassVar[bool] = False  # that tensor has those of one head after the other
    is_transposed: ClassVar[bool] = False  # matrices of blocks are stored transposed

    def recognizes(self, path: Path) -> bool:
        """True if the model at `path`, a folder or file, is of this format. Reads no weights."""
        return model_type(path) in self.model_types

    def open(self, path: Path) -> Source:
        """The source at `path`, a folder or one of its files."""
        return open_folder(folder_of(path))

    def is_tied(self, source: Source, tied: bool) -> bool:
        """Whether the head is the embedding: as the settings say, but a head that is stored and differs is used."""
        head, table = self.head, self.prefix + self.table
        if tied and head in source.stored and table in source.stored:
            return source.take(head).equal(source.take(table))
        return tied

    @abstractmethod
    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train`; `CheckpointError` if xlcli lacks a setting that changes numbers."""

    def weights(self, source: Source, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Name in xlcli and values of each weight, in alphabetical order, of which one at a time is read."""
        for name, empty in sorted(empty_weights(model).items()):
            yield name, self.read(source, name, model, tuple(empty.shape))

    def read(self, source: Source, name: str, model: ModelConfig, shape: tuple[int, ...]) -> Tensor:
        """Reads the weight that xlcli calls `name`, of this shape: a tensor of the source, or some rows of one."""
        tensor, start, n_rows = self.place(name, model)
        if tensor.endswith(self.zeros) and tensor not in source.stored:
            return torch.zeros(shape)
        # A model saved without its head has no prefix, and a tied one may have its table as that of the head alone.
        short = tensor.removeprefix(self.prefix)
        is_tied_table = short == self.table and model.embedding.tied
        if short in source.stored:
            tensor = short
        elif is_tied_table and self.head in source.stored:
            tensor = self.head
        is_part = n_rows > 0
        stored_shape = (n_rows, *shape[1:]) if is_part else shape
        is_matrix_of_block = name.startswith("stack.") and len(shape) == 2
        if self.is_transposed and is_matrix_of_block:
            whole = source.take(tensor, stored_shape[::-1]).T
        else:
            whole = source.take(tensor, stored_shape)
        if not is_part:
            return whole
        if self.is_by_head:
            whole = rearrange(whole, "(h part e) ... -> (part h e) ...", part=len(PARTS), e=model.head_dim)
        return whole[start : start + shape[0]].clone()

    def place(self, name: str, model: ModelConfig) -> Place:
        """Where the weight `name` of xlcli is."""
        tensor = name if name.startswith("head.") else self.prefix + name
        for ours, theirs in self.names.items():
            tensor = tensor.replace(ours, theirs)
        part_rows = model.attention.n_heads * model.head_dim
        for i, part in enumerate(PARTS):
            if self.is_fused and part in name:
                return Place(tensor, i * part_rows, len(PARTS) * part_rows)
        return Place(tensor)

    def tokenizer(self, source: Source, model: ModelConfig) -> Tokenizer:
        """The tokenizer of the source; one of token ids if it has none."""
        start_id = source.first_id(model.vocab_size, self.start_keys)
        present = [name for name in self.vocabularies if os.path.lexists(source.path / name)]
        if not present:
            return IdsTokenizer(model.vocab_size, start_id)
        vocabulary = present[0]
        path = str(source.path / vocabulary)
        data = read_bounded(follow(source.path / vocabulary), VOCABULARY_LIMIT)
        beside: list[bytes] = []  # content of further files, empty tables where they are missing
        for name in BESIDE_PIECES if vocabulary == PIECES else ():
            exists = os.path.lexists(source.path / name)
            beside.append(read_bounded(follow(source.path / name), VOCABULARY_LIMIT) if exists else b"{}")
        if vocabulary != TOKENIZER:
            data = converted(path, data, *beside)
        return TokenizersTokenizer(data, path, vocab_size=model.vocab_size, start_id=start_id)

    def chat_templates(self, source: Source) -> dict[str, Any]:
        """The chat templates of the source by name, not checked; any error of damaged files."""
        folder = folder_of(source.path)
        files = {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
        if os.path.lexists(folder / CHAT_TEMPLATE):
            files[DEFAULT] = folder / CHAT_TEMPLATE
        if files or not os.path.lexists(folder / TOKENIZER_CONFIG):
            return {name: read_bounded(follow(path), JSON_LIMIT).decode() for name, path in files.items()}
        # Older releases of transformers save templates among the settings of the tokenizer: a text, or a list.
        settings = parse_json(read_bounded(follow(folder / TOKENIZER_CONFIG), VOCABULARY_LIMIT))
        templates = settings.get("chat_template")
        if isinstance(templates, str):
            return {DEFAULT: templates}
        return {template["name"]: template["template"] for template in templates or ()}

    def notices(self, source: Source, tokenizer: Tokenizer) -> list[str]:
        """What differs from the source, or may be wrong in it."""
        if tokenizer.kind == "ids":
            names = [name for name in UNREAD if (source.path / name).exists()]
            return [f"{name} is no vocabulary that xlcli reads: texts are token ids" for name in names]
        if tokenizer.kind != "tokenizers":
            return []
        notices = []
        start_id = tokenizer.start_id
        text = tokenizer.texts[start_id].decode(errors="replace")
        if text:  # a token of control has none
            notices.append(f"texts begin with token {start_id}, the word {text!r}: bos_token_id may be wrong")
        added = [token for token in json.loads(tokenizer.data)["added_tokens"] if not token["special"]]
        stripping = [token["content"] for token in added if token.get("lstrip") or token.get("rstrip")]
        if stripping:
            shown = ", ".join(stripping[:8])
            notices.append(f"blanks beside {shown} stay separate tokens here, but the source strips them")
        return notices

    def export_config(self, config: SavedConfig) -> dict[str, Any]:
        """Content of the `config.json` of this format. What it leaves out is found by importing it again."""
        raise ConfigError(f"models cannot be exported to the format {self.name}.", "Choose another --format.")

    def export_weights(self, weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
        """The tensors of this format, of weights by their names in xlcli; `ConfigError` if one has no place in it."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            foreign, start, n_rows = self.place(name, model)
            if n_rows:
                if foreign not in tensors:
                    tensors[foreign] = weight.new_empty(n_rows, *weight.shape[1:])
                tensors[foreign][start : start + len(weight)] = weight
            elif foreign in HEAD_BIAS:
                if bool(weight.any()):
                    raise ConfigError(f"the head has a bias, which {self.name} lacks.", "Train with model.bias=false.")
            else:
                tensors[foreign] = weight
        return tensors

    def write(
        self, target: Path, config: Mapping[str, Any], weights: dict[str, Tensor], tokenizer: Tokenizer, templates: Tree
    ) -> list[str]:
        """Writes a folder with a `config.json`, and chat templates by name, all or nothing; returns what is lost."""
        files = self.export_tokenizer(tokenizer)
        with new_folder(target) as folder:
            if tokenizer.data not in files.values():
                (folder / OWN).mkdir()
                tokenizer.save(folder / OWN)
            if TOKENIZER in files:
                files[TOKENIZER_CONFIG] = tokenizer_config(files[TOKENIZER], config, templates)
            for name, data in files.items():
                write_atomic(folder / name, data)
            end_ids = config[END][0] if len(config[END]) == 1 else config[END] or None
            content = {**config, END: end_ids}
            write_atomic(folder / CONFIG, json.dumps(content, indent=2).encode() + b"\n")
            write_tensors(folder / WEIGHTS, weights, {"format": "pt"})
        if TOKENIZER not in files:
            if templates:
                return [f"the chat template is lost: the export has no {TOKENIZER}"]
            return []
        kinds = differences(tokenizer)
        if kinds:
            return [f"transformers gives other tokens to {'; '.join(kinds)} ({TOKENIZER})"]
        return []

    def export_tokenizer(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Content of the files of a tokenizer by name; empty if the format has none for its kind."""
        data = tokenizer_json(tokenizer)
        return {} if data is None else {TOKENIZER: data}


def model_type(path: Path) -> str | None:
    """The type of model in the `config.json` of a folder, or beside a file; None if it has none."""
    config = folder_of(path) / CONFIG
    if not os.path.lexists(config):
        return None
    kind = read_json(follow(config)).get("model_type")
    return kind if isinstance(kind, str) else None
