"""Checkpoints: what a training run needs to go on, as values.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlcli.config import Config, Tree
from xlcli.errors import CheckpointError, ConfigError, StateError
from xlcli.files import read_blocks, read_json, write_atomic
from xlcli.files.tensors import TensorInfo, read_tensors, write_tensors
from xlcli.ranks import Ranks, is_divided, whole
from xlcli.runtime import Runtime
from xlcli.store.commit import commit, manifest
from xlcli.store.layout import BEST, CHECKPOINT_FILES, CHECKPOINTS, SCHEMA, WEIGHTS
from xlcli.training import defaults

_ANEW = "Train again with --overwrite."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, verified; `facts` are the content of `state.json`."""

    path: Path
    facts: Tree

    def tensors(self, name: str, expected: Mapping[str, TensorInfo] | None = None) -> dict[str, Tensor]:
        """Tensors of the file `name`.safetensors, with these types and shapes, if given."""
        return read_tensors(self.path / f"{name}.safetensors", expected=expected)[0]


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Tree, keep: int) -> Path:
    """Writes the newest of `keep` checkpoints of the run in `folder`, from finite tensors by file; returns its folder.

    `ResourceError` if the disk is full or fails; earlier checkpoints are then unchanged.
    """

    def write(into: Path) -> None:
        for name, group in tensors.items():
            write_tensors(into / f"{name}.safetensors", group, {})
        if facts["best_step"] is not None:
            with suppress(CheckpointError):  # the file cannot be read: training goes on
                write_atomic(into / BEST, read_blocks(folder / WEIGHTS))
        write_atomic(into / "state.json", json.dumps(facts, indent=1, sort_keys=True).encode())

    return commit(folder / CHECKPOINTS, facts["step"], write, keep)


@contextmanager
def restoring(path: Path) -> Iterator[Checkpoint]:
    """Opens the checkpoint in the folder `path`, whose files `store.commit.latest` has verified.

    The body of the `with` restores a run from it. Entries of `state.json` and tensors are not checked one by one: where
    one is missing, malformed or does not fit the run, the body fails with a built-in error, which becomes a
    `CheckpointError` here, as for a checkpoint that is incomplete.
    """
    missing = sorted(set(CHECKPOINT_FILES) - manifest(path).keys())
    if missing:
        raise CheckpointError(f"{path} is incomplete: its manifest has no '{missing[0]}'.", _ANEW)
    facts = read_json(path / "state.json")
    try:
        yield Checkpoint(path, facts)
    except (StateError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error.message}", _ANEW) from None
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}.", _ANEW) from None


def facts_of(config: Config, runtime: Runtime, texts: Mapping[str, str]) -> Tree:
    """Entries of `state.json` that do not change during a run: format, budget, rate, seed, texts and environment."""
    limits = {key: getattr(config.train, key) for key in (*defaults.BUDGETS, "patience")}
    facts = {"schema": SCHEMA, "limits": limits, "lr": config.train.lr, "seed": config.runtime.seed, "corpus": texts}
    return facts | environment(runtime)


def environment(runtime: Runtime) -> dict[str, Any]:
    """Properties of the machine and its settings that change the bits of a result."""
    return {
        "threads": runtime.threads,
        "processes": runtime.ranks.size,
        "device": runtime.device.type,
        "dtype": runtime.dtype_name,
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def check_texts(saved: Mapping[str, str], here: Mapping[str, str], folder: Path) -> None:
    """`CheckpointError` if a text, or the tokenizer, differs from that of the checkpoint of the run in `folder`."""
    changed = {name for name, checksum in saved.items() if here.get(name) != checksum}
    if "tokenizer" in changed:
        raise CheckpointError("the tokenizer in the folder is not the one this run began with.", _ANEW)
    if changed:
        which = "text" if "sha256" in changed else "held-out text"
        remedy = f"Give the same files, or train a new model from this one: --init {folder} -o NAME."
        raise CheckpointError(f"the {which} has changed since this run began.", remedy)


def gathered(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on the first rank, nothing on the others; all ranks must call it."""
    on_first: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if ranks.is_first:  # in RAM, because a device may not have room for all that is divided
            on_first[name] = full.cpu() if is_divided(tensor) else full
    return on_first


def generator_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(saved: Checkpoint) -> None:
    """Continues the random numbers of a checkpoint."""
    states = saved.tensors("random")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
