"""The reversible stack: its equations over real blocks, and gradients equal to those with stored activations."""

import gc
import itertools
import weakref

import peak_memory
import pytest
import torch
from oracles.reversible import store_activations
from variants import COMBINATIONS, tokens

from xlcli import config
from xlcli.errors import ConfigError
from xlcli.memory import KeyValue
from xlcli.model.build import build_model

VOCAB = 31
ATTENTIONS = {
    "full-xl": {"attention": {"kind": "full"}, "position": {"kind": "xl", "n_features": 8}},
    "full-tied": {"attention": {"kind": "full"}, "position": {"kind": "xl", "n_features": 8, "tied": True}},
    "full-t5": {"attention": {"kind": "full"}, "position": {"kind": "t5", "n_buckets": 6, "max_distance": 20}},
    "full-contextual": {"attention": {"kind": "full"}, "position": {"kind": "contextual-2", "n_buckets": 6}},
    "full-learned": {
        "attention": {"kind": "full"},
        "position": {"kind": "learned", "max_len": 9, "placement": "layers"},
    },
    "local-t5": {
        "attention": {"kind": "local", "window": 4},
        "position": {"kind": "t5", "n_buckets": 4, "max_distance": 8},
    },
    "linear-rope": {"attention": {"kind": "linear", "n_features": 16}, "position": {"kind": "rope"}},
    "lsh-none": {
        "attention": {"kind": "lsh", "n_buckets": 4, "bucket_size": 4, "n_hashes": 2},
        "position": {"kind": "none"},
    },
}
AROUND = {
    "pre": {"norm": {"placement": "pre", "kind": "layer"}, "feedforward": {"kind": "geglu", "chunk_len": 3}},
    "sandwich": {"norm": {"placement": "sandwich"}, "loss_chunk": 5},
    "rezero": {"norm": {"placement": "rezero"}, "feedforward": {"kind": "relu"}},
}
every_kind = pytest.mark.parametrize("kind", ATTENTIONS)


def build(kind, around="pre", *, dropout=0.3, n_layers=3, dtype=torch.float64, rebuild=True, size=0.4, **more):
    tree = {"vocab_size": VOCAB, "dim": 12, "n_layers": n_layers, **ATTENTIONS[kind], **AROUND[around]}
    tree = config.merge(tree, {"attention": {"n_heads": 2}, "stack": {"kind": "reversible"}} | more)
    rates = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), dropout)
    if kind.startswith("linear"):
        del rates["attention"]
    model = build_model(config.make({"model": tree | {"dropout": rates}}).model, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size)
    if not rebuild:
        store_activations(model.stack)
    return model.to(dtype).train()


def twins(*args, **more):
    """The same model twice: activations rebuilt, and kept."""
    return [build(*args, **more, rebuild=rebuild) for rebuild in (True, False)]


def begin(model, rows=2, memory="hidden", mem_len=12):
    return model.init_state(
        rows, mem_len=mem_len, segment_len=13, span="growing" if mem_len else "uniform", memory=memory
    )


def losses(model, text, *, autocast=False, memory="hidden", mem_len=12, segment=13):
    """Mean nats of successive segments, memory carried on, and the last state."""
    state, out = begin(model, len(text), memory, mem_len), []
    for at in range(0, text.shape[1] - segment, segment):
        piece = text[:, at : at + segment + 1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nll, state = model.score(piece[:, :-1], piece[:, 1:], state)[:2]
        out.append(nll.mean())
    return out, state


def gradients(model, loss, **more):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, **more)
    return {name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)}


def agree(one, other, within):
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        assert (a is None) == (b is None), name
        assert a is None or bool(((a - b).abs() <= within).all()), name


# Invariant 6.


@every_kind
@pytest.mark.parametrize("around", AROUND)
def test_gradients_equal_those_of_kept_activations(kind, around):
    """With dropout and memory on, and two forwards before one backward."""
    found, states, numbers = [], [], []
    for model in twins(kind, around):
        torch.manual_seed(0)
        (first, second), state = losses(model, tokens(2, 27))
        found.append(gradients(model, first + 2 * second))
        states.append(state.tensors())
        numbers.append(torch.rand(3))
    agree(*found, 1e-10)
    assert all(g is not None and g.abs().sum() > 0 for g in found[0].values())
    agree(*states, 0)
    assert torch.equal(*numbers)


@every_kind
def test_gradients_in_float32_at_depth(kind):
    """Streams are rebuilt to the bit: twelve layers differ from kept activations by the order of summing alone."""
    found = []
    for model in twins(kind, n_layers=12, dtype=torch.float32):
        torch.manual_seed(0)
        (loss,), _ = losses(model, tokens(2, 14))
        found.append(gradients(model, loss))
    scale = max(g.abs().max() for g in found[1].values())
    agree(*found, 1e-6 * scale)


@every_kind
def test_gradients_under_autocast_at_depth(kind):
    """The same to the bit, though products round to 8 bits.

    But for a weight used several times in a branch: autocast's copy of it adds up their gradients in 16 bit.
    """
    found = []
    for model in twins(kind, n_layers=12, dtype=torch.float32):
        torch.manual_seed(1)
        (_, loss), _ = losses(model, tokens(2, 27), autocast=True)
        assert loss.dtype == torch.float32
        found.append(gradients(model, loss))
    scale = max(g.abs().max() for g in found[1].values())
    agree(*found, 1e-3 * scale if kind == "full-contextual" else 0)


def test_branches_are_given_float32_under_autocast():
    model, given = build("full-xl", dtype=torch.float32), []
    for block in model.stack.blocks:
        block.attention_residual.norm.register_forward_pre_hook(lambda _, x: given.append(x[0].dtype))
        block.feedforward_residual.norm.register_forward_pre_hook(lambda _, x: given.append(x[0].dtype))
    (loss,), state = losses(model, tokens(1, 14), autocast=True)
    loss.backward()
    assert given == [torch.float32] * 12
    assert all(t.dtype == torch.float32 for name, t in state.tensors().items() if name not in ("last", "offsets"))


@every_kind
@pytest.mark.parametrize(("rows", "segment", "mem_len"), [(1, 1, 12), (1, 1, 0), (1, 13, 0), (3, 5, 12)])
def test_shapes_of_calls(kind, rows, segment, mem_len):
    """One row, one token, no memory; what is not used has no gradient either way."""
    found = []
    for model in twins(kind):
        torch.manual_seed(0)
        several, _ = losses(model, tokens(rows, 3 * segment + 1), segment=segment, mem_len=mem_len)
        found.append(gradients(model, sum(several)))
    agree(*found, 1e-10)


@every_kind
def test_calls_do_not_disturb_each_other(kind):
    """Backward passes in the other order, other calls between, other random numbers: each finds its own again."""
    model, found = build(kind), []
    text = tokens(2, 27)
    for together in (False, True):
        torch.manual_seed(0)
        (first, second), _ = losses(model, text)
        if not together:
            found.append([gradients(model, loss, retain_graph=True) for loss in (first, second)])
            continue
        with torch.no_grad():
            losses(model, tokens(3, 40, seed=9))
        model.eval()
        losses(model, text)
        model.train()
        torch.manual_seed(77)
        late = gradients(model, second)
        found.append([gradients(model, first), late])
    for alone, beside in zip(*found, strict=True):
        agree(alone, beside, 1e-13)


def test_accumulated_gradients_equal_those_of_one_batch():
    model = build("full-t5", dropout=0.0)
    text = tokens(4, 14)
    (whole,), _ = losses(model, text)
    together = gradients(model, whole)
    for part in text.split(2):
        (loss,), _ = losses(model, part)
        (loss / 2).backward()
    agree({name: p.grad for name, p in model.named_parameters()}, together, 1e-12)


def test_no_gradient_flows_through_memory_of_any_kind():
    """No gradient of a later loss flows into the previous call, through a memory of any kind."""
    for rebuild, memory in itertools.product((True, False), ("hidden", "keyvalue")):
        model = build("full-xl", rebuild=rebuild)
        _, state = losses(model, tokens(2, 14), memory=memory)
        assert not any(t.requires_grad for t in state.tensors().values())


# What it computes.


@pytest.mark.parametrize("around", AROUND)
def test_equations(around):
    """y1 = x1 + F(x2), y2 = x2 + G(y1), both begin as the embedding, and the head reads their mean."""
    model = build("full-learned", around).eval()
    text = tokens(2, 9)
    positions = torch.arange(9) % 9
    with torch.inference_mode():
        x1 = x2 = model.embedding(text)
        for block in model.stack.blocks:
            marked = x2 + block.attention.position.axes[0](positions)
            given = block.attention_residual.pre(marked)
            q, k, v = (
                getattr(block.attention, name)(given).unflatten(-1, (2, 6)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            scores = (q @ k.mT * 6**-0.5).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x1 = x1 + block.attention_residual.post(block.attention.output(y))
            inner = block.feedforward_residual.pre(x1)
            x2 = x2 + block.feedforward_residual.post(block.feedforward(inner))
        expected = model.stack.final(0.5 * x1 + 0.5 * x2)
        x, _ = model(text, begin(model))
    assert torch.allclose(x, expected, rtol=0, atol=1e-12)


def test_rezero_begins_as_the_identity():
    tree = {"vocab_size": VOCAB, "dim": 12, "norm": {"placement": "rezero"}, "stack": {"kind": "reversible"}}
    model = build_model(config.make({"model": tree}).model).eval()
    with torch.inference_mode():
        x, _ = model(tokens(1, 9), begin(model, 1))
        assert torch.equal(x, model.embedding(tokens(1, 9)))


@every_kind
def test_without_gradients_nothing_is_noted_and_nothing_changes(kind):
    """Training, no_grad and inference mode give the same numbers and memories."""
    model = build(kind, dropout=0.0)
    (loss, _), state = losses(model, tokens(2, 27))
    for mode in (torch.no_grad, torch.inference_mode):
        before = torch.get_rng_state()
        with mode():
            (plain, _), its = losses(model, tokens(2, 27))
        assert plain.grad_fn is None
        assert torch.allclose(plain, loss, rtol=0, atol=1e-12)
        for name, t in its.tensors().items():
            assert torch.allclose(t, state.tensors()[name], rtol=0, atol=1e-12)
        assert torch.equal(before, torch.get_rng_state())


def test_inference_appends_in_place():
    """The memory of keys and values keeps its slack from call to call."""
    model = build("full-xl", dropout=0.0).eval()
    with torch.inference_mode():
        _, state = losses(model, tokens(1, 14), memory="keyvalue")
        buffers = []
        for token in tokens(1, 3).split(1, dim=1):
            _, state = model(token, state)
            assert isinstance(state.layers[0], KeyValue)
            buffers.append(state.layers[0].buffers[0].data_ptr())
    assert len(set(buffers[1:])) == 1


@pytest.mark.parametrize("kind", ["full-t5", "local-t5", "full-xl"])
def test_no_graph_outlives_its_branch(kind):
    """What branches compute dies with the call but for memories and the last streams, shared tables included."""
    model, made = build(kind), []
    for block in model.stack.blocks:
        block.attention.register_forward_hook(lambda *args: made.append(weakref.ref(args[2][0])))
    (loss,), _ = losses(model, tokens(2, 14))
    gc.collect()
    assert len(made) == 3
    assert all(ref() is None for ref in made)
    loss.backward()
    gc.collect()
    assert len(made) == 6
    assert all(ref() is None for ref in made)


@pytest.mark.parametrize(("kind", "mem_len"), [("local-t5", 0), ("local-t5", 128), ("lsh-none", 0)])
def test_peak_memory_is_flat_in_depth(kind, mem_len):
    """Peak of a training step beyond weights, gradients and what is remembered, at 2 and 12 layers."""
    more = {"dim": 64, "feedforward": {"chunk_len": 128}, "loss_chunk": 128}
    if kind == "local-t5":
        more["attention"] = {"n_heads": 2, "window": 32}

    def peak(n_layers):
        model = build(kind, n_layers=n_layers, dtype=torch.float32, size=0.1, **more)
        text = tokens(2, 257)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state = model.init_state(
            2, mem_len=mem_len, segment_len=256, span="growing" if mem_len else "uniform", memory="hidden"
        )
        if mem_len:
            with torch.no_grad():
                _, state = model(text[:, :128], state)
        remembered = state.bytes

        def step():
            nonlocal state
            nll, state = model.score(text[:, :-1], text[:, 1:], state)[:2]
            nll.mean().backward()

        return peak_memory.measure(step)["allocated"] - max(state.bytes, remembered)

    few, many = (peak(n) for n in (2, 12))
    assert many < 1.1 * few


# What goes with it.


def test_norm_after_the_sum_is_refused():
    with pytest.raises(ConfigError, match=r"'post'.*\brezero\b.*\bstandard\b"):
        config.make({"model": {"stack": {"kind": "reversible"}, "norm": {"placement": "post"}}})


def test_invariants_hold():
    assert any(tree.get("stack") == {"kind": "reversible"} for tree in COMBINATIONS.values())
