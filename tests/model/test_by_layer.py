"""Reading several calls layer by layer gives what reading one call after the other gives."""

import pytest
import torch

from tests.toys import toy

CALLS = [7, 7, 7, 3]
"""Numbers of tokens."""


def network_and_calls(**settings):
    network = toy(dtype=torch.float32, **settings).network
    tokens = torch.randint(network.config.vocab_size, (2, 1 + sum(CALLS)), generator=torch.Generator().manual_seed(3))
    inputs = tokens[:, :-1].split(CALLS, dim=1)
    targets = tokens[:, 1:].split(CALLS, dim=1)
    calls = [(x, y[:, 2:]) for x, y in zip(inputs, targets, strict=True)]
    return network, calls


@pytest.mark.parametrize("variant", [None, "local", "linear", "sinks", "zeros"])
@pytest.mark.parametrize("continues", [True, False])
@torch.inference_mode()
def test_scores_and_states_are_the_same_to_the_bit(variant, continues):
    network, calls = network_and_calls(variant=variant)
    state = network.init_state(2, mem_len=9, segment_len=8, offsets=[0, 4])
    assert network.reads_by_layer(state, None)
    expected = []
    one_by_one = state.fork()
    for tokens, targets in calls:
        out = network.score(tokens, targets, one_by_one)
        expected.append(out.nll)
        one_by_one = out.state
    outs = network.score_by_layer(calls, state, continues=continues)
    for out, nll in zip(outs, expected, strict=True):
        assert torch.equal(out.nll, nll)
    assert outs[-1].state.seen == one_by_one.seen
    if continues:
        found, wanted = outs[-1].state.tensors(), one_by_one.tensors()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("variant", ["universal", "reversible", "learned", "axial"])
def test_other_stacks_and_positions_are_read_call_by_call(variant):
    network, _ = network_and_calls(variant=variant)
    assert not network.reads_by_layer(network.init_state(2, mem_len=9, segment_len=8), None)
