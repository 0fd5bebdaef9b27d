"""The settings of a model of another program, in its `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from xlcli.errors import CheckpointError
from xlcli.interchange.source import CONFIG

CAN = "docs/import.md says what a format can have."
"""Remedy for what cannot be imported or exported."""
LARGEST = 2**31
"""Maximum absolute value of a number."""
HARMLESS = frozenset(
    {"architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "xlcli"}
    | {f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "decoder_start", "mask")}
    | {"tokenizer_class", "task_specific_params", "id2label", "label2id", "return_dict", "max_length", "length_penalty"}
    | {"top_k", "top_p", "temperature", "repetition_penalty", "num_beams", "num_beam_groups", "num_return_sequences"}
    | {"typical_p", "diversity_penalty", "attn_implementation", "gradient_checkpointing", "transformers.js_config"}
    | {"min_length", "do_sample", "early_stopping", "no_repeat_ngram_size", "prefix", "output_past", "torchscript"}
    | {"return_dict_in_generate", "output_scores", "output_attentions", "output_hidden_states", "use_bfloat16"}
    | {"tf_legacy_loss", "chunk_size_feed_forward", "is_decoder", "num_labels", "problem_type", "finetuning_task"}
    | {"classifier_dropout", "hidden_dropout", "predict_special_tokens", "n_special", "name_or_path"}
    | {"max_sequence_length", "model_max_length", "normalize_attention_scores", "apply_query_key_layer_scaling"}
)
"""Settings of Hugging Face that change no number: of training, of sampling, of other tasks, of the library."""


class Settings:
    """The settings of a source. Each is read once; what is left in the end must be harmless or off.

    Every method raises `CheckpointError` for a value that cannot be imported.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self.config, self._left = path, config, dict(config)

    def take(self, key: str, kind: Any, default: Any = ...) -> Any:
        """A setting of a type, or the value in a table; `default`, if there is one, where it is missing or null."""
        value = self._left.pop(key, None)
        if value is None and default is not ...:
            value = default
        if isinstance(kind, Mapping):
            return kind[value] if isinstance(value, str) and value in kind else self.refuse(key, value)
        if value is None and default is None:
            return None
        is_of_kind = isinstance(value, int | float if kind is float else kind)
        if not is_of_kind or isinstance(value, bool) != (kind is bool):
            self.refuse(key, value)
        if isinstance(value, int | float) and abs(value) > LARGEST:
            self.refuse(key, value)
        return kind(value)

    def require(self, key: str, *values: Any) -> None:
        """Refuses a setting that is there and has none of these values."""
        if (value := self._left.pop(key, None)) is not None and value not in values:
            self.refuse(key, value)

    def finish(self, *harmless: str) -> None:
        """Refuses settings that were not read, unless they are harmless or off (null, false, 0 or empty).

        One that is not known may change numbers.
        """
        self.require("is_causal", True)  # off, every token sees those that follow
        for key, value in self._left.items():
            if value and not (key in HARMLESS or key in harmless or key.startswith(("_", "unsloth_"))):
                problem = f"{self.path}: {key} is {ascii(value)[:80]}, which xlcli does not know."
                raise CheckpointError(problem, f"If it changes no prediction, remove it from a copy of {CONFIG}. {CAN}")

    def refuse(self, key: str, value: Any) -> NoReturn:
        """Raises the error for a setting that cannot be imported."""
        problem = "is missing" if value is None else f"is {ascii(value)[:80]}, which xlcli cannot import"
        raise CheckpointError(f"{self.path}: {key} {problem}.", CAN)
