"""Processes of `test_parallel.py`: training runs of one and of several ranks."""

import atexit
import json
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from launching import has_threads_of_gloo, refuse_unpickling
from short_runs import PROSE, small

from xlcli import config
from xlcli.cli import entry
from xlcli.events import Notice, Step
from xlcli.ranks import SINGLE, join, whole
from xlcli.runtime import Runtime
from xlcli.store.weights import weights as weights_of
from xlcli.text import loaders
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokenizers import BytesTokenizer
from xlcli.text.tokens import TokenFile
from xlcli.training import run as training_run
from xlcli.training import validation, workflow
from xlcli.training.run import TrainingRun

STILL = {"dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.0, "feedforward": 0.0}}
DROPOUT = {"dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1, "feedforward": 0.1}}
RESIDUAL = {"dropout": {"embedding": 0.1, "attention": 0.0, "residual": 0.1, "feedforward": 0.1}}

ATTENTION = {
    "full": {"attention": {"n_heads": 2}},
    "local": {"attention": {"kind": "local", "n_heads": 2, "window": 5}, "position": {"kind": "rope"}},
    "linear": {"attention": {"kind": "linear", "n_heads": 2, "n_features": 16}, "position": {"kind": "rope"}},
    "lsh": {
        "attention": {"kind": "lsh", "n_heads": 2, "n_buckets": 4, "bucket_size": 3, "n_hashes": 2},
        "position": {"kind": "sinusoidal"},
    },
    "mixed": {
        "attention": {"kind": "mixed", "n_heads": 2, "layers": ["full", {"kind": "linear", "n_features": 16}]},
        "position": {"kind": "sinusoidal"},
    },
}
STACK = {
    "standard": {"stack": {"input_residual": True}, "embedding": {"per_layer": True, "n_bigrams": 57}},
    "universal": {"stack": {"kind": "universal", "n_steps": 2}},
    "adaptive": {"stack": {"kind": "universal", "n_steps": 3, "act": True, "halt_bias": 0.0}},
    "reversible": {"stack": {"kind": "reversible"}},
}
FURTHER = {
    "adaptive softmax": ({"embedding": {"cutoffs": [60, 110], "div_val": 2}, **STILL}, {}),
    "untied": (
        {"embedding": {"tied": False, "inner_dim": 6}, "feedforward": {"kind": "swiglu", "chunk_len": 8}, **STILL},
        {},
    ),
    "microbatches": (DROPOUT, {"grad_accum": 2}),
    "recomputed": (DROPOUT, {"recompute_activations": True}),
    "adamw": (DROPOUT, {"optimizer": "adamw", "grad_clip": 0.1}),
    "independent segments": (DROPOUT, {"mem_len": 0}),
    "documents": (DROPOUT, {"reset_on_document": True}),
    "pieces": (DROPOUT, {"shuffle": True, "line_share": 0.5}),
    "shared": ({"position": {"kind": "t5"}, **DROPOUT}, {"memory": "keyvalue"}),
    "tied": ({"position": {"kind": "xl", "n_features": 8, "tied": True, "clamp_len": 9}, **DROPOUT}, {}),
    "shaw": ({"position": {"kind": "shaw"}, **DROPOUT}, {}),
    "contextual": ({"position": {"kind": "contextual-2"}, **DROPOUT}, {}),
    "redrawn": (config.merge(ATTENTION["linear"], {"attention": {"redraw_every": 3}, **STILL}), {}),
}


def _kinds():
    for stack, of_stack in STACK.items():
        for kind, of_attention in ATTENTION.items():
            still = STILL if stack == "adaptive" else DROPOUT if kind in ("full", "local") else RESIDUAL
            train = {"optimizer": "adamw"} if kind in ("local", "lsh") else {}
            yield f"{stack} {kind}", (of_attention | of_stack | still, train)


CASES = dict(_kinds()) | FURTHER
"""Name to changes of the sections `model` and `train`."""
BUDGET = {"batch_size": 4, "max_steps": 6, "eval_every": 3, "save_every": 2, "average_share": 0.3, "shuffle": True}
BUDGET["keep_at"] = [128, 300]
SAMPLE = ("standard full", "universal local", "adaptive linear", "reversible lsh")
SAMPLE += ("adaptive softmax", "microbatches", "shared", "documents", "pieces")


def make(name, ranks, shard=False, **train):
    """The run of a case in float64."""
    model, of_case = CASES[name]
    tree = small(model=model, train={"batch_size": 8, "max_steps": 50, "lr": 6e-3, **of_case, **train})
    settings = config.make(tree, {"runtime": {"shard": shard, "seed": 1}})
    text = PROSE.encode()
    documents = np.arange(0, len(text), 700) if settings.train.reset_on_document else None
    ids = TokenFile(np.frombuffer(text, np.uint8), len(text), documents=documents)
    return TrainingRun(
        settings, Runtime(torch.device("cpu"), torch.float32, 1, ranks=ranks), ids, 10, BytesTokenizer().line_ends
    )


def follow(name, ranks, shard, n_steps):
    """Losses, gradient norms, and sums of the weights after the last step."""
    run = make(name, ranks, shard)
    steps = [run.train_step(step / 50) for step in range(n_steps)]
    weights = [whole(tensor).detach().sum().item() for tensor in weights_of(run.model).values()]
    return {"nats": [s.nats for s in steps], "norms": [s.grad_norm for s in steps], "weights": weights}


def compare(n_steps, *names):
    """Steps of a single process and of all ranks, with whole and with divided parameters: a line of JSON for each."""
    exact()
    refuse_unpickling()
    with join(timeout=900) as ranks:
        for name in names or CASES:
            one = follow(name, SINGLE, False, n_steps) if ranks.is_first else None
            for shard in (False, True):
                found = follow(name, ranks, shard, n_steps)
                if ranks.is_first:
                    print(json.dumps({"name": name, "shard": shard, "found": found, "expected": one}), flush=True)
        assert has_threads_of_gloo() == (sys.platform == "linux")
    assert not has_threads_of_gloo()


def fail():
    """A divided run that an exception ends while a variable holds it: exit code 7 if threads of gloo are left."""
    atexit.register(lambda: os._exit(7 * has_threads_of_gloo()))  # after what `join` registers
    try:
        with join(timeout=120) as ranks:
            run = make(next(iter(CASES)), ranks, True)
            run.train_step(0.1)
            raise InterruptedError
    except InterruptedError:
        print(has_threads_of_gloo(), flush=True)


class Stop:
    """A `stop` that is true on the second rank only, once a run has taken `step` steps."""

    def __init__(self, ranks, step):
        self.ranks, self.step, self.seen = ranks, step, -1

    def __call__(self):
        return self.ranks.rank == 1 and self.seen >= self.step


def train(tree, folder, ranks, stop_after=math.inf, *, resume=False):
    """Events of a new or resumed run of these ranks."""
    from short_runs import train as begin

    validation.SAMPLE_TOKENS = 3
    loaders.PIECE_LEN = 24
    torch.set_num_threads(1)
    stop, events = Stop(ranks, stop_after), []
    for event in begin(tree, ["corpus.txt"], Path(folder), resume=resume, stop=stop, ranks=ranks):
        events.append(event)
        if isinstance(event, Step):
            stop.seen = event.step
    return events


def save_and_resume():
    """Two ranks: whole runs, stopped and saved ones, one that loses its best weights, one that diverges on one rank."""
    training_run.has_bfloat16_units = lambda device: False
    with join(timeout=120) as ranks:
        for shard in (False, True):
            tree = small(train=BUDGET, runtime={"shard": shard})
            train(tree, f"whole-{shard}", ranks)
            train(tree, f"stopped-{shard}", ranks, 3)
            train(tree, f"resumed-{shard}", ranks, 3)
            train({}, f"resumed-{shard}", ranks, resume=True)
        train(small(train=BUDGET, runtime={"shard": True}), "lost", ranks, 3)
        if ranks.is_first:
            Path("lost/model.safetensors").unlink()
            for path in Path("lost/checkpoints").glob("*/best.safetensors"):
                path.unlink()
        ranks.barrier()
        train({}, "lost", ranks, resume=True)
        following = TrainLoader.batch

        def poisoned(loader, n_read, segment_len):
            batch = following(loader, n_read, segment_len)
            if ranks.rank == 1 and n_read == 4 * segment_len and not done:
                done.append(True)
                ranks_run[0].model.embedding.table.weight.data.fill_(math.nan)
            return batch

        ranks_run, done = [], []
        make_run = workflow.TrainingRun
        workflow.TrainingRun = lambda *args: ranks_run.insert(0, make_run(*args)) or ranks_run[0]
        TrainLoader.batch = poisoned
        events = train(small(train=BUDGET), "diverged", ranks)
        print(json.dumps([event.text for event in events if isinstance(event, Notice) and "; back to" in event.text]))
        print(json.dumps([event.step for event in events if isinstance(event, Step)]))


def exact():
    """Computes in float64 on one thread, also where Muon would use bfloat16."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    loaders.PIECE_LEN = 24
    training_run.has_bfloat16_units = lambda device: False


def command(*arguments, kill=None, double=False):
    """The command line, in float64 if `double`; the second rank is killed at the end of step `kill`."""
    if double:
        exact()
    step = training_run.TrainingRun.train_step

    def killed(run, *args):
        result = step(run, *args)
        if run.counters.step == kill and run.runtime.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    training_run.TrainingRun.train_step = killed
    sys.exit(entry.main(arguments))
