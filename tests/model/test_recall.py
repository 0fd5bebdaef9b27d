"""What hashing finds of full attention, against the model's own scores."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from oracles.reformer import attended_mask
from recall import lsh_recall
from variants import VOCAB, tokens

from xlcli import config
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.build import build_model

LOCAL = {"kind": "local", "window": 5}
HASHED = {"kind": "lsh", "n_buckets": 4, "bucket_size": 3, "n_hashes": 2}
ONE = {"kind": "lsh", "n_buckets": 1, "bucket_size": 64, "n_hashes": 1}


def build(*layers, n_hashes=None, **more):
    tree = {"vocab_size": VOCAB, "dim": 12, "n_layers": len(layers), "position": {"kind": "rope"}}
    tree |= {"attention": {"kind": "mixed", "n_heads": 2, "layers": list(layers)}, "init_std": 0.4}
    settings = config.make({"model": tree | more}).model.for_inference(n_hashes=n_hashes)
    model = build_model(settings, torch.Generator().manual_seed(0))
    return model.double().eval()


def ask(model, text, mem_len, call):
    with torch.inference_mode():
        state = model.init_state(1, mem_len=mem_len, segment_len=text.shape[1])
        return lsh_recall(model, text, state, call)


def shares(model, text, mem_len):
    """The same of a whole text in one call, by the definition, from what the layers are really given."""
    found = []

    def note(layer, given):
        q, k, _, buckets = layer.project(*given)
        keys = torch.arange(text.shape[1])
        distance = keys[:, None] - keys
        there = (distance >= 1) & (distance <= mem_len)
        weights = (q @ k.mT).masked_fill(~there, -torch.inf)[:, :, mem_len:].softmax(-1)
        seen = attended_mask(buckets, bucket_size=layer.bucket_size, limit=mem_len)[:, :, mem_len:]
        found.append((weights * seen).sum(-1).mean().item())

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, LSHAttention)]
    with torch.inference_mode():
        model(text, model.init_state(1, mem_len=mem_len, segment_len=7))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("stack", [{}, {"stack": {"kind": "reversible"}}, {"stack": {"kind": "universal"}}])
@pytest.mark.parametrize("call", [60, 1, 7])
def test_recall_is_the_share_of_what_full_attention_would_weigh(stack, call):
    model, text = build(LOCAL, HASHED, HASHED, **stack), tokens(1, 60)
    found = ask(model, text, 20, call)
    assert len(found) == 2 * model.config.depth // 3
    assert found == pytest.approx(shares(model, text, 20), abs=1e-9)
    assert all(0.1 < share < 0.95 for share in found)


def test_one_bucket_finds_everything_and_more_rounds_find_more():
    text = tokens(1, 60)
    assert ask(build(ONE), text, 20, 60) == pytest.approx([1.0], abs=1e-9)
    found = [ask(build(HASHED, n_hashes=rounds), text, 20, 60)[0] for rounds in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] + 0.1 < found[-1]


def test_listening_leaves_nothing_behind():
    model, text = build(HASHED), tokens(1, 30)
    ask(model, text, 20, 30)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert ask(build(LOCAL), text, 20, 30) == []
