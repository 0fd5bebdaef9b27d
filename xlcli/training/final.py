"""Final evaluation of a run: score and sample of the best weights, and the record of the run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch

from xlcli import __version__
from xlcli.config import EvalConfig, GenerateConfig, RuntimeConfig
from xlcli.evaluation import evaluate
from xlcli.events import Generated, Progress, Score
from xlcli.generation import generate
from xlcli.runtime import Runtime, make_runtime
from xlcli.store import folder as store
from xlcli.store.origin import INIT

if TYPE_CHECKING:
    from pathlib import Path

    from xlcli.training.prepare import Prepared
    from xlcli.training.run import TrainingRun

SCORED_BYTES = 2**18
"""Maximum bytes of validation text scored at the end of a run; `xlcli eval` scores all of it."""
SAMPLE_TOKENS = 60
"""Tokens of the sample."""


def final_evaluation(
    folder: Path, runtime: Runtime, seed: int, stop: Callable[[], bool]
) -> Generator[Progress, None, tuple[float | None, str] | None]:
    """Bits per byte (None without validation text) and a sample of the saved model; None when stopped."""
    model = store.load(folder, device=runtime.device)
    inference = make_runtime(RuntimeConfig(device=str(runtime.device), threads=runtime.threads))
    bits, sample = None, ""
    if model.held_out("valid"):
        for event in evaluate(model, None, EvalConfig(limit=SCORED_BYTES), inference, stop=stop):
            if isinstance(event, Progress):
                yield event
            elif isinstance(event, Score):
                bits = event.bits_per_byte
    for made in generate(model, b"", GenerateConfig(max_new_tokens=SAMPLE_TOKENS), inference, seed=seed, stop=stop):
        if isinstance(made, Generated):
            sample = made.text
    return None if stop() else (bits, sample)


def describe_run(ready: Prepared, run: TrainingRun) -> dict[str, Any]:
    """Data, size, machine and versions of a run, for `record.json`."""
    parts, runtime = ready.parts, ready.runtime
    corpus = parts.train.corpus
    return {
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
        "train": {"bytes": parts.train.n_bytes, "tokens": len(ready.train_ids), "start": parts.train.start},
        "valid": {"bytes": parts.valid.n_bytes, "corpus": parts.valid.corpus.name, "start": parts.valid.start},
        "test": {"bytes": parts.test.n_bytes, "corpus": parts.test.corpus.name, "start": parts.test.start},
        "tokenizer": {"kind": ready.tokenizer.kind, "vocab_size": ready.tokenizer.vocab_size},
        "preset": ready.preset,
        **({} if ready.origin is None else {INIT: ready.origin}),
        "runtime": run.config.runtime.model_dump(mode="json"),
        "parameters": run.model.n_parameters,
        "hardware": {
            "device": str(runtime.device),
            "name": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
            "threads": runtime.threads,
            "dtype": runtime.dtype_name,
        },
        "versions": {"xlcli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
