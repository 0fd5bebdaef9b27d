"""The base class of formats: how the models of another program become those of xlcli, and back. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.errors import ConfigError
from xlcli.files import read_bounded, read_json
from xlcli.interchange.source import CONFIG, Source, open_folder
from xlcli.store.layout import SavedConfig

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.text.tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
LARGEST_TOKENIZER = 2**26
"""Maximum bytes of a tokenizer's file."""

HARMLESS = frozenset(
    {"architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "task"}
    | {f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "decoder_start", "mask")}
    | {"tokenizer_class", "prefix", "task_specific_params", "id2label", "label2id", "num_labels", "problem_type"}
    | {"return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"}
    | {
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
    }
    | {"temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"}
    | {"no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id"}
    | {"attn_implementation", "gradient_checkpointing", "transformers.js_config", "unsloth_version", "unsloth_fixed"}
)
"""Settings of Hugging Face that change no number: of training, of sampling, of other tasks, of the library."""


class Format(ABC):
    """A format of models.

    Attributes:
        name: As `--format` takes it.
        model_types: Values of `model_type` in the `config.json` of its folders.
        buffers: Ends of the names of tensors that follow from the settings, and are not read.
        exports: True if models can be written in it.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]] = ()
    buffers: ClassVar[tuple[str, ...]] = ()
    exports: ClassVar[bool] = False

    def recognizes(self, path: Path) -> bool:
        """True if the model at `path`, a folder or file, is of this format. Reads no weights."""
        return model_type(path) in self.model_types

    def open(self, path: Path) -> Source:
        """The source at `path`, a folder or one of its files."""
        return open_folder(path if path.is_dir() else path.parent)

    @abstractmethod
    def sections(self, source: Source) -> dict[str, dict[str, Any]]:
        """Sections `model` and `train` of the configuration.

        Raises:
            CheckpointError: A setting of the source changes numbers, and xlcli has none like it.
        """

    @abstractmethod
    def weights(self, source: Source, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Name in xlcli and values of each weight, of which one at a time is read."""

    def notes(self, model: ModelConfig, mem_len: int) -> list[str]:
        """How far the results are those of the source, with the default memory of `mem_len` tokens."""
        return []

    def tokenizer(self, source: Source, model: ModelConfig) -> Tokenizer:
        """The tokenizer of the source; one of token ids if it has none."""
        from xlcli.text.foreign import IdsTokenizer, TokenizersTokenizer

        ids = [source.config.get(key) for key in ("bos_token_id", "eos_token_id")]
        ids = [each[0] if isinstance(each, list) and each else each for each in ids]
        start_id = next((each for each in ids if type(each) is int and 0 <= each < model.vocab_size), 0)
        path = (source.path / TOKENIZER).resolve()
        if not path.exists():
            return IdsTokenizer(model.vocab_size, start_id)
        data = read_bounded(path, LARGEST_TOKENIZER)
        return TokenizersTokenizer(data, str(path), vocab_size=model.vocab_size, start_id=start_id)

    def export_config(self, config: SavedConfig) -> dict[str, Any]:
        """Content of the `config.json` of this format.

        Raises:
            ConfigError: The format cannot hold the model; the error names the setting.
        """
        raise ConfigError(f"models cannot be exported to the format {self.name}.", "Choose another --format.")

    def export_weights(self, weights: Mapping[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Name and values of each tensor of this format, of weights by their names in xlcli."""
        raise NotImplementedError

    def export_tokenizer(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Content of the files of a tokenizer by name; empty if the format has none for its kind."""
        return {TOKENIZER: tokenizer.data} if tokenizer.kind == "tokenizers" else {}


def model_type(path: Path) -> str | None:
    """The type of model in the `config.json` of a folder, or beside a file; None if it has none."""
    config = (path if path.is_dir() else path.parent) / CONFIG
    kind = read_json(config.resolve()).get("model_type") if config.exists() else None
    return kind if isinstance(kind, str) else None
