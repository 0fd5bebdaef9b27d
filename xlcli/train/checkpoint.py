"""A run on disk and back: weights, optimizers, memory of every lane, place in the data, random numbers, counters.

A checkpoint is one committed folder (see `store.commit`):

    weights.safetensors  optimizer.safetensors  memory.safetensors  state.json
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xlcli.errors import CheckpointError
from xlcli.files import read_json, read_tensors, write_atomic, write_tensors
from xlcli.state import State
from xlcli.store.commit import commit, step_name
from xlcli.train.run import Run

SCHEMA = 1
"""Version of `state.json`. A reader refuses any other."""


def save(run: Run, folder: Path, *, seconds: float, corpus: Mapping[str, Any]) -> Path:
    """Commits the run as it stands after `run.step` steps and `seconds` of training; returns the new folder."""

    def write(into: Path) -> None:
        write_tensors(into / "weights.safetensors", dict(run.model.named_parameters()), {})
        write_tensors(into / "optimizer.safetensors", run.optimizers.tensors(), {})
        memory = {f"{i}.{name}": t for i, state in enumerate(run.states) for name, t in state.tensors().items()}
        write_tensors(into / "memory.safetensors", memory, {})
        facts = {
            "schema": SCHEMA,
            "step": run.step,
            "tokens": run.tokens,
            "seconds": seconds,
            "position": run.lanes.position,
            "best_bits": None if math.isinf(run.best_bits) else run.best_bits,
            "best_step": run.best_step,
            "corpus": dict(corpus),
            "states": [state.describe() for state in run.states],
            "random": _random_state(),
            "threads": run.runtime.threads,
            "device": run.runtime.device.type,
            "dtype": run.runtime.dtype_name,
            "torch": torch.__version__,
        }
        write_atomic(into / "state.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    return commit(folder / "checkpoints", step_name(run.step), write, run.config.train.keep)


def load(run: Run, checkpoint: Path, *, corpus: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Puts the run where the checkpoint was taken; returns warnings about what may make it differ from there.

    Args:
        run: A run just built from the same configuration.
        checkpoint: A verified checkpoint.
        corpus: Identity of the text at hand, or None to accept any.
    """
    facts = read_json(checkpoint / "state.json")
    try:
        if facts["schema"] != SCHEMA:
            raise CheckpointError(f"{checkpoint} has format {facts['schema']}, this is {SCHEMA}.", "Use a newer xlcli.")
        if corpus is not None and facts["corpus"] != dict(corpus):
            raise CheckpointError(
                "the text has changed since this run began.", "Give the same files, or add --allow-data-change."
            )
        parameters = {name: ("F32", tuple(p.shape)) for name, p in run.model.named_parameters()}
        weights, _ = read_tensors(checkpoint / "weights.safetensors", expected=parameters)
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                parameter.copy_(weights[name])
        run.optimizers.load(read_tensors(checkpoint / "optimizer.safetensors", expected=None)[0])
        memory, _ = read_tensors(checkpoint / "memory.safetensors", expected=None, device=str(run.runtime.device))
        if len(facts["states"]) != len(run.states):
            raise CheckpointError(f"{checkpoint} was taken with another --grad-accum.", "Resume with the same one.")
        run.states = [
            State.restore({n.removeprefix(f"{i}."): t for n, t in memory.items() if n.startswith(f"{i}.")}, description)
            for i, description in enumerate(facts["states"])
        ]
        run.step, run.tokens, run.seconds = facts["step"], facts["tokens"], facts["seconds"]
        run.lanes.position = facts["position"]
        run.best_bits = math.inf if facts["best_bits"] is None else facts["best_bits"]
        run.best_step = facts["best_step"]
        _restore_random(facts["random"])
        here = {
            "threads": run.runtime.threads,
            "device": run.runtime.device.type,
            "dtype": run.runtime.dtype_name,
            "torch": torch.__version__,
        }
        return tuple(
            f"{name} was {facts[name]} and is {now}: the run goes on, but not to the bit as it would have"
            for name, now in here.items()
            if facts[name] != now
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint / 'state.json'} is incomplete: {error}.", "Train anew with --overwrite."
        ) from None


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _restore_random(states: Mapping[str, str]) -> None:
    def tensor(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(states[name])), dtype=torch.uint8)

    torch.set_rng_state(tensor("cpu"))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor("cuda"))
