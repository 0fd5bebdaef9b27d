"""The folder of a run: checked, written when the run begins, and restored from a checkpoint when it continues."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from xlcli.config import Tree
from xlcli.errors import CheckpointError, ConfigError
from xlcli.events import Notice
from xlcli.files import write_atomic
from xlcli.store import commit, layout
from xlcli.store import folder as store
from xlcli.store.commit import latest
from xlcli.store.discover import find
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import BEST, CHECKPOINTS, DOCUMENTS, HELD_OUT, WEIGHTS, write_config
from xlcli.store.weights import weights
from xlcli.training import checkpoint
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun
from xlcli.training.validation import describe_run


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


def write_new(folder: Path, ready: Prepared, run: TrainingRun) -> Path:
    """Writes a run at step 0 and returns its checkpoint. It can be resumed as soon as `config.json` exists."""
    ready.tokenizer.save(folder)
    _write_held_out(folder, ready)
    layout.trim_metrics(folder, -1, validated=False)
    layout.write_record(folder, describe_run(ready, run) | {"finished": False})
    write_config(folder, ready.config, encoding=ready.config.train.weights)
    return checkpoint.save(run, folder, ready)


def restore(run: TrainingRun, point: Path, ready: Prepared, *, allow_data_change: bool) -> list[Notice]:
    """Restores run and folder from a checkpoint; all ranks must call it. Returns warnings."""
    folder = point.parent.parent
    warnings = checkpoint.load(run, point, folder, ready, allow_data_change=allow_data_change)
    if run.ranks.is_first:
        if allow_data_change:
            _write_held_out(folder, ready)
        counters = run.counters
        layout.trim_metrics(folder, counters.step, validated=counters.validated_step == counters.step)
        write_config(folder, ready.config, encoding=ready.config.train.weights)
    return warnings


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
