"""A memory of zero layer inputs at the beginning of a text, against the paper's formulas and an explicit memory."""

from dataclasses import replace

import pytest
import torch
from oracles import transformer_xl
from test_transformer_xl import paper_names
from variants import make, read, table, tokens

from xlcli import config
from xlcli.errors import ConfigError
from xlcli.memory import Hidden
from xlcli.model.build import build_model
from xlcli.ops.span import Span
from xlcli.state import State

POST, PRE = "zeros-full-xl-1-post-1", "zeros-full-xl-2-pre-4"


def ones_bias(model):
    """The model with biases of its norms that are not zero."""
    for block in model.stack.blocks:
        norm = block.attention_residual.norm
        norm.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(norm.weight), dtype=torch.float64))
    return model


@pytest.mark.parametrize("name", [POST, PRE])
@pytest.mark.parametrize("span", ["uniform", "growing"])
def test_attention_equals_the_paper_on_a_memory_of_zeros(name, span):
    """The norm before the branch is applied to the zeros."""
    model, mem_len = ones_bias(make(name, n_layers=1)), 6
    block, text = model.stack.blocks[0], tokens(1, 4)
    seen = []
    block.attention.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output[0])))
    zeros = torch.zeros(mem_len, 12, dtype=torch.float64)
    memory = zeros if "post" in name else block.attention_residual.norm(zeros).detach()
    assert bool(memory.any()) == ("pre" in name)
    for kind in ("hidden", "keyvalue"):
        with torch.inference_mode():
            state = model.init_state(1, mem_len=mem_len, segment_len=4, span=span, memory=kind)
            seen.clear()
            model(text, state)
        [(x, out)] = seen
        position = model.config.position
        expected = transformer_xl.attention(
            x[0],
            memory,
            paper_names(block.attention),
            n_heads=2,
            n_features=position.n_features,
            window=mem_len if span == "uniform" else None,
            clamp_len=position.clamp_len,
        )
        assert torch.allclose(out[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", ["hidden", "keyvalue"])
def test_zeros_change_predictions_until_they_are_out_of_reach(memory):
    model, text = make(POST), tokens(1, 40)
    plain = make(POST.removeprefix("zeros-"))
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        with_zeros, without = (read(each, text, [5], mem_len=7, memory=memory)[0] for each in (model, plain))
    assert (with_zeros - without)[:, : model.receptive_field(7)].abs().min() > 0
    assert torch.allclose(with_zeros[:, 14:], without[:, 14:], rtol=0, atol=1e-12)


def test_a_memory_of_zeros_is_full_in_the_type_of_the_state():
    model = make(PRE, dtype=torch.float32)
    for dtype, types in (("bfloat16", {torch.bfloat16}), ("int8", {torch.int8, torch.float32})):
        states = [model.init_state(2, mem_len=7, segment_len=5, memory_dtype=dtype, offsets=[0, 3])]
        with torch.inference_mode():
            states += [model.reset(read(model, tokens(2, 9), [4], state=states[0].fork())[1])]
        for state in states:
            assert {t.dtype for layer in state.layers for t in layer.tensors().values()} == types
            assert {layer.length for layer in state.layers} == {7}
        restored = State.restore(state.tensors(), state.describe())
        assert (restored.span, restored.seen) == (Span("uniform", 7, 5, clamp_len=9, zero_memory=True), 0)
        assert model.is_compatible(restored)
        assert not model.is_compatible(replace(restored, span=replace(restored.span, zero_memory=False)))


def test_training_reads_zeros_without_gradient():
    model = make(PRE).train()
    state = model.init_state(2, mem_len=7, segment_len=5, span="growing", memory="hidden")
    assert all(isinstance(layer, Hidden) and layer.length == 7 for layer in state.layers)
    assert not any(t.requires_grad for t in state.tensors().values())
    assert model.init_state(2, mem_len=0, segment_len=5).layers[0].length == 0


@pytest.mark.parametrize(("model", "train", "key"), [
    ({"attention": {"kind": "mixed", "layers": ["full", "lsh"]}, "position": {"kind": "rope"}}, {}, "zero_memory"),
    ({}, {"reset_on_document": True}, "reset_on_document"),
])  # fmt: skip
def test_what_cannot_begin_with_zeros_is_refused(model, train, key):
    with pytest.raises(ConfigError) as refused:
        config.make({"model": model | {"zero_memory": True}, "train": train})
    assert key in refused.value.key


def test_independent_segments_begin_without_zeros():
    assert Span("uniform", mem_len=0, segment_len=5, zero_memory=True) == Span("segment", 0, 5)


def test_the_text_before_a_reset_has_no_part_in_bigrams():
    tree = {"n_layers": 2} | table(PRE) | {"embedding": {"n_bigrams": 40}}
    model = build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(0)).double()
    torch.nn.init.normal_(model.bigrams.table.weight, generator=torch.Generator().manual_seed(0))
    before = read(model, tokens(1, 9), [9], mem_len=7)[1]
    text = tokens(1, 5)
    with torch.inference_mode():
        fresh, after = (
            read(model, text, [5], state=state)[0]
            for state in (model.init_state(1, mem_len=7, segment_len=5), model.reset(before))
        )
    assert torch.equal(fresh, after)
