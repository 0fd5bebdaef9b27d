"""The best weights of a run, restored with its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xlcli.errors import CheckpointError
from xlcli.files import sha256
from xlcli.files.tensors import read_header
from xlcli.store.commit import checkpoints, checksums
from xlcli.store.folder import save_model
from xlcli.store.layout import BEST, ENCODINGS, WEIGHTS
from xlcli.store.weights import read_weights, weights
from xlcli.text.tokenizers import Tokenizer
from xlcli.training.run import TrainingRun


def restore_best(
    run: TrainingRun, checkpoint: Path, digest: str | None, folder: Path, tokenizer: Tokenizer
) -> list[str]:
    """Restores the best weights up to this checkpoint, in the encoding of the run. Returns warnings.

    Later ones belong to steps that are undone. Without a best step the weights in the folder stay. If the copy in the
    checkpoint is damaged, the model and other checkpoints may hold the same weights.

    Args:
        run: The run, restored.
        checkpoint: Its checkpoint.
        digest: SHA-256 of the copy in the checkpoint; None if there is none.
        folder: The model folder.
        tokenizer: The tokenizer of the run.
    """
    present, step, encoding = folder / WEIGHTS, run.best_step, run.config.train.weights
    with suppress(CheckpointError):
        same = step is None or (digest is not None and sha256(present) == digest)
        if same and read_header(present)[1].get("encoding") == encoding:
            return []
    copies = [present]
    if step is not None:
        own = [checkpoint / BEST] if digest is not None else []
        others = [path for path in checkpoints(checkpoint.parent) if path != checkpoint]
        copies = [*own, present, *(path / BEST for path in others if _lists_best(path))]
    for path in copies:
        with suppress(CheckpointError):
            metadata = read_header(path)[1]
            if metadata.get("encoding") in ENCODINGS and step in (None, _step(metadata)):
                best, metadata = read_weights(path, run.model, metadata["encoding"])
                save_model(folder, run.config, best, tokenizer, metadata, encoding=encoding)
                return []
    run.best_bits, run.best_step = math.inf, None
    if step is None and not present.exists():
        return []
    run.validated_step, run.validation_due = None, True
    metadata = {"step": str(run.step), "validation_bits_per_byte": ""}
    save_model(folder, run.config, weights(run.model), tokenizer, metadata, encoding=encoding)
    lost = "the stored weights are" if step is None else f"the best weights, of step {step}, are"
    return [f"{lost} missing or damaged in every copy; those of step {run.step} replace them"]


def _lists_best(checkpoint: Path) -> bool:
    with suppress(CheckpointError):
        return BEST in checksums(checkpoint)
    return False


def _step(metadata: Mapping[str, str]) -> int | None:
    """Step that weights are from."""
    text = metadata.get("step", "")
    return int(text) if text.isdecimal() and len(text) < 20 else None
