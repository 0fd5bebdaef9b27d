"""LSH memory over long distances: a token read 500,000 tokens ago changes a prediction."""

import pytest
import torch
from variants import thinned

from xlcli import config
from xlcli.model.build import build_model

N_COMMON, FACT, OTHER, RARE = 16, 40, 41, 42
"""Tokens below N_COMMON make up the long text between the rare tokens."""


def build(kind):
    far = {"kind": "lsh", "n_buckets": [32, 32], "bucket_size": 8, "n_hashes": 4} if kind == "lsh" else {"kind": kind}
    tree = {"vocab_size": 48, "dim": 16, "n_layers": 2, "init_std": 0.5, "position": {"kind": "rope"}}
    tree |= {"attention": {"kind": "mixed", "n_heads": 1, "layers": [{"kind": "local", "window": 2}, far]}}
    tree |= {"feedforward": {"ffn_dim": 8}}
    model = build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        # The hashed vectors of a token are then almost equal at all positions.
        for branch in (model.stack.blocks[0].attention.output, model.stack.blocks[0].feedforward.down):
            branch.weight.mul_(0.05)
    return model


def asked(model, gap, mem_len):
    """Log-probabilities (texts v) of the token after the rare token, and after a common one, in four texts.

    The texts begin with the rare token after a fact, after another fact, without the rare token, and as the first.
    """
    beginnings = torch.tensor([[FACT, RARE], [OTHER, RARE], [FACT, OTHER], [FACT, RARE]])
    between = torch.randint(0, N_COMMON, (1, gap), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        _, state = model(beginnings, model.init_state(4, mem_len=mem_len, segment_len=64))
        for piece in torch.split(between, 8192, dim=1):
            _, state = model(piece.expand(4, -1), state)
        question, control = (torch.full((4, 1), token) for token in (RARE, 3))
        return tuple(model.logits(q, state.fork())[0].log_softmax(-1) for q in (question, control))


@pytest.mark.parametrize("gap", thinned([100, 500_000], [100]))
def test_a_planted_fact_changes_the_prediction_when_asked_for_again(gap):
    question, control = asked(build("lsh"), gap, 1_000_000)
    assert (question[0] - question[2]).abs().max() > 1e-2, "depends on whether the rare token was read"
    assert (question[0] - question[1]).abs().max() > 1e-4, "depends on the token before it"
    assert torch.equal(question[0], question[3])
    assert torch.equal(control, control[:1].expand_as(control)), "the control does not depend on the beginning"


def test_beyond_the_memory_length_it_is_forgotten():
    question, _ = asked(build("lsh"), 5000, 4096)
    assert torch.equal(question, question[:1].expand_as(question))
