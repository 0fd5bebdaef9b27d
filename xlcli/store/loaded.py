"""A model that was loaded from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xlcli.config import Config, WeightEncoding
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import RESTORE, read_bounded
from xlcli.store.layout import DOCUMENTS, HELD_OUT, SavedConfig, read_config_file, verify_file
from xlcli.store.weights import read_network

if TYPE_CHECKING:
    from xlcli.config import InferenceConfig
    from xlcli.model.decoder import Decoder
    from xlcli.model.lm import LanguageModel
    from xlcli.text.tokenizers.registry import Tokenizer


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for inference.

    Attributes:
        folder: The model folder.
        name: Name of the folder.
        config: Sections model, text and train of the configuration, with the inference settings given to `load`.
        tokenizer: The model's tokenizer.
        network: In evaluation mode, with float32 weights.
        record: Content of `record.json`.
        fingerprints: SHA-256 of config, weights and tokenizer as stored, which tie a state file to this model.
        warnings: Messages to show.
        files: SHA-256 of tokenizer files and held-out texts by file name.
        weight_dtype: Number type that the weights are rounded to, as if they were stored in it; `float32` is unrounded.
        encoding: Encoding that represents the weights of the network exactly.
    """

    folder: Path
    name: str
    config: Config | SavedConfig
    tokenizer: Tokenizer
    network: LanguageModel
    record: dict[str, Any]
    fingerprints: dict[str, str]
    warnings: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    weight_dtype: WeightEncoding = "float32"
    encoding: str = "float32"

    @cached_property
    def decoder(self) -> Decoder | LanguageModel:
        """Predictions after one token (`logits`): a `Decoder` where one applies, else the network."""
        from xlcli.model.decoder import make_decoder

        return make_decoder(self.network, self.encoding) or self.network

    def decoder_bytes(self, mem_len: int) -> int:
        """Size in bytes of what `decoder` adds to the weights of the network, with memory of `mem_len` tokens."""
        from xlcli.model.decoder import table_bytes, weight_bytes

        weights = 0 if "decoder" in vars(self) else weight_bytes(self.network, self.encoding)
        return weights + table_bytes(self.network, mem_len)

    def held_out(self, split: Literal["valid", "test"]) -> Path | None:
        """The validation or test text in the model folder, if there is one; `CheckpointError` if it has changed."""
        path = self.folder / HELD_OUT[split]
        if not path.is_file() or path.is_symlink():
            return None
        if path.name in self.files:
            verify_file(self.folder, path.name, self.files)
        return path

    def held_out_documents(self, split: Literal["valid", "test"]) -> list[int] | None:
        """Offsets at which the documents of a held-out text begin, ascending from 0.

        None if there is no such text, or its documents were not separated.

        Raises:
            CheckpointError: A file is damaged.
        """
        text, path = self.held_out(split), self.folder / DOCUMENTS[split]
        if text is None or path.name not in self.files:
            return None
        verify_file(self.folder, path.name, self.files)
        size = text.stat().st_size
        try:
            starts = [int(line) for line in read_bounded(path, 16 * size + 16).splitlines()]
        except ValueError:
            starts = []
        if not starts or starts[0] or any(b <= a for a, b in pairwise(starts)) or starts[-1] >= max(size, 1):
            raise CheckpointError(f"{path} does not list the documents of {HELD_OUT[split]}.", RESTORE)
        return starts

    def unrounded(self) -> LoadedModel:
        """This model with its weights as stored; this object if they are not rounded.

        Raises:
            CheckpointError: The weights in the model folder have changed.
            ResourceError: They do not fit the machine.
        """
        if self.weight_dtype == "float32":
            return self
        device = next(self.network.parameters()).device
        encoding = read_config_file(self.folder).encoding
        network, metadata = read_network(self.folder, self.config.model, encoding, device)
        network.clamp_len, network.far_len = self.network.clamp_len, self.network.far_len
        if metadata["sha256"] != self.fingerprints["weights"]:
            raise CheckpointError(f"the weights in {self.folder} have changed.", "Run the command again.")
        return replace(self, network=network, weight_dtype="float32", encoding="float32")

    def check_settings(self, options: InferenceConfig) -> None:
        """`ConfigError` if a setting does not apply to the model, or differs from the one it was loaded with."""
        options.check_model(self.config.model)
        is_same = options.shape(self.config.model) == self.config.model
        clamp_len = self.network.clamp_len or self.network.far_len or "none"
        if not is_same or options.clamp_len not in (None, clamp_len):
            raise ConfigError(
                "n_steps, n_hashes and clamp_len are fixed when a model is loaded.", "Give them to load()."
            )
        if options.weight_dtype not in ("auto", self.weight_dtype):
            raise ConfigError("weights are rounded when a model is loaded.", "Give weight_dtype to load().")
