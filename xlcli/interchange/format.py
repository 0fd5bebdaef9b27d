"""The base class of formats: how the models of another program become those of xlcli, and back. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xlcli.config import ModelConfig
from xlcli.errors import ConfigError
from xlcli.files import read_bounded
from xlcli.interchange.source import Source, open_folder
from xlcli.store.layout import SavedConfig

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.text.tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
LARGEST_TOKENIZER = 2**26
"""Maximum bytes of a tokenizer's file."""


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

    def notes(self, source: Source, model: ModelConfig) -> list[str]:
        """What the user has to know of the import: where results differ from those of the source."""
        return []

    def tokenizer(self, source: Source, model: ModelConfig) -> Tokenizer:
        """The tokenizer of the source; one of token ids if it has none."""
        from xlcli.text.foreign import IdsTokenizer, TokenizersTokenizer

        start = next((source.config[key] for key in ("bos_token_id", "eos_token_id") if key in source.config), 0)
        start_id = start[0] if isinstance(start, list) and start else start
        start_id = start_id if isinstance(start_id, int) and 0 <= start_id < model.vocab_size else 0
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
