"""16-bit copies of weights, made by one operator."""

from functools import partial

import numpy as np
import pytest
import torch

from xlcli import config
from xlcli.config.tree import merge
from xlcli.model.build import build_model
from xlcli.presets import read_preset
from xlcli.runtime import Runtime
from xlcli.text.tokens import TokenFile
from xlcli.training.narrow import copied, modules_of_products
from xlcli.training.run import TrainingRun

NARROW = Runtime(torch.device("cpu"), torch.bfloat16, 1)
MODELS = {
    "xl": {},
    "tied": {"position": {"kind": "xl", "n_features": 32, "tied": True}, "attention": {"kind": "full", "bias": "all"}},
    "grouped": {"attention": {"kind": "full", "n_heads": 4, "n_kv_heads": 2}, "position": {"kind": "rope"}},
    "gated": {"feedforward": {"kind": "swiglu"}, "norm": {"kind": "layer"}},
    "shaw": {"position": {"kind": "shaw"}},
    "contextual": {"position": {"kind": "contextual-2"}},
    "linear": {"attention": {"kind": "linear"}, "position": {"kind": "sinusoidal"}},
    "reversible": {"stack": {"kind": "reversible"}},
}


def a_run(name, **train):
    """A run of two blocks in bfloat16, by name of the model."""
    tree = {
        "train": {"batch_size": 2, "segment_len": 8, "mem_len": 8, "lr": 6e-3, **train},
        "model": {"vocab_size": 256, "n_layers": 2},
    }
    settings = config.make(read_preset("tiny"), merge(tree, {"model": MODELS[name]}))
    ids = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    return TrainingRun(settings, NARROW, TokenFile(ids, len(ids)), 10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_copies_made_at_once_give_the_gradients_of_autocast(name, recompute):
    if recompute and name == "reversible":
        pytest.skip("it keeps no activations")
    gradients = []
    for at_once in (True, False):
        run = a_run(name, grad_accum=2, recompute_activations=recompute)
        modules = modules_of_products(run.model)
        assert modules
        if at_once:
            run.narrow_weights = partial(copied, modules, NARROW.dtype)
        run.train_step(0.5)
        run.train_step(0.5)
        assert all(isinstance(parameter, torch.nn.Parameter) for parameter in run.model.parameters())
        gradients.append({n: parameter.grad for n, parameter in run.model.named_parameters()})
    here, there = gradients
    assert here.keys() == there.keys()
    for n, gradient in here.items():
        assert torch.equal(gradient, there[n]), n


@pytest.mark.parametrize(
    "changes",
    [
        {"stack": {"kind": "universal"}},
        {"feedforward": {"chunk_len": 4}},
        {"attention": {"kind": "lsh"}, "position": {"kind": "sinusoidal"}},
    ],
)
def test_blocks_whose_gradients_are_summed_in_float32_have_no_copies(changes):
    settings = config.make(read_preset("tiny"), {"model": {"vocab_size": 256, **changes}})
    assert not modules_of_products(build_model(settings.model))
