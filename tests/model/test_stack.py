"""Options of the stack and its branches: residuals from the input, zero initial values, normalized queries and keys."""

import pytest
import torch

from xlcli import config
from xlcli.model.build import build_model

VOCAB = 23


def build(**tree):
    base = {"vocab_size": VOCAB, "dim": 12, "n_layers": 3, "attention": {"n_heads": 2}}
    return build_model(config.make({"model": base | tree}).model, torch.Generator().manual_seed(0)).double()


def read(model, text):
    return model(text, model.init_state(len(text), mem_len=4, segment_len=4))[0]


def test_residual_from_the_input():
    """By hand: each block is applied to the weighted sum of stream and input."""
    model = build(stack={"input_residual": True})
    text = torch.randint(0, VOCAB, (2, 9))
    assert torch.equal(read(model, text), read(build(), text))
    with torch.no_grad():
        model.stack.stream_scale.copy_(torch.tensor([0.5, 1.5, -1.0]))
        model.stack.input_scale.copy_(torch.tensor([2.0, 0.0, 3.0]))
    outputs = []
    hooks = [
        block.register_forward_hook(lambda _, inputs, output: outputs.append((inputs[0], output[0])))
        for block in model.stack.blocks
    ]
    read(model, text)
    for hook in hooks:
        hook.remove()
    x0 = model.embedding(text)
    (first, a), (second, b), (third, _) = outputs
    assert torch.allclose(first, 2.5 * x0)
    assert torch.allclose(second, 1.5 * a)
    assert torch.allclose(third, 3.0 * x0 - b)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_branches_that_start_at_zero(placement):
    """The stack starts as its last norm."""
    model = build(zero_init=True, norm={"placement": placement})
    text = torch.randint(0, VOCAB, (2, 9))
    assert torch.equal(read(model, text), model.stack.final(model.embedding(text)))


@pytest.mark.parametrize("kind", ["full", "local"])
def test_normalized_queries_and_keys(kind):
    """Their size is that of the gain, however large the projections are."""
    model = build(attention={"kind": kind, "n_heads": 2, "qk_norm": True}, position={"kind": "none"})
    text = torch.randint(0, VOCAB, (2, 9))
    before = read(model, text)
    with torch.no_grad():
        for block in model.stack.blocks:
            block.attention.query.weight *= 1e3
            block.attention.key.weight *= 1e3
    torch.testing.assert_close(read(model, text), before, rtol=0, atol=0.05)
    with torch.no_grad():
        for block in model.stack.blocks:
            block.attention.query_norm.weight *= 50
    assert not torch.allclose(read(model, text), before, atol=0.05)
