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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from xlcli.config import BaseConfig, Tree, validate
from xlcli.errors import CheckpointError, ConfigError, StateError
from xlcli.events import Notice
from xlcli.files import read_blocks, read_json, sha256, write_atomic
from xlcli.files.tensors import TensorInfo, read_header, read_tensors, with_prefix, write_tensors
from xlcli.optim import AVERAGE
from xlcli.ranks import Ranks, divided, is_divided, local, whole
from xlcli.state import State
from xlcli.store import folder as store
from xlcli.store.commit import checkpoints, commit, latest, manifest, step_name
from xlcli.store.layout import BEST, CHECKPOINT_FILES, CHECKPOINTS, ENCODINGS, SCHEMA, WEIGHTS
from xlcli.store.weights import read_weights, weights
from xlcli.training import defaults
from xlcli.training.schedule import Counters, Steps

if TYPE_CHECKING:
    from xlcli.training.run import TrainingRun

_ANEW = "Train anew with --overwrite."


class LossScale(BaseConfig):
    """`loss_scale` of `state.json`: the scale, and the number of steps since it changed."""

    scale: Annotated[float, Field(ge=1.0, le=2.0**127)]
    steps: Steps


def save(run: TrainingRun, folder: Path) -> Path:
    """Writes a checkpoint of the run, whose tensors are finite, and returns its folder.

    Raises:
        ResourceError: The disk is full or fails; earlier checkpoints are unchanged.
    """
    ranks, counters = run.ranks, run.counters
    counters.n_read = run.loader.n_read
    own_weights = gathered(weights(run.model), ranks)
    optimizer = gathered(run.optimizers.tensors(), ranks)
    # In RAM, of which the first rank needs as much as all devices have memory of sequences.
    own = [state.map(Tensor.cpu) for state in run.states] if ranks.size > 1 else run.states
    states = [state.map(ranks.gather_rows) for state in own]
    if not ranks.is_first:
        return folder / CHECKPOINTS / step_name(counters.step)

    def write(into: Path) -> None:
        memory = {f"{i}.{key}": t for i, state in enumerate(states) for key, t in state.tensors().items()}
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        parts = {"weights": own_weights, "optimizer": optimizer, "memory": memory, "random": generators}
        for name, tensors in parts.items():
            write_tensors(into / f"{name}.safetensors", tensors, {})
        if counters.best_step is not None:
            with suppress(CheckpointError):  # the file cannot be read: training goes on
                write_atomic(into / BEST, read_blocks(folder / WEIGHTS))
        scaler = run.scaler.state_dict()  # empty unless training is in float16
        facts = {
            "schema": SCHEMA,
            **counters.model_dump(),
            "limits": _limits(run),
            "loss_scale": {"scale": scaler["scale"], "steps": scaler["_growth_tracker"]} if scaler else None,
            "lr": run.config.train.lr,
            "corpus": run.data.identity,
            "states": [state.describe() for state in states],
            "seed": run.config.runtime.seed,
            **_environment(run),
        }
        write_atomic(into / "state.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    keep = run.config.train.keep_checkpoints
    return commit(folder / CHECKPOINTS, counters.step, write, keep, protected=counters.anchor)


def gathered(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on the first rank, nothing on the others; all ranks must call it."""
    whole_ones: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if ranks.is_first:
            whole_ones[name] = full.cpu() if is_divided(tensor) else full
    return whole_ones


def load(run: TrainingRun, checkpoint: Path, *, allow_data_change: bool) -> list[Notice]:
    """Restores a run, and the best weights in the model folder, from a checkpoint; all ranks must call it.

    Args:
        run: A run just built from the same configuration.
        checkpoint: A verified checkpoint.
        allow_data_change: Accept other texts.

    Returns:
        Warnings about losses and differences that make the run deviate from the uninterrupted one.

    Raises:
        CheckpointError: The checkpoint is of another run, another text or another format.
    """
    if missing := sorted(set(CHECKPOINT_FILES) - manifest(checkpoint).keys()):
        raise CheckpointError(f"{checkpoint} is incomplete: its manifest has no '{missing[0]}'.", _ANEW)
    facts = read_json(checkpoint / "state.json")
    try:
        if facts["schema"] != SCHEMA:
            raise CheckpointError(
                f"{checkpoint} has format {facts['schema']}; this xlcli reads format {SCHEMA}.",
                "Resume with the xlcli that wrote it, or train anew with --overwrite.",
            )
        if facts["seed"] != run.config.runtime.seed:
            raise CheckpointError(f"{checkpoint} is of a run with the seed {facts['seed']}.", _ANEW)
        changed = _changed_texts(facts["corpus"], run.data.identity, allow_data_change)
        _load_tensors(run, checkpoint, facts["states"])
        counters = validate(Counters, {name: facts[name] for name in Counters.model_fields})
        if facts["lr"] != run.config.train.lr:  # a new rate is as given
            counters.rollbacks = 0
        if "valid" in changed:
            scores = {"best_bits", "best_step", "validated_step", "validation_due", "stale", "plateau"}
            counters = counters.model_copy(update=run.counters.model_dump(include=scores))
        elif facts["limits"] != _limits(run):  # another budget or patience is a new chance
            counters.stale, counters.plateau = 0, None
        run.counters, run.loader.n_read = counters, counters.n_read
        if facts["loss_scale"] is not None and run.scaler.is_enabled():  # run and checkpoint are in float16
            scale = validate(LossScale, facts["loss_scale"])
            state = run.scaler.state_dict() | {"scale": scale.scale, "_growth_tracker": scale.steps}
            run.scaler.load_state_dict(state)
        warnings = []
        if run.ranks.is_first:
            warnings += _restore_best(run, checkpoint)
        warnings += [
            f"{name} was {facts[name]} and is {now}: the resumed run will not equal the uninterrupted one to the bit"
            for name, now in _environment(run).items()
            if facts[name] != now and (counters.step or name != "processes")  # the first rank alone writes step 0
        ]
        generators, _ = read_tensors(checkpoint / "random.safetensors", expected=None)
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
    except (StateError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint}: {error.message}", _ANEW) from None
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}.", _ANEW) from None
    if changed:
        warnings.append("the text is not the one this run began with; the run continues as far into it")
    # The first rank alone reads and restores the best weights.
    run.counters = validate(Counters, run.ranks.broadcast(run.counters.model_dump()))
    return [Notice(warning, "warning") for warning in warnings]


def runtime_settings(folder: Path) -> Tree:
    """Settings of section `runtime` by the newest checkpoint of the run in `folder`; empty if there is none."""
    point = latest(folder / CHECKPOINTS).path
    if point is None:
        return {}
    facts = read_json(point / "state.json")
    return {key: facts.get(key) for key in ("seed", "dtype", "threads")}


def _changed_texts(saved: Mapping[str, str], here: Mapping[str, str], allow_change: bool) -> list[str]:
    """Names of the texts that differ from the texts of the checkpoint."""
    changed = [name for name, checksum in saved.items() if here.get(name) != checksum]
    if "tokenizer" in changed:
        raise CheckpointError("the tokenizer in the folder is not the one this run began with.", _ANEW)
    if changed and not allow_change:
        which = "text" if "sha256" in changed else "held-out text"
        raise CheckpointError(
            f"the {which} has changed since this run began.",
            "Give the same files, or set runtime.allow_data_change to true.",
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
        raise CheckpointError(f"{checkpoint} was taken with another train.grad_accum.", "Resume with the same one.")
    run.states = [State.restore(with_prefix(f"{i}.", memory), description) for i, description in enumerate(states)]
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


def _limits(run: TrainingRun) -> dict[str, Any]:
    """Settings that end a run."""
    train = run.config.train
    return {key: getattr(train, key) for key in (*defaults.BUDGETS, "patience")}


def _restore_best(run: TrainingRun, checkpoint: Path) -> list[str]:
    """Restores the best weights up to this checkpoint, in the encoding of the run. Returns warnings.

    Later ones belong to steps that are undone. Without a best step the weights in the folder stay. If the copy in the
    checkpoint is damaged, the model and other checkpoints may hold the same weights.
    """
    folder = checkpoint.parent.parent
    present, step, encoding = folder / WEIGHTS, run.counters.best_step, run.config.train.weights
    with suppress(CheckpointError):
        same = step is None or sha256(present) == manifest(checkpoint).get(BEST, (0, ""))[1]
        if same and read_header(present)[1].get("encoding") == encoding:
            return []
    copies = [present]
    if step is not None:
        others = [path for path in checkpoints(checkpoint.parent) if path != checkpoint]
        copies = [checkpoint / BEST, present, *(path / BEST for path in others)]
    for path in copies:
        with suppress(CheckpointError):
            if path != present and BEST not in manifest(path.parent):
                continue
            metadata = read_header(path)[1]
            if metadata.get("encoding") in ENCODINGS and (step is None or metadata.get("step") == str(step)):
                best, metadata = read_weights(path, run.model, metadata["encoding"])
                store.save_model(folder, run.config, best, run.data.tokenizer, metadata, encoding=encoding)
                return []
    counters = run.counters
    counters.best_bits = counters.best_step = None
    if step is None and not present.exists():
        return []
    counters.validated_step, counters.validation_due = None, True
    metadata = {"step": str(counters.step), "validation_bits_per_byte": ""}
    best, _ = read_tensors(checkpoint / "weights.safetensors", expected=None)
    of_optimizers, _ = read_tensors(checkpoint / "optimizer.safetensors", expected=None)
    best |= {name: of_optimizers[key] for name in best if (key := f"{name}:{AVERAGE}") in of_optimizers}
    store.save_model(folder, run.config, best, run.data.tokenizer, metadata, encoding=encoding)
    lost = "the stored weights are" if step is None else f"the best weights, of step {step}, are"
    return [f"{lost} missing or damaged in every copy; those of step {counters.step} replace them"]
