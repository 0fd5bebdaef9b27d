"""Compiled stacks: graphs are counted with a compiler that only counts, and runs them as they are."""

import numpy as np
import pytest
import torch
from torch.fx import GraphModule
from variants import COMBINATIONS, IN_TURN, VOCAB, thinned

from xlcli import config
from xlcli.runtime import make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults
from xlcli.training.run import TrainingRun

EACH_CHANGE = ["full-xl-0-pre-0", "full-rope-0-pre-0", "local-rope-0-pre-0", "linear-rope-0-pre-0", "lsh-rope-0-pre-0"]
"""Combinations that are tested after each change; the campaigns take every attention and position."""


@pytest.mark.parametrize("name", thinned(dict.fromkeys(EACH_CHANGE + IN_TURN), EACH_CHANGE))
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
def test_a_model_is_compiled_to_two_graphs_at_most(name, monkeypatch):
    graphs = []

    def count(graph: GraphModule, _: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function, backend=count, dynamic=False))
    torch._dynamo.reset()
    tree = {
        "model": COMBINATIONS[name],
        "train": {"batch_size": 2, "segment_len": 32, "mem_len": 32, "max_steps": 40},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": True},
    }
    cpu = torch.device("cpu")
    settings = defaults.fill_in(config.make(tree), tokenizer="bytes", vocab_size=VOCAB, device=cpu)
    ids = (np.random.default_rng(0).random(9000) * VOCAB).astype(np.uint8)
    run = TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 10)
    for _ in range(14):
        run.train_step(0.5)
    assert 1 <= len(graphs) <= 2
    torch._dynamo.reset()
