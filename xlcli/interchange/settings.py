"""The settings of a model of another program, in its `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from xlcli.errors import CheckpointError
from xlcli.interchange.source import CONFIG

CAN = "docs/models.md says what a format can have."
"""Remedy for what cannot be imported or exported."""
UNQUANTIZED = "Its weights are quantized: import those from before, or a GGUF file of the model."
LARGEST_NUMBER = 2**31
"""Maximum absolute value of a number."""
HARMLESS = (
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
"""Settings of Hugging Face that change no number: of training, of sampling, of other tasks, of the library."""


class Settings:
    """The settings of a source. Each is read once; what is `left` in the end must be harmless or off.

    Every method raises `CheckpointError` for a value that cannot be imported.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self.config, self.left = path, config, dict(config)

    def take(self, key: str, kind: Any, default: Any = ...) -> Any:
        """A setting of a type, or the value in a table; `default`, if there is one, where it is missing or null."""
        value = self.left.pop(key, None)
        if value is None and default is not ...:
            value = default
        if isinstance(kind, Mapping):
            return kind[value] if isinstance(value, str) and value in kind else self.refuse(key, value)
        if value is None and default is None:
            return None
        is_of_kind = isinstance(value, int | float if kind is float else kind)
        if not is_of_kind or isinstance(value, bool) != (kind is bool):
            self.refuse(key, value)
        if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
            self.refuse(key, value)
        return kind(value)

    def require(self, key: str, *values: Any) -> None:
        """Refuses a setting that is there and has none of these values."""
        if (value := self.left.pop(key, None)) is not None and value not in values:
            self.refuse(key, value)

    def finish(self, *harmless: str) -> None:
        """Refuses settings that were not read, unless they are harmless or off (null, false, 0 or empty).

        One that is not known may change numbers.
        """
        self.require("is_causal", True)  # off, every token sees those that follow
        for key, value in self.left.items():
            if value and not (key in HARMLESS.split() or key in harmless or key.startswith(("_", "unsloth_"))):
                problem = f"{self.path}: {key} is {ascii(value)[:80]}, which xlcli does not know."
                remedy = f"If it changes no prediction, remove it from a copy of {CONFIG}. {CAN}"
                raise CheckpointError(problem, UNQUANTIZED if key == "quantization_config" else remedy)

    def refuse(self, key: str, value: Any) -> NoReturn:
        """Raises the error for a setting that cannot be imported."""
        problem = "is missing" if value is None else f"is {ascii(value)[:80]}, which xlcli cannot import"
        raise CheckpointError(f"{self.path}: {key} {problem}.", CAN)
