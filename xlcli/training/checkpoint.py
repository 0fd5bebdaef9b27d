"""Checkpoints: a training run saved and restored.

On a CPU with a fixed number of threads the resumed run equals the uninterrupted one to the bit.

A checkpoint is one committed folder (see `store.commit`):

    weights.safetensors    weights                           optimizer.safetensors  state of the optimizers
    memory.safetensors     memory of every sequence          random.safetensors     random-number generator states
    state.json             counters, position in the data    best.safetensors       best weights so far, if validated

Only files that its manifest lists are read. Checkpoints and model share no files or disk blocks, so damage to one
leaves the others usable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from xlcli.config import BaseConfig, Tree, validate
from xlcli.errors import CheckpointError, ConfigError, StateError
from xlcli.files import read_blocks, read_json, write_atomic
from xlcli.files.tensors import TensorInfo, read_tensors, write_tensors
from xlcli.ranks import Ranks, divided, is_divided, local, whole
from xlcli.state import State
from xlcli.store.commit import commit, latest, manifest, step_name
from xlcli.store.layout import BEST, CHECKPOINT_FILES, CHECKPOINTS, ENCODINGS, SCHEMA, WEIGHTS
from xlcli.store.weights import weights
from xlcli.text.tokenizers import Tokenizer
from xlcli.training import defaults
from xlcli.training.folder import restore_best
from xlcli.training.run import TrainingRun

_ANEW = "Train anew with --overwrite."

Steps = Annotated[int, Field(ge=0, lt=10**12)]


class Counters(BaseConfig):
    """Counters of `state.json`; see `TrainingRun`."""

    step: Steps
    tokens: Annotated[int, Field(ge=0, lt=10**18)]
    seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    n_read: Annotated[int, Field(ge=0, lt=10**18)]
    best_bits: Annotated[float, Field(allow_inf_nan=False)] | None
    best_step: Steps | None
    validated_step: Steps | None
    validation_due: bool
    rollbacks: Annotated[int, Field(ge=0, le=100)]
    anchor: Steps
    stale: Steps
    plateau: Annotated[float, Field(gt=0.0, le=1.0)] | None
    skipped: Steps


class LossScale(BaseConfig):
    """`loss_scale` of `state.json`: the scale, and the number of steps since it changed."""

    scale: Annotated[float, Field(ge=1.0, le=2.0**127)]
    steps: Steps


def save(run: TrainingRun, folder: Path, *, seconds: float, corpus: Mapping[str, str]) -> Path:
    """Writes a checkpoint of the run after `seconds` of training and returns its folder.

    The caller has checked that weights, optimizers and memory are finite.

    Raises:
        ResourceError: The disk is full or fails; earlier checkpoints are unchanged.
    """
    ranks = run.ranks
    own_weights = gathered(weights(run.model), ranks)
    optimizer = gathered(run.optimizers.tensors(), ranks)
    # In main memory, of which the first rank needs as much as all devices have memory of sequences.
    own = [state.map(Tensor.cpu) for state in run.states] if ranks.size > 1 else run.states
    states = [state.map(ranks.gather_rows) for state in own]
    if not ranks.is_first:
        return folder / CHECKPOINTS / step_name(run.step)

    def write(into: Path) -> None:
        write_tensors(into / "weights.safetensors", own_weights, {})
        write_tensors(into / "optimizer.safetensors", optimizer, {})
        memory = {f"{i}.{key}": t for i, state in enumerate(states) for key, t in state.tensors().items()}
        write_tensors(into / "memory.safetensors", memory, {})
        write_tensors(into / "random.safetensors", _generator_states(), {})
        if run.best_step is not None:
            with suppress(CheckpointError):  # the file cannot be read: training goes on
                write_atomic(into / BEST, read_blocks(folder / WEIGHTS))
        facts = {
            "schema": SCHEMA,
            **_counters(run, seconds).model_dump(),
            "limits": _limits(run),
            "loss_scale": _loss_scale(run),
            "lr": run.config.train.lr,
            "corpus": dict(corpus),
            "states": [state.describe() for state in states],
            "seed": run.config.runtime.seed,
            **_environment(run),
        }
        write_atomic(into / "state.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    return commit(folder / CHECKPOINTS, run.step, write, run.config.train.keep_checkpoints, protected=run.anchor)


def gathered(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on the first rank, nothing on the others; all ranks must call it."""
    whole_ones: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if ranks.is_first:
            whole_ones[name] = full.cpu() if is_divided(tensor) else full
    return whole_ones


def agree(run: TrainingRun) -> None:
    """Gives all ranks the counters of the first one, which alone reads and restores the best weights."""
    if run.ranks.size > 1:
        values = run.ranks.broadcast(_counters(run, run.seconds).model_dump() if run.ranks.is_first else None)
        counters = validate(Counters, values)
        run.rollbacks = counters.rollbacks
        _set_progress(run, counters)
        _set_scores(run, counters)


def load(
    run: TrainingRun,
    checkpoint: Path,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    corpus: Mapping[str, str],
    allow_data_change: bool,
) -> tuple[str, ...]:
    """Restores a run, and the best weights in the model folder, from a checkpoint.

    Args:
        run: A run just built from the same configuration.
        checkpoint: A verified checkpoint.
        folder: The model folder.
        tokenizer: The tokenizer of the run.
        corpus: Checksums of the texts and the tokenizer in use.
        allow_data_change: Accept other texts.

    Returns:
        Warnings about losses and differences that make the run deviate from the uninterrupted one.

    Raises:
        CheckpointError: The checkpoint is of another run, another text or another format.
    """
    files = manifest(checkpoint)
    if missing := sorted(set(CHECKPOINT_FILES) - files.keys()):
        raise CheckpointError(f"{checkpoint} is incomplete: its manifest has no '{missing[0]}'.", _ANEW)
    facts = read_json(checkpoint / "state.json")
    try:
        if facts["schema"] != SCHEMA:
            raise CheckpointError(
                f"{checkpoint} has format {facts['schema']}; this xlcli reads format {SCHEMA}.", "Use a newer xlcli."
            )
        if facts["seed"] != run.config.runtime.seed:
            raise CheckpointError(f"{checkpoint} is of a run with the seed {facts['seed']}.", _ANEW)
        changed = _changed_texts(facts["corpus"], corpus, allow_data_change)
        _load_tensors(run, checkpoint, facts["states"])
        counters = validate(Counters, {name: facts[name] for name in Counters.model_fields})
        _set_progress(run, counters)
        run.rollbacks = counters.rollbacks if facts["lr"] == run.config.train.lr else 0  # a new rate is as given
        if "valid" not in changed:
            _set_scores(run, counters)
            if facts["limits"] != _limits(run):  # another budget or patience is a new chance
                run.patience.stale, run.patience.plateau = 0, None
        _restore_loss_scale(run, facts["loss_scale"])
        warnings = []
        if run.ranks.is_first:
            warnings += restore_best(run, checkpoint, folder, tokenizer)
        warnings += [
            f"{name} was {facts[name]} and is {now}: the resumed run will not equal the uninterrupted one to the bit"
            for name, now in _environment(run).items()
            if facts[name] != now and (run.step or name != "processes")  # the first rank alone writes step 0
        ]
        _restore_generators(checkpoint)
    except (StateError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint}: {error.message}", _ANEW) from None
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}.", _ANEW) from None
    if changed:
        warnings.append("the text is not the one this run began with; sequences continue at the same positions")
    return tuple(warnings)


def runtime_settings(folder: Path) -> Tree:
    """Settings of section `runtime` by the newest checkpoint of the run in `folder`; empty if there is none."""
    point = latest(folder / CHECKPOINTS, spare={BEST}).path
    if point is None:
        return {}
    facts = read_json(point / "state.json")
    return {key: facts.get(key) for key in ("seed", "dtype", "threads")}


def _changed_texts(saved: Mapping[str, str], here: Mapping[str, str], allow_change: bool) -> list[str]:
    """Names of the texts that differ from those of the checkpoint."""
    changed = [name for name, checksum in saved.items() if here.get(name) != checksum]
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
    expected = {name: TensorInfo(ENCODINGS[str(t.dtype).split(".")[1]], tuple(t.shape)) for name, t in own.items()}
    saved, _ = read_tensors(checkpoint / "weights.safetensors", expected=expected)
    with torch.no_grad():
        for name, tensor in own.items():
            local(tensor).copy_(local(divided(saved[name].to(tensor.device), tensor)))
    run.optimizers.load(read_tensors(checkpoint / "optimizer.safetensors", expected=None)[0])
    memory, _ = read_tensors(checkpoint / "memory.safetensors", expected=None)
    if len(states) != len(run.states):
        raise CheckpointError(f"{checkpoint} was taken with another --grad-accum.", "Resume with the same one.")
    run.states = [
        State.restore({n.removeprefix(f"{i}."): t for n, t in memory.items() if n.startswith(f"{i}.")}, description)
        for i, description in enumerate(states)
    ]
    if run.ranks.size > 1:
        run.states = [state.map(lambda t: t[run.ranks.rows(len(t))].clone()) for state in run.states]
    run.states = [state.map(lambda t: t.to(run.runtime.device)) for state in run.states]
    if not all(run.model.is_compatible(state) for state in run.states):
        raise StateError("the memory does not fit the model.", _ANEW)


def _environment(run: TrainingRun) -> dict[str, Any]:
    """Properties of the machine and its settings that change the bits of a result."""
    return {
        "threads": run.runtime.threads,
        "processes": run.ranks.size,
        "device": run.runtime.device.type,
        "dtype": run.runtime.dtype_name,
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def _counters(run: TrainingRun, seconds: float) -> Counters:
    return Counters(
        step=run.step,
        tokens=run.tokens,
        seconds=seconds,
        n_read=run.loader.n_read,
        best_bits=None if math.isinf(run.best_bits) else run.best_bits,
        best_step=run.best_step,
        validated_step=run.validated_step,
        validation_due=run.validation_due,
        rollbacks=run.rollbacks,
        anchor=run.anchor,
        stale=run.patience.stale,
        plateau=run.patience.plateau,
        skipped=run.skipped,
    )


def _set_progress(run: TrainingRun, counters: Counters) -> None:
    run.step, run.tokens, run.seconds = counters.step, counters.tokens, counters.seconds
    run.loader.n_read = counters.n_read
    run.anchor, run.skipped = counters.anchor, counters.skipped


def _set_scores(run: TrainingRun, counters: Counters) -> None:
    run.best_bits = math.inf if counters.best_bits is None else counters.best_bits
    run.best_step = counters.best_step
    run.validated_step, run.validation_due = counters.validated_step, counters.validation_due
    run.patience.stale, run.patience.plateau = counters.stale, counters.plateau


def _limits(run: TrainingRun) -> dict[str, Any]:
    """Settings that end a run."""
    train = run.config.train
    return {key: getattr(train, key) for key in (*defaults.BUDGETS, "patience")}


def _loss_scale(run: TrainingRun) -> dict[str, Any] | None:
    """Loss scale in float16, and the number of steps since it changed."""
    state = run.scaler.state_dict()
    return {"scale": state["scale"], "steps": state["_growth_tracker"]} if state else None


def _restore_loss_scale(run: TrainingRun, saved: Any) -> None:
    """Restores the loss scale, if run and checkpoint are in float16."""
    if run.scaler.is_enabled() and saved is not None:
        scale = validate(LossScale, saved)
        state = run.scaler.state_dict() | {"scale": scale.scale, "_growth_tracker": scale.steps}
        run.scaler.load_state_dict(state)


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(checkpoint: Path) -> None:
    states, _ = read_tensors(checkpoint / "random.safetensors", expected=None)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
