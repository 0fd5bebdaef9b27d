"""The estimated memory of training against the memory that training takes."""

import itertools
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import training_memory
from toys import VARIANTS

from tests.interfaces import needs
from tests.variants import thinned
from xlcli import config, presets
from xlcli.errors import ResourceError
from xlcli.model.build import build_on_meta
from xlcli.runtime import make_runtime
from xlcli.training import memory


def estimate(model, train=None):
    tree = {"model": model, "train": train or {}, "runtime": {"dtype": "float32", "device": "cpu"}}
    settings = config.make(presets.read_preset("small"), tree)
    return memory.needed_bytes(
        settings, make_runtime(settings.runtime, training=True), build_on_meta(settings.model).n_parameters
    )


class PeakMemory(TorchDispatchMode):
    """Mode that counts the bytes of all live tensors made in it."""

    def __init__(self):
        super().__init__()
        self.live, self.total, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.live:
                self.live[key] = tensor.untyped_storage().nbytes()
                self.total += self.live[key]
                self.peak = max(self.peak, self.total)
                weakref.finalize(tensor.untyped_storage(), self.free, key)
        return out

    def free(self, key):
        self.total -= self.live.pop(key)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"feedforward": {"chunk_len": 16}}, {}), ({"stack": {"kind": "reversible"}}, {}),
        ({"vocab_size": 8192, "loss_chunk": 16}, {"vocab_size": 8192}),
        ({"attention": {"kind": "local", "n_heads": 3, "window": 16}, "position": {"kind": "t5"}},
         {"position": {"kind": "t5"}}),
        ({}, {"position": {"kind": "contextual-1"}}), ({}, {"n_layers": 5}),
        ({"n_layers": 1, "stack": {"kind": "universal", "n_steps": 3}}, {}),
        ({"stack": {"kind": "universal"}}, {"stack": {"kind": "universal", "n_steps": 5}}),
        ({"attention": {"kind": "linear", "n_heads": 3, "n_features": 32}, "position": {"kind": "rope"}},
         {"attention": {"kind": "linear", "n_heads": 3, "n_features": 64}, "position": {"kind": "rope"}}),
    ],
)  # fmt: skip
def test_settings_that_save_memory_lower_the_estimate(less, more):
    assert estimate(less) < 0.98 * estimate(more)


def test_recomputed_activations_lower_the_estimate():
    deep = {"n_layers": 12}
    assert estimate(deep, {"recompute_activations": True}) < 0.5 * estimate(deep)


def test_a_memory_of_bounded_size_does_not_grow_with_the_memory_length():
    linear = {"attention": {"kind": "linear", "n_heads": 3}, "position": {"kind": "none"}}
    assert estimate(linear, {"mem_len": 10_000}) == estimate(linear, {"mem_len": 10})
    assert estimate({"attention": {"kind": "local", "n_heads": 3}}, {"mem_len": 10_000}) == estimate(
        {"attention": {"kind": "local", "n_heads": 3}}, {"mem_len": 128}
    )


@pytest.mark.exhaustive
@needs("/proc/self/clear_refs")
@pytest.mark.parametrize("shape", ["four parts", "published", "t5", "linear", "vocab 16384"])
def test_the_estimate_is_the_memory_taken(shape):
    assert 1 / memory.ACCURACY < training_memory.measure_apart(shape)["ratio"] < memory.ACCURACY


SHAPE = {
    "model": {"dim": 32, "n_layers": 3, "vocab_size": 300, "attention": {"n_heads": 2}},
    "train": {"segment_len": 48, "mem_len": 32, "batch_size": 6, "grad_accum": 2, "lr": 1e-3, "max_steps": 9},
}
KINDS = {
    **VARIANTS,
    "plain": {},
    "t5": {"position": {"kind": "t5"}},
    "contextual": {"position": {"kind": "contextual-2"}},
    "clamped": {"position": {"kind": "xl", "clamp_len": 9}},
    "learned": {"position": {"kind": "learned", "max_len": 200_000, "overflow": "error"}},
    "chunked": {"feedforward": {"chunk_len": 8}, "loss_chunk": 8},
    "dropout": {"dropout": dict.fromkeys(("embedding", "attention", "residual", "feedforward"), 0.1)},
    "mixed": {
        "attention": {"kind": "mixed", "n_heads": 2, "layers": ["full", {"kind": "local", "window": 8}]},
        "position": {"kind": "rope"},
    },
    "recomputed": {},
    "deep": {"n_layers": 7, "position": {"kind": "alibi"}},
}


CASES = [*itertools.product(KINDS, ("float32", "bfloat16"))]


@pytest.mark.parametrize("case", thinned(CASES, CASES[::7]), ids="-".join)
def test_the_estimate_is_within_a_factor_of_two_of_the_live_bytes_of_training(case):
    kind, dtype = case
    changes = {"model": KINDS[kind], "runtime": {"dtype": dtype, "device": "cpu"}}
    tree = config.merge(SHAPE, changes | ({"train": {"recompute_activations": True}} if kind == "recomputed" else {}))
    with PeakMemory() as meter:
        run = training_memory.train(tree)
    estimate = memory.needed_bytes(run.config, run.runtime, run.model.n_parameters)
    assert 1 / memory.ACCURACY < estimate / (memory.FRAGMENTATION * meter.peak) < memory.ACCURACY


def test_only_what_cannot_fit_is_refused(monkeypatch):
    settings = config.make({"model": {"vocab_size": 300}, "train": {"max_steps": 9}, "runtime": {"device": "cpu"}})
    runtime = make_runtime(settings.runtime, training=True)
    least = memory.needed_bytes(settings, runtime) // memory.ACCURACY
    for module in ("training.memory", "machine"):
        monkeypatch.setattr(f"xlcli.{module}.available_bytes", lambda device="cpu": least)
    memory.require([settings], runtime)
    larger = config.change(settings, {"train": {"batch_size": 2 * settings.train.batch_size}})
    with pytest.raises(ResourceError) as caught:
        memory.require([larger], runtime)
    assert re.search(r"batch_size \d+", caught.value.remedy)
    memory.require([larger, settings], runtime)
    memory.require([larger], runtime, on_any_machine=True)
    with pytest.raises(ResourceError):
        memory.require([larger, larger], runtime)
