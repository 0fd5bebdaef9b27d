"""Compressive attention against an index loop over its definition, its auxiliary loss, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from oracles import compressive, positions

from xlcli import config
from xlcli.config import Config
from xlcli.errors import ConfigError
from xlcli.memory import MEMORIES
from xlcli.model.build import build_model
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span

RATE, N_COMPRESSED, MEM_LEN, DIM, N_HEADS = 3, 2, 7, 12, 3
POSITIONS = [
    {"kind": "none"},
    {"kind": "alibi"},
    {"kind": "rope"},
    {"kind": "shaw", "max_distance": 9},
    {"kind": "xl", "n_features": 8},
    {"kind": "xl", "n_features": 8, "clamp_len": 9},
]
CUTS = [[30], [1] * 14, [5, 1, 2, 13, 9], [13, 13, 4]]


def branch(position=POSITIONS[0], pooling="mean"):
    sizes = {"rate": RATE, "n_compressed": N_COMPRESSED, "pooling": pooling}
    tree = {
        "dim": DIM,
        "n_layers": 1,
        "attention": {"kind": "compressive", "n_heads": N_HEADS, **sizes},
        "position": position,
    }
    model = build_model(config.make({"model": tree}).model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    return model.stack.blocks[0].attention


def paper_names(attention):
    names = {"W_q": "query", "W_k": "key", "W_v": "value", "W_o": "output"}
    weights = {name: getattr(attention, ours).weight.detach() for name, ours in names.items()}
    if hasattr(attention.position, "relative"):
        biases = attention.position.biases
        weights |= {"W_kR": attention.position.relative.weight, "u": biases.content, "v": biases.position}
    return {name: weight.detach() for name, weight in weights.items()}


def pool_of(attention, pooling):
    """Pooling function of the oracle; the kernel of the convolution is the learned map plus that of the mean."""
    if pooling != "convolution":
        return {"mean": compressive.mean, "max": compressive.largest}[pooling]
    maps = attention.pooling.mix.weight.detach().unflatten(1, (RATE, DIM)).movedim(1, 0)
    return compressive.convolution(maps + torch.eye(DIM, dtype=maps.dtype) / RATE)


def encoding_of(attention, position):
    match position["kind"]:
        case "none":
            return {"encoding": positions.plain}
        case "alibi":
            return {"encoding": positions.alibi(N_HEADS)}
        case "rope":
            return {"encoding": positions.rope(base=10000.0, layout="half")}
        case "shaw":
            ours = attention.position
            score, value = positions.shaw(ours.keys.weight.detach(), ours.value_vectors.weight.detach())
            return {"encoding": score, "value": value}
        case "xl":
            sizes = {"n_features": 8, "clamp_len": position.get("clamp_len")}
            return {"encoding": compressive.xl(paper_names(attention), **sizes)}


def call(span, seen, n_new, offset=0):
    n_memory, keep = span.n_read(seen), span.n_kept(seen + n_new)
    device, offsets = torch.device("cpu"), torch.tensor([offset])
    return AttentionContext(span, n_memory=n_memory, n_new=n_new, keep=keep, device=device, start=seen, offsets=offsets)


def read(attention, x, cuts, span, memory):
    """Output (t d) of calls of these lengths, and the position at which the call of each token begins."""
    state, out, begins, seen = attention.init_memory(1, memory), [], [], 0
    for n in cuts:
        y, state = attention(x[:, seen : seen + n], state, call(span, seen, n))
        out.append(y[0])
        begins += [seen] * n
        seen += n
    return torch.cat(out), begins


@pytest.mark.parametrize(
    ("position", "pooling"), [*((p, "mean") for p in POSITIONS), (POSITIONS[4], "max"), (POSITIONS[2], "convolution")]
)
def test_attention_equals_the_definition(position, pooling):
    attention = branch(position, pooling)
    weights, pool = paper_names(attention), pool_of(attention, pooling)
    sizes = {"n_heads": N_HEADS, "rate": RATE, "n_compressed": N_COMPRESSED, "mem_len": MEM_LEN}
    x = torch.randn(1, 30, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    encoding = encoding_of(attention, position)
    rule = {"mem_len": MEM_LEN, "segment_len": 4, "clamp_len": position.get("clamp_len")}
    whole = compressive.attention(x[0], weights, pool, begins=range(30), **encoding, **sizes)
    with torch.inference_mode():
        for cuts, memory in zip(CUTS, ("hidden", "keyvalue", "keyvalue", "hidden"), strict=True):
            ours, _ = read(attention, x, cuts, Span("uniform", **rule), memory)
            assert torch.allclose(ours, whole[: len(ours)], rtol=0, atol=1e-12), (cuts, memory)
        ours, begins = read(attention, x, CUTS[2], Span("growing", **rule), "hidden")
    if position["kind"] in ("none", "xl"):
        paper = compressive.attention(x[0], weights, pool, begins=begins, **encoding, **sizes)
        assert torch.allclose(ours, paper, rtol=0, atol=1e-12)


def test_a_drawn_memory_length_is_that_of_its_call():
    """With random lengths a call reads at least `mem_len` of the `kept_len` tokens in memory, and all pooled blocks."""
    attention, span = branch(), Span("growing", mem_len=MEM_LEN, segment_len=4)
    x = torch.randn(1, 25, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sizes = {"n_heads": N_HEADS, "rate": RATE, "n_compressed": N_COMPRESSED, "mem_len": 2}
    expected = compressive.attention(
        x[0], paper_names(attention), compressive.mean, positions.plain, begins=[19] * 25, **sizes
    )
    for memory in ("hidden", "keyvalue"):
        _, state = attention(x[:, :19], attention.init_memory(1, memory), call(span, 0, 19))
        short = Span("growing", 2, 4, kept_len=MEM_LEN)
        y, after = attention(x[:, 19:], state, call(short, 19, 6))
        assert torch.allclose(y[0], expected[19:], rtol=0, atol=1e-12)
        assert attention.accepts(after, span, 25)


def test_the_auxiliary_loss_is_that_of_the_paper():
    attention = branch(pooling="convolution")
    span = Span("growing", mem_len=MEM_LEN, segment_len=4)
    x = torch.randn(1, 26, DIM, dtype=torch.float64, requires_grad=True)
    contexts = [call(span, seen, 13) for seen in (0, 13)]
    state = attention.init_memory(1, "hidden")
    for part, context in zip(x.split(13, dim=1), contexts, strict=True):
        _, state = attention(part, state, context)
    for seen, old, context in ((0, range(6), contexts[0]), (13, range(6, 18), contexts[1])):
        [loss] = context.losses.values()
        expected = compressive.reconstruction_loss(
            x.detach()[0, seen : seen + 13],
            [x.detach()[0, j] for j in old],
            paper_names(attention),
            pool_of(attention, "convolution"),
            n_heads=N_HEADS,
            rate=RATE,
        )
        assert torch.allclose(loss, expected, rtol=0, atol=1e-12)
    loss.backward()
    gradients = {name for name, p in attention.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert gradients == {"pooling.mix.weight"}
    assert x.grad is None


def test_the_auxiliary_loss_has_its_gradient_in_16_bits():
    """The outputs that it compares differ little, so that products in 16 bits would change its gradient by half."""
    attention = branch(pooling="convolution").float()
    with torch.no_grad():
        for weight in attention.parameters():
            weight.mul_(0.2)
    x, span = torch.randn(2, 26, DIM), Span("growing", mem_len=MEM_LEN, segment_len=4)
    gradients = []
    for enabled in (False, True):
        context = call(span, 0, 26)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            attention(x, attention.init_memory(2, "hidden"), context)
        [loss] = context.losses.values()
        gradients += torch.autograd.grad(loss, [attention.pooling.mix.weight])
    assert torch.allclose(*gradients, rtol=0, atol=1e-3 * gradients[0].abs().max())


def test_the_loss_of_a_batch_is_the_mean_of_its_sequences():
    """Also if the sequences stand at different places in their blocks."""
    attention = branch(pooling="convolution")
    span = Span("growing", mem_len=4, segment_len=4)
    x, offsets = torch.randn(3, 21, DIM, dtype=torch.float64), torch.tensor([0, 1, 3])

    def last(x, offsets):
        state, losses = attention.init_memory(len(x), "hidden"), []
        for seen, part in ((0, x[:, :11]), (11, x[:, 11:])):
            context = replace(call(span, seen, part.shape[1]), offsets=offsets)
            _, state = attention(part, state, context)
            losses += context.losses.values()
        return losses[-1]

    alone = [last(x[i : i + 1], offsets[i : i + 1]) for i in range(3)]
    assert torch.allclose(last(x, offsets), torch.stack(alone).mean(), rtol=0, atol=1e-12)


def test_before_training_a_convolution_is_the_mean():
    tree = {"dim": 8, "attention": {"kind": "compressive", "pooling": "convolution", "rate": 2}}
    model = build_model(config.make({"model": tree}).model)
    blocks = torch.randn(2, 5, 2, 8)
    assert torch.equal(model.stack.blocks[0].attention.pooling(blocks), blocks.mean(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_memory_is_as_large_as_announced(dtype):
    tree = {"vocab_size": 9, "dim": 16, "n_layers": 2, "attention": {"kind": "compressive", "n_heads": 2}}
    model = build_model(config.make({"model": tree}).model).eval()
    with torch.inference_mode():
        state = model.init_state(2, mem_len=6, segment_len=4, memory_dtype=dtype)
        _, state = model(torch.zeros(2, 12, dtype=torch.int64), state)
    assert state.memory_dtype == dtype
    assert state.bytes == 2 * model.config.memory_bytes(6, dtype)
    assert {layer.kind for layer in state.layers} <= set(MEMORIES)
    assert model.is_compatible(state)
    shorter = model.init_state(2, mem_len=9, segment_len=4, memory_dtype=dtype)
    assert not model.is_compatible(type(state)(state.layers, state.seen, shorter.span, state.offsets))


@pytest.mark.parametrize(("settings", "said"), [
    ({"train": {"memory": "keyvalue"}, "pooling": "convolution"}, "keyvalue"),
    ({"train": {"reset_on_document": True}, "pooling": "mean"}, "reset_on_document"),
])  # fmt: skip
def test_what_cannot_be_is_refused(settings, said):
    attention = {"kind": "compressive", "pooling": settings["pooling"]}
    with pytest.raises(ConfigError, match=said):
        config.make({"model": {"attention": attention}, "train": settings["train"]})
    assert isinstance(config.make({"model": {"attention": attention}}), Config)
