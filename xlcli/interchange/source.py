"""A model of another program on disk: its settings, and its tensors, which are read one at a time.

Nothing in the files is executed: they are JSON, safetensors, and pickles that `xlcli.interchange.pickles` reads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from xlcli.errors import CheckpointError
from xlcli.files import read_json
from xlcli.files.tensors import read_places
from xlcli.interchange.pickles import StoredTensor, read_checkpoint

CONFIG, GENERATION = "config.json", "generation_config.json"
START, END = START_KEYS = "bos_token_id", "eos_token_id"  # settings with ids of the tokens that begin and end a text
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there; `NAME.index.json` lists its shards
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")  # of training with several processes, and of compilation
DOWNLOAD = "Download the model again, with all its files."
ADAPTER = "adapter_config.json"
MERGE = "It holds an adapter: merge it with its model (by merge_and_unload of the package peft), and import the result."
CAN = "docs/models.md lists what each format supports."  # remedy for what cannot be imported or exported
UNQUANTIZED = "Its weights are quantized: import those from before, or a GGUF file of the model."
LARGEST_NUMBER = 2**31  # maximum absolute value of a number
HARMLESS = (  # settings of Hugging Face that change no number: of training, of sampling, of other tasks, of the library
    "architectures torch_dtype dtype transformers_version use_cache initializer_range xlcli tokenizer_class "
    "task_specific_params id2label label2id num_labels problem_type finetuning_task classifier_dropout hidden_dropout "
    "return_dict return_dict_in_generate output_attentions output_hidden_states output_past output_scores max_length "
    "min_length length_penalty top_k top_p typical_p temperature repetition_penalty diversity_penalty num_beams "
    "num_beam_groups num_return_sequences do_sample early_stopping no_repeat_ngram_size prefix attn_implementation "
    "gradient_checkpointing chunk_size_feed_forward transformers.js_config torchscript use_bfloat16 tf_legacy_loss "
    "is_decoder predict_special_tokens n_special max_sequence_length model_max_length name_or_path "
    "normalize_attention_scores apply_query_key_layer_scaling bos_token_id eos_token_id pad_token_id unk_token_id "
    "sep_token_id cls_token_id decoder_start_token_id mask_token_id cache_implementation"
)


@dataclass
class Source:
    """A model of another program."""

    path: Path  # of its folder, or its file
    config: Mapping[str, Any]  # content of `config.json`, if there is one, with tokens of `generation_config.json`
    stored: Mapping[str, StoredTensor]  # tensors by name, not read
    names: Mapping[str, str] = field(default_factory=dict)  # of settings that its files call otherwise
    unread: set[str] = field(init=False)  # names of tensors that `take` has not read

    def __post_init__(self) -> None:
        self.unread = set(self.stored)
        # Few numbers in a file must not become many tensors.
        storages = {tensor.storage for tensor in self.stored.values()}
        n_stored = sum(storage.n for storage in storages)
        n_described = sum(math.prod(tensor.info.shape) for tensor in self.stored.values())
        if n_described > 2 * n_stored:  # a head may be the embedding
            problem = f"tensors of {self.path} that share a storage are over twice as large as its files"
            raise CheckpointError(f"{problem}.", "Save each tensor on its own, for example in safetensors.")

    def ids(self, key: str, vocab_size: int) -> list[int]:
        """Distinct ids of a setting that has one, several or none; `CheckpointError` for one that no token has."""
        value = self.config.get(key)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            problem = f"{self.names.get(key, key)} is {ascii(value)[:80]}, but ids are 0 to {vocab_size - 1}"
            raise CheckpointError(f"{self.path}: {problem}.", "Correct it in a copy of the model.")
        return [*dict.fromkeys(ids)]

    def first_id(self, vocab_size: int, keys: Sequence[str] = START_KEYS) -> int:
        """The token that texts follow: the first of these settings that is there, else 0."""
        ids = list[int]()
        for key in keys:
            ids += self.ids(key, vocab_size)
        return ids[0] if ids else 0

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Reads one tensor. Raises `CheckpointError` if there is none of this name and, if it is given, this shape."""
        if name not in self.stored:
            remedy = DOWNLOAD
            longer = [other for other in self.stored if other.endswith(f".{name}")]
            if longer:
                remedy = f"Remove '{longer[0].removesuffix(name)}' from the names of its tensors."
            raise CheckpointError(f"{self.path} has no tensor '{name}'.", remedy)
        stored_shape = self.stored[name].info.shape
        if shape is not None and stored_shape != shape:
            problem = f"tensor '{name}' has the shape {list(stored_shape)}, where its settings need {list(shape)}"
            raise CheckpointError(f"{self.path}: {problem}.", DOWNLOAD)
        self.unread.discard(name)
        return self.stored[name].read()


def folder_of(path: Path) -> Path:
    """The folder of a model that is given as this folder, or as a file in it."""
    return path if path.is_dir() else path.parent


def open_folder(path: Path) -> Source:
    """The model in a folder of Hugging Face; `CheckpointError` if a file is missing, damaged or not of this folder.

    No tensor is read yet. Tokens that begin and end a text are those of `generation_config.json`, if it has any.
    """
    config = read_json(follow(path / CONFIG))
    if os.path.lexists(path / GENERATION):
        generation = read_json(follow(path / GENERATION))
        config |= {key: generation[key] for key in START_KEYS if generation.get(key) is not None}
    if (path / ADAPTER).exists():
        raise CheckpointError(f"{path} has an adapter, whose weights are not those of the model.", MERGE)
    stored: dict[str, StoredTensor] = {}
    for name in _weight_files(path):
        stored |= _tensors(path / name)
    unwrapped = {_WRAPPERS.sub("", name): tensor for name, tensor in stored.items()}
    if len(unwrapped) < len(stored):  # names differ in these prefixes alone
        unwrapped = dict(stored)
    return Source(path, config, unwrapped)


def _weight_files(folder: Path) -> list[str]:
    """Names of the files with the weights of a model: one, or the shards that an index lists."""
    for name in WEIGHTS:
        if os.path.lexists(folder / name):
            return [name]
        index = folder / f"{name}.index.json"
        if os.path.lexists(index):
            file_of_tensor = read_json(follow(index)).get("weight_map")
            files = {*map(str, file_of_tensor.values())} if isinstance(file_of_tensor, dict) else set()
            are_plain = all(Path(file).name == file and Path(file).suffix and file.isprintable() for file in files)
            if not files or not are_plain:
                raise CheckpointError(f"{index} does not name files of its folder.", DOWNLOAD)
            return sorted(files)
    raise CheckpointError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}.", DOWNLOAD)


def follow(path: Path) -> Path:
    """The file that a link leads to, as in the cache of a hub; `CheckpointError` for a pointer of Git LFS."""
    file = Path(os.path.realpath(path))
    if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of Git LFS, not the file.", "Run git lfs pull, or hf download.")
    return file


def _tensors(path: Path) -> Mapping[str, StoredTensor]:
    file = follow(path)
    if path.suffix == ".safetensors":
        places, version = read_places(file)
        return {name: StoredTensor.whole(file, version, *place) for name, place in places.items()}
    tree = read_checkpoint(file)
    if not isinstance(tree, dict) or not all(type(tree[name]) is StoredTensor and type(name) is str for name in tree):
        raise CheckpointError(f"{path} is not a table of tensors.", DOWNLOAD)
    return tree


class Settings:
    """The settings of a source. Each is read once; what is `left` in the end must be harmless or off.

    Every method raises `CheckpointError` for a value that cannot be imported.
    """

    def __init__(self, source: Source, config: Mapping[str, Any]) -> None:
        self.source, self.config, self.left = source, config, dict(config)

    def take(self, key: str, kind: Any, default: Any = ...) -> Any:
        """Removes a setting from `left` and returns it; `default`, if there is one, where it is missing or null.

        `kind` is its type, or a table of its values: with {"silu": "swiglu"}, "silu" becomes "swiglu".
        """
        value = self.left.pop(key, None)
        if value is None and default is not ...:
            value = default
        if isinstance(kind, Mapping):
            if not isinstance(value, str) or value not in kind:
                self.refuse(key, value)
            return kind[value]
        if value is None and default is None:
            return None
        is_of_kind = isinstance(value, int | float if kind is float else kind)
        if not is_of_kind or isinstance(value, bool) != (kind is bool):
            self.refuse(key, value)
        if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
            self.refuse(key, value)
        return kind(value)

    def take_any(self, keys: Sequence[str], kind: Any, default: Any = ...) -> Any:
        """`take` of a setting that models call by one of these names; the first that is there counts."""
        present = [key for key in keys if self.left.get(key) is not None]
        if not present and default is ...:
            names_in_file = [self.source.names[key] for key in keys if key in self.source.names]
            self.refuse(" or ".join(names_in_file or keys), None)
        values = [self.take(key, kind, default) for key in present or keys]
        return values[0]

    def require(self, key: str, *values: Any) -> None:
        """Refuses a setting that is there and has none of these values."""
        value = self.left.pop(key, None)
        if value is not None and value not in values:
            self.refuse(key, value)

    def finish(self, *harmless: str) -> None:
        """Refuses settings that were not read, which may change numbers, unless they are harmless, null, 0 or empty."""
        self.require("is_causal", True)  # off, every token sees those that follow
        harmless += tuple(HARMLESS.split())
        for key, value in self.left.items():
            is_harmless = key in harmless or key.startswith(("_", "unsloth_"))
            if value and not is_harmless:
                problem = f"{self.source.path}: {key} is {ascii(value)[:80]}, which xlcli does not know."
                place = CONFIG if self.source.path.is_dir() else self.source.path.name
                remedy = f"If it changes no prediction, remove it from a copy of {place}. {CAN}"
                raise CheckpointError(problem, UNQUANTIZED if key == "quantization_config" else remedy)

    def refuse(self, key: str, value: Any) -> NoReturn:
        problem = f"is {ascii(value)[:80]}, which xlcli cannot import"
        if value is None:
            problem = "is missing"
        raise CheckpointError(f"{self.source.path}: {self.source.names.get(key, key)} {problem}.", CAN)
