"""Batch size and segment length change the speed of an evaluation only, whatever the model is made of."""

import dataclasses

import pytest
import torch
from toys import PROSE, RUNTIME, slow_bits, toy
from variants import thinned

from xlcli import config
from xlcli.config import EvalConfig
from xlcli.errors import ConfigError
from xlcli.evaluation import evaluate
from xlcli.events import Score
from xlcli.model.build import build_model

ACT = {"kind": "universal", "n_steps": 3, "act": True, "halt_bias": 0.0, "epsilon": 0.2}
SHAPES = {
    "sinusoidal": {"position": {"kind": "sinusoidal"}},
    "learned": {"position": {"kind": "learned", "max_len": 57}},
    "learned in layers": {"position": {"kind": "learned", "max_len": 57, "placement": "layers"}},
    "axial": {"position": {"kind": "axial", "shape": [5, 13]}},
    "rope": {"position": {"kind": "rope"}},
    "rope at the embedding": {"position": {"kind": "rope", "placement": "embedding"}},
    "t5": {"position": {"kind": "t5", "n_buckets": 6, "max_distance": 20}},
    "local": {"attention": {"kind": "local", "window": 5}},
    "linear": {"attention": {"kind": "linear", "n_features": 16}, "position": {"kind": "sinusoidal"}},
    "universal": {"stack": {"kind": "universal", "n_steps": 3}},
    "act": {"stack": ACT},
    "sinks": {"position": {"kind": "rope", "clamp_len": 9, "n_sinks": 3}},
    "zeros": {"zero_memory": True, "norm": {"kind": "layer"}, "bias": True},
}


def variant(name, n_steps=None):
    plain = toy()
    base = {"vocab_size": plain.config.model.vocab_size, "dim": 16, "n_layers": 1}
    tree = config.merge(base | {"attention": {"kind": "full", "n_heads": 2}}, SHAPES[name])
    settings = config.make({"model": tree, "train": {"mem_len": 7, "segment_len": 8}})
    settings = settings.model_copy(update={"model": settings.model.for_inference(n_steps)})
    network = build_model(settings.model, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return dataclasses.replace(plain, config=settings, network=network.double().eval())


def score(model, path, **options):
    return next(e for e in evaluate(model, [path], EvalConfig(**options), RUNTIME) if isinstance(e, Score))


@pytest.mark.parametrize("name", thinned(SHAPES, [*[*SHAPES][::4], "sinks"]))
def test_segments_and_batches_change_the_speed_only(name, prose):
    """Absolute positions are those of the text in every sequence; an unbounded receptive field allows one sequence."""
    model, text = variant(name), PROSE.encode()[:300]
    prose.write_bytes(text)
    slow = sum(slow_bits(model, text))
    for segment_len, batch_size in ((1, 4), (64, 1), (64, 8), (8, 3)):
        found = score(model, prose, segment_len=segment_len, batch_size=batch_size)
        assert found.bits_per_byte * found.bytes == pytest.approx(slow, rel=1e-9), (segment_len, batch_size)
        assert (found.batch_size > 1) == (batch_size > 1 and name not in ("linear", "sinks")), (segment_len, batch_size)
        assert (found.mean_steps is not None) == (name == "act")


def test_mean_steps_lie_between_one_and_the_most_allowed(prose):
    three, one, six = (score(variant("act", n), prose, n_steps=n) for n in (None, 1, 6))
    assert one.mean_steps == 1.0
    assert 1.0 < three.mean_steps <= 3.0
    assert three.mean_steps <= six.mean_steps <= 6.0
    assert one.nats != three.nats


def test_a_number_of_steps_is_refused_by_other_stacks(prose):
    with pytest.raises(ConfigError, match="steps"):
        score(variant("rope"), prose, n_steps=2)
