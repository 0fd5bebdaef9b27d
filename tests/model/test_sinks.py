"""Attention sinks, against an index loop, in modules and kernels, in states and in the configuration."""

import pytest
import torch
from oracles.positions import rotated
from variants import make, read, table, tokens

from tests.model.test_decoder import check, network_of
from xlcli import config
from xlcli.errors import ConfigError, StateError
from xlcli.model.decoder import make_decoder
from xlcli.state import State

NAME = "sinks5-full-rope-1-pre-0"
SINKS = 3


def slow_attention(attention, x, *, mem_len, clamp_len, rotary_dim=None):
    """Branch output (t d) for inputs x (t d) of a text, one query and one key at a time."""
    heads, width = attention.n_heads, attention.head_dim
    q, k, v = (part(x).view(len(x), heads, width) for part in (attention.query, attention.key, attention.value))
    turn = lambda vector, places: rotated(vector, places, base=1e4, layout="interleaved", width=rotary_dim)  # noqa: E731
    out = []
    for i in range(len(x)):
        of_heads = []
        for h in range(heads):
            scores, values = [], []
            for j in range(i + 1):
                if i - j > mem_len and j >= SINKS:
                    continue
                distance = clamp_len if i - j > mem_len else min(i - j, clamp_len)
                scores.append(turn(q[i, h], distance) @ k[j, h] / width**0.5)
                values.append(v[j, h])
            of_heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        out.append(attention.output(torch.cat(of_heads)))
    return torch.stack(out)


@pytest.mark.parametrize(("name", "limits"), [
    (NAME, {"clamp_len": 5}), ("sinks4-full-rope-3-parallel-6", {"clamp_len": 4, "rotary_dim": 4}),
])  # fmt: skip
@pytest.mark.parametrize("mem_len", [2, 5, 8])
@pytest.mark.parametrize("cuts", [[1], [4, 1], [30]])
def test_attention_equals_an_index_loop(mem_len, cuts, name, limits):
    """With a memory shorter than the sinks, of their distance, and longer; also where a part of a head turns."""
    model, text = make(name, n_layers=1), tokens(1, 31)
    attention, seen = model.stack.blocks[0].attention, []
    attention.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0][0], output[0][0])))
    for mode in (torch.inference_mode, torch.no_grad):
        seen.clear()
        with mode():
            read(model, text, cuts, mem_len=mem_len)
            x, out = (torch.cat(parts) for parts in zip(*seen, strict=True))
            expected = slow_attention(attention, x, mem_len=mem_len, **limits)
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)


def test_the_first_tokens_change_all_predictions_and_the_next_ones_do_not():
    model, text = make(NAME, n_layers=1), tokens(1, 60)
    with torch.inference_mode():
        last = lambda t: model.logits(t, model.init_state(1, mem_len=7, segment_len=13))[0]  # noqa: E731
        before = last(text)
        for place in range(6):
            changed = text.clone()
            changed[0, place] = (changed[0, place] + 1) % 31
            assert torch.equal(last(changed), before) == (place >= SINKS)
    assert model.receptive_field(7) is None
    assert model.receptive_field(0) == 0


@pytest.mark.parametrize("n_sinks", [0, 1, 5])
def test_their_number_may_be_another_one_at_inference(n_sinks):
    """Results are those of a model that was made with this number, and the weights are the same."""
    wanted = table(NAME)
    trained = config.make({"model": wanted}).model
    made = config.make({"model": wanted | {"position": wanted["position"] | {"n_sinks": n_sinks}}}).model
    assert trained.for_inference(n_sinks=n_sinks) == made
    assert trained.for_inference(n_sinks=SINKS) == trained


GROUPED = {"attention": {"n_heads": 4, "n_kv_heads": 2, "qk_norm": True}, "dim": 16}


@pytest.mark.parametrize(("changes", "weights", "memory"), [
    ({}, "float32", "float32"), (GROUPED, "int8", "float32"), (GROUPED, "bfloat16", "int8"),
])  # fmt: skip
def test_kernels_give_the_results_of_modules(changes, weights, memory):
    """Before any sink is out of the memory, while they leave it, and in several chunks of keys."""
    network = network_of(table(NAME) | changes, weights)
    for n_read, mem_len in ((1, 9), (9, 9), (14, 9), (560, 550)):
        check(network, weights, memory, mem_len=mem_len, n_read=n_read, n_new=5)


def test_the_distance_of_sinks_follows_the_span():
    """It is that of the model, unless the span has another one."""
    network = network_of(table(NAME), "float32")
    found = []
    for clamp_len in (None, 5, 7):
        network.clamp_len = clamp_len
        check(network, "float32", "float32", mem_len=4, n_read=14, n_new=2)
        with torch.inference_mode():
            found.append(network.logits(tokens(1, 20), network.init_state(1, mem_len=4, segment_len=8))[0])
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[1], found[2])


@pytest.mark.parametrize("lengths", [(3, 600, 7), (598, 601, 599), (2, 2, 2)])
@pytest.mark.parametrize("kernels", [False, True])
def test_joined_sequences_continue_as_each_alone(lengths, kernels):
    """With sinks that some, all or none of them see; not at different places before there are all sinks."""
    network = network_of(table(NAME), "float32")
    reader = make_decoder(network, "float32") if kernels else network
    states, texts = [], tokens(3, 620)
    with torch.inference_mode():
        for n, row in zip(lengths, texts, strict=True):
            states.append(network.logits(row[None, :n], network.init_state(1, mem_len=597, segment_len=8))[1])
        assert len({state.join_keys[0] for state in states}) == 1
        other = network.logits(texts[:1, :1], network.init_state(1, mem_len=597, segment_len=8))[1]
        assert other.join_keys[0] != states[0].join_keys[0]
        joined = State.join(states)
        for token in texts[:, -9:].split(1, dim=1):
            together, joined = reader.logits(token, joined)
            for i in range(3):
                logits, states[i] = reader.logits(token[i : i + 1], states[i])
                torch.testing.assert_close(
                    together[i : i + 1], logits, rtol=0, atol=0 if kernels and max(lengths) > SINKS else 2e-5
                )


@pytest.mark.parametrize(("dtype", "kind"), [("float32", ""), ("bfloat16", ""), ("int8", "-int8")])
def test_a_state_has_the_first_tokens_in_float32(dtype, kind):
    model = make(NAME, dtype=torch.float32)
    with torch.inference_mode():
        state = model.init_state(2, mem_len=7, segment_len=13, memory_dtype=dtype)
        for n in (1, 1, 9, 4):
            _, state = model.logits(tokens(2, n, seed=n), state)
            assert {layer.kind for layer in state.layers} == {f"keyvalue{kind}"}
            sinks = [t for name, t in state.tensors().items() if "sink_" in name]
            assert {(tuple(t.shape), t.dtype) for t in sinks} == {((2, 2, min(SINKS, state.seen), 6), torch.float32)}
            assert model.is_compatible(State.restore(state.tensors(), state.describe()))
            assert model.is_compatible(model.reset(state.fork()))
        assert state.bytes == 2 * model.config.memory_bytes(7, dtype)
        fewer = {name: t[:, :, 1:] if "sink_" in name else t for name, t in state.tensors().items()}
        assert not model.is_compatible(State.restore(fewer, state.describe()))
        assert not make(NAME.replace("sinks5-", ""), dtype=torch.float32).is_compatible(state)
        with pytest.raises(StateError):
            State.restore({name: t for name, t in state.tensors().items() if name != "0.sink_v"}, state.describe())
        for name, damaged in (("0.sink_k", lambda t: t[:, :, 1:]), ("1.sink_v", torch.Tensor.long)):
            with pytest.raises(StateError):
                State.restore({**state.tensors(), name: damaged(state.tensors()[name])}, state.describe())


def test_sinks_have_no_gradient_and_are_not_in_training():
    model, plain = make(NAME), make(NAME)
    for block in plain.stack.blocks:
        block.attention.n_sinks = 0
    text = tokens(2, 40)
    for memory, span in (("hidden", "growing"), ("keyvalue", "growing"), ("keyvalue", "uniform")):
        for training in (False, True):
            with torch.enable_grad():
                results = [
                    read(each.train(training), text, [13], mem_len=7, span=span, memory=memory)
                    for each in (model, plain)
                ]
            assert torch.equal(results[0][0], results[1][0]) == (training or span == "growing")
            assert not any(t.requires_grad for t in results[0][1].tensors().values())


@pytest.mark.parametrize(("model", "key"), [
    ({"position": {"kind": "rope", "n_sinks": 4}}, "model.position.n_sinks"),
    ({"position": {"kind": "rope", "placement": "embedding", "clamp_len": 9, "n_sinks": 4}}, "position.n_sinks"),
    ({"attention": {"kind": "local"}}, "model.position.n_sinks"),
    ({"zero_memory": True}, "model.zero_memory"),
])  # fmt: skip
def test_what_cannot_have_sinks_is_refused(model, key):
    position = {"position": {"kind": "rope", "clamp_len": 9, "n_sinks": 4}}
    with pytest.raises(ConfigError) as refused:
        config.make({"model": position | model})
    assert key in str(refused.value)
