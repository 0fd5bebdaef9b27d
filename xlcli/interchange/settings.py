"""The settings of a model of another program, in its `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from xlcli.errors import CheckpointError

T = TypeVar("T")

CAN = "docs/import.md lists what can be imported."
"""Remedy for what cannot be imported."""
HARMLESS = frozenset(
    {"architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "xlcli"}
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


class Settings:
    """The settings of a source. Each is read once; what is left in the end must be harmless or off.

    Raises:
        CheckpointError: A setting has another type than it can have, or none of the values that xlcli can compute.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self._left = path, dict(config)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, kind: Callable[[Any], T], default: Any = None) -> T:
        """A setting; `default` if it is missing or null. `kind` is a type, or a function that raises ValueError."""
        value = self._left.pop(key, None)
        if value is None:
            value = default
        if value is None or (isinstance(value, bool) and kind is not bool):
            self.refuse(key, value)
        if isinstance(kind, type) and not isinstance(value, (int, float) if kind is float else kind):
            self.refuse(key, value)
        try:
            return kind(value)
        except (ValueError, TypeError, KeyError):
            self.refuse(key, value)

    def optional(self, key: str, kind: Callable[[Any], T]) -> T | None:
        """A setting; None if it is missing or null."""
        return None if self._left.get(key) is None else self.take(key, kind)

    def require(self, key: str, *values: Any) -> None:
        """Refuses a setting that is there and has none of these values."""
        if (value := self._left.pop(key, None)) is not None and value not in values:
            self.refuse(key, value)

    def finish(self, *harmless: str) -> None:
        """Refuses settings that were not read, unless they are harmless or off (null, false, 0 or empty).

        One that is not known may change numbers; those that begin with an underscore belong to the library.
        """
        for key, value in self._left.items():
            if value and not (key in HARMLESS or key in harmless or key.startswith("_")):
                self.refuse(key, value)

    def refuse(self, key: str, value: Any) -> NoReturn:
        """Raises the error for a setting that cannot be imported."""
        problem = "is missing" if value is None else f"is {ascii(value)[:80]}, which xlcli cannot import"
        raise CheckpointError(f"{self.path}: {key} {problem}.", CAN)
