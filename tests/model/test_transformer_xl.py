"""The attention branch against the paper's formulas, one query and key at a time."""

import pytest
import torch
from oracles import transformer_xl

from xlcli import config
from xlcli.memory import Hidden, KeyValue
from xlcli.model.build import build_model
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span


def branch(position):
    tree = {"dim": 12, "n_layers": 1, "attention": {"n_heads": 3}, "position": position}
    model = build_model(config.make({"model": tree}).model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return model.stack.blocks[0].attention


def paper_names(attention):
    names = {
        "W_q": attention.query.weight,
        "W_kE": attention.key.weight,
        "W_v": attention.value.weight,
        "W_o": attention.output.weight,
    }
    if hasattr(attention.position, "relative"):
        names |= {
            "W_kR": attention.position.relative.weight,
            "u": attention.position.biases.content,
            "v": attention.position.biases.position,
        }
    return {name: weight.detach() for name, weight in names.items()}


@pytest.mark.parametrize(
    "position", [{"kind": "xl", "n_features": 8}, {"kind": "xl", "n_features": 8, "clamp_len": 4}, {"kind": "none"}]
)
@pytest.mark.parametrize(("t", "m"), [(1, 0), (1, 9), (5, 0), (5, 3), (4, 9)])
@pytest.mark.parametrize("kind", ["uniform", "growing"])
def test_attention_equals_the_paper(position, t, m, kind):
    attention = branch(position)
    x, older = torch.randn(1, t, 12, dtype=torch.float64), torch.randn(1, m, 12, dtype=torch.float64)
    span = Span(kind, mem_len=9, segment_len=4, clamp_len=position.get("clamp_len"))
    expected = transformer_xl.attention(
        x[0],
        older[0],
        paper_names(attention),
        n_heads=3,
        n_features=8,
        window=9 if kind == "uniform" else None,
        clamp_len=position.get("clamp_len"),
    )
    context = AttentionContext(span, n_memory=m, n_new=t, keep=min(2, m + t), device=x.device)
    for mode in (torch.inference_mode, torch.no_grad):  # clamped distances have a form of their own at inference
        with mode():
            k, v = attention.project(older, context)
            for memory in (Hidden(older), KeyValue((k, v), 0, m)):
                out, after = attention(x, memory, context)
                assert torch.allclose(out[0], expected, rtol=0, atol=1e-12)
                assert after.length == min(2, m + t)


def test_memory_of_a_layer_is_the_input_of_that_layer():
    """The receptive field is n_layers * mem_len tokens, one memory length per layer, as in the paper."""
    tree = {"dim": 8, "n_layers": 3, "attention": {"n_heads": 2}, "vocab_size": 11}
    model = build_model(config.make({"model": tree}).model).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    text = torch.randint(0, 11, (1, 40))
    with torch.inference_mode():

        def last(t):
            return model(t, model.init_state(1, mem_len=5, segment_len=8))[0][:, -1]

        for distance, reached in ((15, True), (16, False)):
            changed = text.clone()
            changed[0, 39 - distance] = (changed[0, 39 - distance] + 1) % 11
            assert torch.equal(last(text), last(changed)) != reached
