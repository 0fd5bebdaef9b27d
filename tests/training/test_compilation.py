"""Compiled stacks: graphs are counted with a compiler that only counts, and runs them as they are."""

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from xlcli import config
from xlcli.runtime import make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults
from xlcli.training.run import TrainingRun

FULL = {"kind": "full", "n_heads": 2}
LOCAL = {"kind": "local", "n_heads": 2, "window": 8}
POSITIONS = {
    "none": {"kind": "none"},
    "xl": {"kind": "xl", "n_features": 8},
    "rope": {"kind": "rope"},
    "rope-scaled": {"kind": "rope", "scaling": {"kind": "linear", "factor": 2.0}},
    "rope-embedding": {"kind": "rope", "placement": "embedding"},
    "sinusoidal": {"kind": "sinusoidal"},
    "sinusoidal-qk": {"kind": "sinusoidal", "placement": "qk"},
    "learned": {"kind": "learned", "max_len": 4096},
    "alibi": {"kind": "alibi"},
    "t5": {"kind": "t5"},
    "shaw": {"kind": "shaw"},
    "contextual-1": {"kind": "contextual-1"},
    "contextual-2": {"kind": "contextual-2"},
}
MODELS = {name: {"attention": FULL, "position": position} for name, position in POSITIONS.items()}
MODELS |= {
    "local": {"attention": LOCAL, "position": {"kind": "rope"}},
    "local-xl": {"attention": LOCAL, "position": POSITIONS["xl"]},
    "linear": {"attention": {"kind": "linear", "n_heads": 2}, "position": {"kind": "rope"}},
    "mixed": {"attention": {"kind": "mixed", "n_heads": 2, "layers": [LOCAL, FULL]}, "position": {"kind": "rope"}},
    "universal": {"attention": FULL, "position": POSITIONS["xl"], "stack": {"kind": "universal", "n_steps": 2}},
}
IN_TURN = ["xl", "rope", "local", "linear"]


@pytest.mark.parametrize(
    "name", [name if name in IN_TURN else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS]
)
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
def test_a_model_is_compiled_once(name, monkeypatch):
    graphs = []

    def count(graph: GraphModule, _: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function, backend=count, dynamic=False))
    torch._dynamo.reset()
    tree = {
        "model": {"vocab_size": 256, "dim": 16, "n_layers": 2, **MODELS[name]},
        "train": {"batch_size": 2, "segment_len": 32, "mem_len": 32, "max_steps": 40},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": True},
    }
    cpu = torch.device("cpu")
    settings = defaults.fill_in(config.make(tree), tokenizer="bytes", vocab_size=256, device=cpu)
    ids = (np.random.default_rng(0).random(9000) * 256).astype(np.uint8)
    run = TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 10)
    for _ in range(14):
        run.train_step(0.5)
    assert 1 <= len(graphs) <= 2
    torch._dynamo.reset()
