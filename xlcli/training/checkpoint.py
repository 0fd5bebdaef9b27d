"""A run on disk and back: weights, optimizers, memory of every lane, place in the data, random numbers, counters.

A checkpoint is one committed folder (see `store.commit`):

    weights.safetensors  optimizer.safetensors  memory.safetensors  state.json
    best.safetensors     the model's best weights at that time, where validation had found any
"""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xlcli.errors import CheckpointError, StateError
from xlcli.files import read_json, read_tensors, sha256, write_atomic, write_tensors
from xlcli.state import State
from xlcli.store.commit import commit, step_name
from xlcli.store.folder import weights
from xlcli.store.layout import CHECKPOINTS, WEIGHTS
from xlcli.training.run import TrainingRun

SCHEMA = 1
"""Version of `state.json`. A reader refuses any other."""
BEST = "best.safetensors"
"""Another name of the model's weights file, whose next version is another file."""


def save(run: TrainingRun, folder: Path, *, seconds: float, corpus: Mapping[str, str]) -> Path:
    """Commits the run as it stands after `run.step` steps and `seconds` of training; returns the new folder.

    Raises:
        DivergedError: The run could not go on from here; nothing was written.
        ResourceError: No room; earlier checkpoints are as they were.
    """
    run.check_finite()

    def write(into: Path) -> None:
        write_tensors(into / "weights.safetensors", weights(run.model), {})
        write_tensors(into / "optimizer.safetensors", run.optimizers.tensors(), {})
        memory = {f"{i}.{name}": t for i, state in enumerate(run.states) for name, t in state.tensors().items()}
        write_tensors(into / "memory.safetensors", memory, {})
        if run.best_step is not None:
            _link(folder / WEIGHTS, into / BEST)
        facts = {
            "schema": SCHEMA,
            "step": run.step,
            "tokens": run.tokens,
            "seconds": seconds,
            "position": run.loader.position,
            "best_bits": None if math.isinf(run.best_bits) else run.best_bits,
            "best_step": run.best_step,
            "validated_step": run.validated_step,
            "validation_due": run.validation_due,
            "corpus": dict(corpus),
            "states": [state.describe() for state in run.states],
            "random": _random_state(),
            **_surroundings(run),
        }
        write_atomic(into / "state.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    return commit(folder / CHECKPOINTS, step_name(run.step), write, run.config.train.keep_checkpoints)


def load(
    run: TrainingRun, checkpoint: Path, folder: Path, *, corpus: Mapping[str, str], allow_data_change: bool
) -> tuple[str, ...]:
    """Puts the run, and the best weights in `folder`, where they were when the checkpoint was taken.

    Args:
        run: A run just built from the same configuration.
        checkpoint: A verified checkpoint.
        folder: The model folder.
        corpus: Identity of texts and tokenizer at hand.
        allow_data_change: Accept other texts.

    Returns:
        Warnings about what may make the run differ from here on.

    Raises:
        CheckpointError: The checkpoint is of another run, another text or another format.
    """
    facts = read_json(checkpoint / "state.json")
    try:
        if facts["schema"] != SCHEMA:
            raise CheckpointError(f"{checkpoint} has format {facts['schema']}, this is {SCHEMA}.", "Use a newer xlcli.")
        changed = _check_corpus(facts["corpus"], corpus, allow_data_change)
        _load_tensors(run, checkpoint, facts["states"])
        run.step, run.tokens, run.seconds = facts["step"], facts["tokens"], facts["seconds"]
        run.loader.position = facts["position"]
        if "valid" not in changed:
            run.best_bits = math.inf if facts["best_bits"] is None else facts["best_bits"]
            run.best_step = facts["best_step"]
            run.validated_step = facts.get("validated_step", run.step)
            run.validation_due = facts.get("validation_due", False)
        _restore_best(run, checkpoint, folder)
        _restore_random(facts["random"])
        warnings = [
            f"{name} was {facts[name]} and is {now}: the run goes on, but not to the bit as it would have"
            for name, now in _surroundings(run).items()
            if facts.get(name, now) != now
        ]
    except StateError as error:
        raise CheckpointError(f"{checkpoint}: {error.message}", _ANEW) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}.", _ANEW) from None
    if changed:
        warnings.append("the text is not the one this run began with; lanes go on at the same places of it")
    return tuple(warnings)


_ANEW = "Train anew with --overwrite."


def _check_corpus(saved: Mapping[str, str], here: Mapping[str, str], allow_change: bool) -> list[str]:
    """Which texts have changed."""
    changed = [name for name, identity in saved.items() if here.get(name) != identity]
    if "tokenizer" in changed:
        raise CheckpointError("the tokenizer in the folder is not the one this run began with.", _ANEW)
    if changed and not allow_change:
        which = "text" if "sha256" in changed else "held-out text"
        raise CheckpointError(
            f"the {which} has changed since this run began.", "Give the same files, or add --allow-data-change."
        )
    return changed


def _load_tensors(run: TrainingRun, checkpoint: Path, states: list[dict[str, str]]) -> None:
    own = weights(run.model)
    saved, _ = read_tensors(
        checkpoint / "weights.safetensors", expected={name: ("F32", tuple(t.shape)) for name, t in own.items()}
    )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    run.optimizers.load(read_tensors(checkpoint / "optimizer.safetensors", expected=None)[0])
    memory, _ = read_tensors(checkpoint / "memory.safetensors", expected=None, device=str(run.runtime.device))
    if len(states) != len(run.states):
        raise CheckpointError(f"{checkpoint} was taken with another --grad-accum.", "Resume with the same one.")
    run.states = [
        State.restore({n.removeprefix(f"{i}."): t for n, t in memory.items() if n.startswith(f"{i}.")}, description)
        for i, description in enumerate(states)
    ]


def _surroundings(run: TrainingRun) -> dict[str, Any]:
    """What else the bits of a result depend on."""
    return {
        "threads": run.runtime.threads,
        "device": run.runtime.device.type,
        "dtype": run.runtime.dtype_name,
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def _link(weights: Path, name: Path) -> None:
    """Costs no space where the file system has links, since weights are never written in place."""
    try:
        os.link(weights, name)
    except OSError:
        shutil.copyfile(weights, name)


def _restore_best(run: TrainingRun, checkpoint: Path, folder: Path) -> None:
    """Puts back the best weights of that time: later ones belong to a course that a crash undid."""
    if run.best_step is None:
        return
    weights, kept = folder / WEIGHTS, checkpoint / BEST
    if kept.exists():
        if not weights.exists() or sha256(weights) != sha256(kept):
            write_atomic(weights, kept.read_bytes())
    elif not weights.exists():
        run.best_bits, run.best_step = math.inf, None


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _restore_random(states: Mapping[str, str]) -> None:
    def tensor(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(states[name])), dtype=torch.uint8)

    try:
        torch.set_rng_state(tensor("cpu"))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensor("cuda"))
    except RuntimeError as error:
        raise ValueError(f"the state of the random numbers does not fit: {error}") from None
