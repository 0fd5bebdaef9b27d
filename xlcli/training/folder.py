"""The folder of a run: checked, written when the run begins, and restored from a checkpoint when it continues."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from xlcli.config import Tree
from xlcli.errors import CheckpointError, ConfigError
from xlcli.events import Notice
from xlcli.files import sha256, write_atomic
from xlcli.files.tensors import read_header
from xlcli.store import commit, layout
from xlcli.store import folder as store
from xlcli.store.commit import checkpoints, latest, manifest
from xlcli.store.discover import find
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import BEST, CHECKPOINTS, DOCUMENTS, ENCODINGS, HELD_OUT, WEIGHTS, write_config
from xlcli.store.weights import read_weights, weights
from xlcli.text.tokenizers import Tokenizer
from xlcli.training import checkpoint
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun


def load_origin(init: Path, folder: Path) -> LoadedModel:
    """The model in `init`, checked: a run in `folder` can start from it."""
    if init.resolve() == folder.resolve():
        raise ConfigError(
            f"{folder} is the folder of the model that the run starts from.", "Choose another one with -o NAME."
        )
    model = store.load(init)
    bad = [name for name, tensor in weights(model.network).items() if not bool(tensor.isfinite().all())]
    if bad:
        raise CheckpointError(f"weights of {init} hold NaN or infinity, first in '{bad[0]}'.", "Use another model.")
    return model


def origin_again(origin: Tree) -> dict[str, Tensor]:
    """Weights that a run starts from which was killed before its first checkpoint."""
    model = store.load(find(origin["model"]))
    if model.fingerprints["weights"] != origin["weights"]:
        raise CheckpointError(
            f"the run had taken no step, and model {model.name} has changed since.", "Train anew with --overwrite."
        )
    return weights(model.network)


def check_new(folder: Path, *, overwrite: bool) -> None:
    """Refuses a folder in which a new run would replace a model or a file of the user."""
    if commit.holds_run(folder):
        if not overwrite:
            raise ConfigError(
                f"{folder} already holds a model.",
                "Add --resume to continue it, --overwrite to replace it, or -o NAME.",
            )
    elif name := commit.foreign_entry(folder):
        raise ConfigError(
            f"{folder} is not a model folder and not empty: it holds {name}.",
            "Choose a new or empty folder with -o NAME.",
        )


def check_texts(folder: Path, ready: Prepared) -> None:
    """Refuses a text that is a file of the model in `folder`, with which it would be removed."""
    parts = ready.parts
    for corpus in (parts.train.corpus, parts.valid.corpus, parts.test.corpus):
        for source in corpus.sources:
            if source.spool is None and commit.belongs_to_run(folder, source.path):
                raise ConfigError(
                    f"{source.name} belongs to the model in {folder}, which the new one replaces.",
                    "Copy the text to another folder first, or choose another model folder with -o NAME.",
                )


def check_has_run(folder: Path) -> None:
    """Refuses a folder without a run."""
    if not commit.holds_run(folder) and commit.place_of_run(folder) == folder:
        raise CheckpointError(f"there is no run to resume in {folder}.", "Drop --resume, or give its folder with -o.")


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[Notice]]:
    """The newest undamaged checkpoint of the run in `folder`, None if it has taken no step, and remarks."""
    found = latest(folder / CHECKPOINTS, spare={BEST})
    notices = [Notice(f"{path} is damaged and was skipped: {why}", "warning") for path, why in found.rejected.items()]
    if found.path is None:
        if found.rejected:
            raise CheckpointError(f"every checkpoint in {folder} is damaged.", "Train anew with --overwrite.")
        if (folder / WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} holds a model but no checkpoint to resume from.",
                "Train anew with --overwrite, or into another folder with -o NAME.",
            )
        notices.append(Notice("the run had taken no step yet and starts again"))
    return found.path, notices


def write_new(folder: Path, ready: Prepared, run: TrainingRun, record: dict[str, Any]) -> Path:
    """Writes a run at step 0 and returns its checkpoint. It can be resumed as soon as `config.json` exists."""
    ready.tokenizer.save(folder)
    _write_held_out(folder, ready)
    layout.trim_metrics(folder, -1, validated=False)
    layout.write_record(folder, record | {"finished": False})
    write_config(folder, ready.config, encoding=ready.config.train.weights)
    return checkpoint.save(run, folder, seconds=0.0, corpus=ready.identity)


def restore(
    point: Path, run: TrainingRun, ready: Prepared, folder: Path, *, allow_data_change: bool
) -> Iterator[Notice]:
    """Restores run and folder from a checkpoint."""
    warnings = checkpoint.load(
        run, point, folder, ready.tokenizer, corpus=ready.identity, allow_data_change=allow_data_change
    )
    yield from (Notice(warning, "warning") for warning in warnings)
    if not run.ranks.is_first:
        return
    if allow_data_change:
        _write_held_out(folder, ready)
    layout.trim_metrics(folder, run.step, validated=run.validated_step == run.step)
    write_config(folder, ready.config, encoding=ready.config.train.weights)


def _write_held_out(folder: Path, ready: Prepared) -> None:
    for name, part in (("valid", ready.parts.valid), ("test", ready.parts.test)):
        if part.n_bytes:
            write_atomic(folder / HELD_OUT[name], part.read())
        else:
            (folder / HELD_OUT[name]).unlink(missing_ok=True)
        if part.n_bytes and ready.config.train.reset_on_document:
            write_atomic(folder / DOCUMENTS[name], (b"%d\n" % start for start in part.documents))
        else:
            (folder / DOCUMENTS[name]).unlink(missing_ok=True)


def restore_best(run: TrainingRun, checkpoint: Path, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Restores the best weights up to this checkpoint, in the encoding of the run. Returns warnings.

    Later ones belong to steps that are undone. Without a best step the weights in the folder stay. If the copy in the
    checkpoint is damaged, the model and other checkpoints may hold the same weights.

    Args:
        run: The run, restored.
        checkpoint: Its checkpoint.
        folder: The model folder.
        tokenizer: The tokenizer of the run.
    """
    present, step, encoding = folder / WEIGHTS, run.best_step, run.config.train.weights
    with suppress(CheckpointError):
        same = step is None or sha256(present) == manifest(checkpoint).get(BEST, (0, ""))[1]
        if same and read_header(present)[1].get("encoding") == encoding:
            return []
    copies = [present]
    if step is not None:
        own = [checkpoint / BEST] if _lists_best(checkpoint) else []
        others = [path for path in checkpoints(checkpoint.parent) if path != checkpoint]
        copies = [*own, present, *(path / BEST for path in others if _lists_best(path))]
    for path in copies:
        with suppress(CheckpointError):
            metadata = read_header(path)[1]
            if metadata.get("encoding") in ENCODINGS and step in (None, _step(metadata)):
                best, metadata = read_weights(path, run.model, metadata["encoding"])
                store.save_model(folder, run.config, best, tokenizer, metadata, encoding=encoding)
                return []
    run.best_bits, run.best_step = math.inf, None
    if step is None and not present.exists():
        return []
    run.validated_step, run.validation_due = None, True
    metadata = {"step": str(run.step), "validation_bits_per_byte": ""}
    store.save_model(folder, run.config, weights(run.model), tokenizer, metadata, encoding=encoding)
    lost = "the stored weights are" if step is None else f"the best weights, of step {step}, are"
    return [f"{lost} missing or damaged in every copy; those of step {run.step} replace them"]


def _lists_best(checkpoint: Path) -> bool:
    with suppress(CheckpointError):
        return BEST in manifest(checkpoint)
    return False


def _step(metadata: Mapping[str, str]) -> int | None:
    """Step that weights are from."""
    text = metadata.get("step", "")
    return int(text) if text.isdecimal() and len(text) < 20 else None
