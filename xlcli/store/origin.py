"""Configuration of a training run that starts from the weights of a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from xlcli import config as settings
from xlcli import presets
from xlcli.config import Config, Tree
from xlcli.config.workflows import TokenizerKind
from xlcli.errors import CheckpointError, ConfigError, InvalidSettingError
from xlcli.files import read_json
from xlcli.store.discover import bundled_models
from xlcli.store.layout import TOKENIZER, SavedConfig, read_config_file, read_record, verify_file

INIT = "init"  # key of `record.json`: the model that a run started from
TRAIN_FILES, MOST_TRAIN_FILES = "train_files", 2000  # key: digests of the files that were trained on (at most 40 kB)
NEW = "none"  # value of `--init` in place of a model: new weights
_OF_THE_RUN = frozenset(  # keys of `train` with their own defaults in the new run; others are the model's
    {"lr", "adam_lr", "lr_schedule", "decay_fraction", "min_lr_ratio", "warmup_steps"}
    | {"max_steps", "max_tokens", "max_time", "eval_every", "patience", "save_every", "keep_checkpoints", "keep_at"}
    | {"on_divergence", "weights"}
)
BATCH_SIZE = 8  # default, unless the model had fewer: many steps matter more than accurate gradients (benchmarks/log)
_WITHOUT_WEIGHTS = ("model.dropout", "model.loss_chunk", "model.feedforward.chunk_len")  # no weight depends on them


def configurations(
    changes: Mapping[str, Any], preset: str | None = None, folder: Path | None = None, *, or_bundled: bool = False
) -> dict[str, Config]:
    """The user's settings over the settings of the model in `folder`, by the name of the model's preset; see `presets`.

    Shape and vocabulary come from the model. Learning rates and budgets stay open, because they depend on the text.

    Without `folder` there is one for each preset. If preset, shape and vocabulary are open, `or_bundled` adds the one
    of a run from the bundled model, by that model's name. `CheckpointError` if the model's configuration is missing or
    damaged; `ConfigError` if a setting is illegal, or contradicts shape or vocabulary of the model.
    """
    if folder is None:
        configs = presets.configurations(changes, preset)
        if or_bundled and preset is None:
            configs |= _of_bundled_model(changes)
        return configs
    if preset is not None:
        raise ConfigError("--preset and --init cannot be combined: a model has its own shape.", "Give one of them.")
    header = read_config_file(folder)
    record = read_record(folder)
    saved = header.config
    tokenizer = _kind_of_tokenizer(folder, header.files)
    train = saved.train.model_dump(mode="json", exclude=set(_OF_THE_RUN))
    train["batch_size"] = min(saved.train.batch_size, BATCH_SIZE)
    if saved.train.lr is None:  # nothing is known of the training of an imported model (benchmarks/log)
        train["optimizer"] = "adamw"
    # A batch has at least as many sequences as microbatches. The user's number is validated before they are compared.
    wanted_size = changes.get("train", {}).get("batch_size", train["batch_size"])
    batch_size = settings.make({"train": {"batch_size": wanted_size}}).train.batch_size
    train["grad_accum"] = min(saved.train.grad_accum, batch_size)
    of_model = {"model": saved.model.model_dump(mode="json"), "text": {"tokenizer": tokenizer}, "train": train}
    text = dict(changes.get("text", {}))
    if text.get("tokenizer") == "auto":
        text["tokenizer"] = tokenizer
    config = settings.make(of_model, {**changes, "text": text})
    _check(config, saved, tokenizer, folder.resolve().name)
    return {str(record.get("preset", "")): config}


def _of_bundled_model(changes: Mapping[str, Any]) -> dict[str, Config]:
    """The configuration of a run from the first bundled model, by its name; empty if `changes` rule this model out."""
    text = changes.get("text", {})
    is_vocabulary_open = text.get("tokenizer", "auto") == "auto" and not text.get("vocab_size")
    is_shape_open = not changes.get("model")
    if not is_shape_open or not is_vocabulary_open:
        return {}
    for model in bundled_models()[:1]:
        with suppress(CheckpointError, ConfigError):  # a damaged one, or a setting that it cannot have
            [config] = configurations(changes, None, model.folder).values()
            return {model.name: config}
    return {}


def _kind_of_tokenizer(folder: Path, checksums: Mapping[str, str]) -> str:
    """Kind of the tokenizer in a model folder, as in settings; `auto` for one that comes with a model alone."""
    description = TOKENIZER[0]
    if description in checksums:
        verify_file(folder, description, checksums)
    kind = read_json(folder / description).get("kind")
    return str(kind) if kind in get_args(TokenizerKind) else "auto"


def origin_of(record: Mapping[str, Any]) -> Tree:
    """Description of the model that a run started from, by its record; empty for new weights or a damaged entry."""
    entry = record.get(INIT)
    if isinstance(entry, dict) and isinstance(entry.get("model"), str) and isinstance(entry.get("weights"), str):
        return entry
    return {}


def imported(record: Mapping[str, Any]) -> Tree:
    """What was recorded when a model was imported, or the one that its run started from; empty for others."""
    about = record.get("imported")
    if isinstance(about, dict):
        return about
    origin = origin_of(record)
    return imported(origin) if origin else {}


def was_trained_on(record: Mapping[str, Any], digest: str) -> bool | None:
    """Whether a model was trained on the file with this digest (`Part.files`); None if its record does not say."""
    digests = record.get(TRAIN_FILES)
    if not isinstance(digests, list):
        return None
    if digest in digests:
        return True
    is_whole_list = len(digests) < MOST_TRAIN_FILES and INIT not in record  # of its origin the files are not listed
    return False if is_whole_list else None


def text_size(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes and tokens of the training text of a model, by its record."""
    match record.get("train"):
        case {"bytes": int(n_bytes), "tokens": int(n_tokens)} if n_bytes > 0 and n_tokens > 0:
            return n_bytes, n_tokens
    return None


def _check(config: Config, saved: SavedConfig, tokenizer: str, name: str) -> None:
    """`InvalidSettingError` if the configuration contradicts shape or vocabulary of the model."""
    before: Tree = {"model": saved.model.model_dump(), "text": {"tokenizer": tokenizer}}
    now: Tree = {"model": config.model.model_dump(), "text": {"tokenizer": config.text.tokenizer}}
    if config.text.vocab_size not in (None, saved.text.vocab_size):
        before["text"]["vocab_size"] = saved.model.vocab_size
        now["text"]["vocab_size"] = config.text.vocab_size
    changed = [key for key in settings.differences(before, now) if not key.startswith(_WITHOUT_WEIGHTS)]
    if changed:
        key = first_cause(changed)
        value: Any = before
        for part in key.split("."):
            value = value.get(part)
        reason = f"must be {value} as in {name}, whose weights the run starts from"
        raise InvalidSettingError(key, reason, "Leave it out, or train without --init.")


def first_cause(keys: Sequence[str]) -> str:
    """The key to name of several that differ: the first `kind`, which implies its other keys, else the first one."""
    for key in keys:
        if key.endswith(".kind"):
            return key
    return keys[0]
