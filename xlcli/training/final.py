"""Final evaluation of a run: score and sample of the best weights, and the record of the run."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xlcli import __version__
from xlcli.config import EvalConfig, GenerateConfig, RuntimeConfig
from xlcli.evaluation import evaluate
from xlcli.events import Generated, Notice, Progress, Score
from xlcli.generation import generate
from xlcli.runtime import Runtime, make_runtime
from xlcli.store import folder as store
from xlcli.store.origin import INIT
from xlcli.training.defaults import RATES

if TYPE_CHECKING:
    from pathlib import Path

    from xlcli.store.folder import LoadedModel
    from xlcli.training.prepare import Prepared
    from xlcli.training.run import TrainingRun

SCORED_BYTES = 2**18
"""Maximum bytes of validation text scored at the end of a run; `xlcli eval` scores all of it."""
SAMPLE_TOKENS = 60
"""Tokens of the sample."""
LEAST_SCORED = 2**10
"""Bytes of validation text from which the score is compared with byte frequencies."""
UNUSUAL_FACTOR = 10.0
"""Factor between a learning rate and its default from which the rate may be the reason of a bad score."""


def final_evaluation(
    folder: Path, runtime: Runtime, seed: int, stop: Callable[[], bool]
) -> Generator[Progress | Notice, None, tuple[Score | None, str] | None]:
    """Score (None without validation text) and a sample of the saved model; None when stopped."""
    model = store.load(folder, device=runtime.device)
    inference = make_runtime(RuntimeConfig(device=str(runtime.device), threads=runtime.threads))
    score, sample = None, ""
    if model.held_out("valid"):
        for event in evaluate(model, None, EvalConfig(limit=SCORED_BYTES), inference, stop=stop):
            if isinstance(event, Progress | Notice):
                yield event
            elif isinstance(event, Score):
                score = event
                yield from _compare_with_frequencies(model, event)
    for made in generate(model, b"", GenerateConfig(max_new_tokens=SAMPLE_TOKENS), inference, seed=seed, stop=stop):
        if isinstance(made, Notice):
            yield made
        elif isinstance(made, Generated):
            sample = made.text
    return None if stop() else (score, sample)


def _compare_with_frequencies(model: LoadedModel, score: Score) -> Iterator[Notice]:
    """Notice if the score is not below the entropy of the byte frequencies of the scored text."""
    path = model.held_out("valid")
    if path is None or score.bytes < LEAST_SCORED:
        return
    with path.open("rb") as file:
        counts = np.bincount(np.frombuffer(file.read(score.bytes), np.uint8))
    shares = counts[counts > 0] / score.bytes
    entropy = -float(np.sum(shares * np.log2(shares)))
    if score.bits_per_byte < entropy:
        return
    train = model.config.train
    remedy = "train longer or on more text"
    if train.lr is not None and abs(math.log(train.lr / (usual := RATES[train.optimizer]))) > math.log(UNUSUAL_FACTOR):
        remedy = f"the learning rate {train.lr:g} is far from the default --lr {usual:g}"
    yield Notice(
        f"{score.bits_per_byte:.2f} bits per byte are no better than byte frequencies alone ({entropy:.2f}): {remedy}"
    )


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
            "processes": runtime.ranks.size,
            "dtype": runtime.dtype_name,
        },
        "versions": {"xlcli": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
