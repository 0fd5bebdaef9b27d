"""Fast decoding: the logits and memories of the modules, for every kind of block, weight and memory."""

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.variants import COMBINATIONS, table, thinned
from xlcli import config
from xlcli.config import ModelConfig
from xlcli.config.attention import FullAttentionConfig, LocalAttentionConfig
from xlcli.config.model import EmbeddingConfig, FeedForwardConfig, NormConfig, StandardStackConfig
from xlcli.config.position import AlibiPositionConfig, RopePositionConfig, T5PositionConfig, XLPositionConfig
from xlcli.kernels.records import CACHE
from xlcli.model.attention.full import FullAttention
from xlcli.model.build import build_model
from xlcli.model.decoder import Decoder, make_decoder, may_decode, table_bytes, weight_bytes
from xlcli.ops.stored import StoredMatrix
from xlcli.store import weights
from xlcli.store.weights import round_weights

ROOT = Path(__file__).parents[2]
WEIGHTS, MEMORY = ("float32", "bfloat16", "int8"), ("float32", "int8", "bfloat16")


def network_of(tree, encoding, n_layers=3, seed=0, smallest_stored=0):
    """Random model with weights large enough that errors are visible; rounded matrices stay as they are stored."""
    model = config.make({"model": {"n_layers": n_layers, **tree}}).model
    network = build_model(model, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    with patch.object(weights, "SMALLEST_STORED", smallest_stored):
        round_weights(network, encoding)
    return network.eval()


@functools.cache
def decodes(attention, position, stack):
    """Whether there is a decoder for models with these tables, in JSON."""
    parts = {"attention": attention, "position": position, "stack": stack}
    tree = {"vocab_size": 31, "dim": 12, **{name: json.loads(part) for name, part in parts.items()}}
    return may_decode(build_model(config.make({"model": tree | {"n_layers": 2}}).model).eval())


def _tables(name):
    return (json.dumps(table(name).get(part, {})) for part in ("attention", "position", "stack"))


DECODED = [name for name in COMBINATIONS if decodes(*_tables(name))]


def check(network, encoding, memory_dtype, *, batch=2, mem_len=9, segment_len=8, n_read=14, n_new=8):
    """Reads a text in one call, then compares predictions after one token at a time, from the same states."""
    decoder = make_decoder(network, encoding)
    tokens = torch.randint(
        network.config.vocab_size, (batch, n_read + n_new), generator=torch.Generator().manual_seed(2)
    )
    with torch.inference_mode():
        places = [0, 5][:batch]
        state = network.init_state(
            batch, mem_len=mem_len, segment_len=segment_len, memory_dtype=memory_dtype, offsets=places
        )
        _, state = network.logits(tokens[:, :n_read], state)
        for token in tokens[:, n_read:].split(1, dim=1):
            expected, slow = network.logits(token, state.fork())
            logits, state = decoder.logits(token, state)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
            assert state.describe() == slow.describe()
            for one, other in zip(state.layers, slow.layers, strict=True):
                assert one.kind == other.kind
                assert one.shape == other.shape
            torch.testing.assert_close(state.offsets, slow.offsets)


def types(name):
    """Number types of weights and memory, by turns."""
    i = DECODED.index(name) % len(WEIGHTS)
    return WEIGHTS[i], MEMORY[i] if config.make({"model": table(name)}).model.rounds_memory else "float32"


FEW_TYPES = ("float32", "float32"), ("bfloat16", "int8"), ("int8", "float32")
"""Pairs of types whose kernels are compiled by other tests, too; each takes twenty seconds."""


@pytest.mark.parametrize("name", thinned(DECODED, {name for name in DECODED[::10] if types(name) in FEW_TYPES}))
def test_logits_equal_those_of_the_modules(name):
    weights, memory = types(name)
    check(network_of(table(name), weights), weights, memory)


SOFTMAX = {"kind", "n_heads", "head_dim", "scaled", "qk_norm", "n_kv_heads", "bias"}
COMPUTED = {
    FullAttentionConfig: SOFTMAX,
    LocalAttentionConfig: SOFTMAX | {"window"},
    AlibiPositionConfig: {"kind"},
    T5PositionConfig: {"kind", "shared", "n_buckets", "max_distance"},
    XLPositionConfig: {"kind", "n_features", "tied", "clamp_len"},
    RopePositionConfig: {
        "kind", "placement", "layout", "rotary_dim", "base", "local_base", "scaling", "clamp_len", "n_sinks",
    },
    StandardStackConfig: {"kind", "input_residual"},
    FeedForwardConfig: {"kind", "ffn_dim", "chunk_len"},
    NormConfig: {"kind", "placement", "epsilon", "final"},
    EmbeddingConfig: {
        "n_bigrams", "per_layer", "tied", "scaled", "norm", "tied_projections", "inner_dim", "cutoffs", "div_val",
    },
    ModelConfig: {
        "vocab_size", "dim", "n_layers", "attention", "position", "stack", "feedforward", "norm", "embedding",
        "dropout", "loss_chunk", "logit_softcap", "zero_init", "bias", "zero_memory", "init_std",
    },
}  # fmt: skip
"""Settings with which a decoder gives the logits of the network. A new one is added here once the kernels compute it;
until then blocks that use it have to run as modules (`has_kernel`)."""
OTHER_VALUES = {
    "vocab_size": 37, "dim": 16, "n_layers": 2, "loss_chunk": 3, "logit_softcap": 2.0, "init_std": 0.1,
    "n_heads": 6, "head_dim": 8, "n_kv_heads": 1, "window": 5, "ffn_dim": 20, "chunk_len": 4, "epsilon": 0.1,
    "n_bigrams": 57, "inner_dim": 6, "cutoffs": [9, 20], "div_val": 2,
    "rotary_dim": 2, "base": 50.0, "local_base": 40.0, "clamp_len": 4, "n_sinks": 2, "n_buckets": 6,
    "max_distance": 20, "n_features": 6,
    "scaling": {"kind": "llama3", "factor": 3.0, "original_len": 40, "high_freq_factor": 5.0},
}  # fmt: skip
"""A legal value that differs from the default of each setting that is neither a switch nor a choice."""
NEEDS = {
    "div_val": {"cutoffs": [9, 20]},
    "n_sinks": {"clamp_len": 4},
    "tied_projections": {"inner_dim": 6},
    "max_distance": {"n_buckets": 6},
}
"""Further settings of a section without which one is illegal or changes nothing."""
TRAINING_ONLY = {"dropout"}


def other_values(section, name):
    """Values of a setting that differ from its default."""
    field = section.model_fields[name]
    if name in OTHER_VALUES:
        return [OTHER_VALUES[name]]
    legal = get_args(field.annotation) if get_origin(field.annotation) is Literal else (False, True)
    assert field.annotation is bool or legal != (False, True), f"give {name} a value in OTHER_VALUES"
    return [value for value in legal if value != field.default]


def changed_settings():
    """Every setting of every section that a decoder knows: section, kind, setting, value."""
    for section, names in COMPUTED.items():
        assert names == set(section.model_fields), f"a decoder does not know all settings of {section.__name__}"
        for name in section.model_fields:
            field = section.model_fields[name].annotation
            is_section = name in ("attention", "position", "stack", "feedforward", "norm", "embedding")
            if name not in TRAINING_ONLY and not is_section and (name != "kind" or len(get_args(field)) > 1):
                yield from ((section, name, value) for value in other_values(section, name))


TABLES = {
    FullAttentionConfig: ("attention", {"kind": "full"}), LocalAttentionConfig: ("attention", {"kind": "local"}),
    AlibiPositionConfig: ("position", {"kind": "alibi"}), T5PositionConfig: ("position", {"kind": "t5"}),
    XLPositionConfig: ("position", {"kind": "xl"}), RopePositionConfig: ("position", {"kind": "rope"}),
    StandardStackConfig: ("stack", {}), FeedForwardConfig: ("feedforward", {}), NormConfig: ("norm", {}),
    EmbeddingConfig: ("embedding", {}),
}  # fmt: skip


@pytest.mark.parametrize(("section", "name", "value"), list(changed_settings()))
def test_every_setting_changes_the_kernels_as_it_changes_the_modules(section, name, value):
    tree = {"vocab_size": 31, "dim": 24}
    change = NEEDS.get(name, {}) | {name: value}
    if section is ModelConfig:
        tree |= change
    else:
        table_name, kind = TABLES[section]
        tree[table_name] = kind | change
    network = network_of(tree, "float32")
    if may_decode(network):
        check(network, "float32", "float32", mem_len=6)


def test_a_kind_that_the_kernels_do_not_know_is_left_to_the_modules():
    class SharpAttention(FullAttention):
        pass

    network = network_of({"vocab_size": 31, "dim": 12}, "float32")
    assert may_decode(network)
    for block in network.stack.blocks:
        block.attention.__class__ = SharpAttention
    assert not may_decode(network)


@pytest.mark.parametrize("mem_len", [0, 4, 700])
def test_memories_of_any_length(mem_len):
    """Independent segments, a memory shorter than the text, and one of several chunks."""
    tree = table("full-xl-0-pre-0") | {"dim": 24}
    check(network_of(tree, "float32"), "float32", "float32", mem_len=mem_len, n_read=650, segment_len=7)


@pytest.mark.parametrize(("weights", "memory"), [("float32", "float32"), ("bfloat16", "int8")])
@pytest.mark.parametrize("position", [{"kind": "xl"}, {"kind": "alibi"}, {"kind": "rope", "clamp_len": 200}])
def test_heads_share_keys_in_chunks(position, weights, memory):
    attention = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 8, "bias": "all", "qk_norm": True}
    tree = {"vocab_size": 31, "dim": 24, "attention": attention, "position": position}
    check(network_of(tree, weights), weights, memory, mem_len=700, n_read=650, n_new=3)


@pytest.mark.parametrize(("weights", "memory"), FEW_TYPES)
@pytest.mark.parametrize("n_queries", [2, 3, 5, 8])
def test_queries_are_taken_in_pairs(n_queries, weights, memory):
    """Keys of two lengths, of layers with windows and without, and sinks; two sequences."""
    attention = {"kind": "mixed", "n_heads": 2 * n_queries, "n_kv_heads": 2, "head_dim": 8}
    attention["layers"] = [{"kind": "local", "window": 5}, "full", {"kind": "local", "window": 11}]
    position = {"kind": "rope", "clamp_len": 30, "n_sinks": 4}
    tree = {"vocab_size": 31, "dim": 24, "attention": attention, "position": position}
    check(network_of(tree, weights, n_layers=4), weights, memory, mem_len=40, n_read=60)


@pytest.mark.parametrize("clamp_len", [1, 600, 698])
@pytest.mark.parametrize("position", [
    {"kind": "xl", "n_features": 8}, {"kind": "xl", "n_features": 30}, {"kind": "rope"},
    {"kind": "rope", "layout": "interleaved"}, {"kind": "rope", "rotary_dim": 4},
    {"kind": "rope", "layout": "interleaved", "rotary_dim": 6},
])  # fmt: skip
def test_distances_are_clamped_in_chunks_of_keys(clamp_len, position):
    """Beyond chunks, in the middle of one, and at one key; with position keys, and with projected ones."""
    tree = table("full-xl-0-pre-0") | {"dim": 24, "position": position | {"clamp_len": clamp_len}}
    network = network_of(tree, "float32")
    network.full_len = clamp_len + 1
    check(network, "float32", "float32", mem_len=700, n_read=698, n_new=3)


@pytest.mark.parametrize(("weights", "memory"), FEW_TYPES)
def test_branches_read_the_same_input(weights, memory):
    """As in GPT-NeoX, with sinks, and a vector of each token for each layer."""
    tree = table("sinks4-full-rope-3-parallel-6")
    check(network_of(tree, weights), weights, memory)


def test_float16_weights_are_read_as_they_are_stored():
    network = network_of(table("full-rope-0-pre-0"), "float16")
    check(network, "float16", "float32")
    [part] = make_decoder(network, "float16").parts
    assert part.memory_type(network.init_state(1, mem_len=9, segment_len=8, memory_dtype="float32")) == torch.float32


def test_the_number_of_threads_changes_nothing():
    network = network_of(table("full-xl-0-pre-0"), "int8")
    decoder = make_decoder(network, "int8")
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            state = network.init_state(2, mem_len=9, segment_len=8)
            for token in torch.arange(24).view(12, 2, 1):
                logits, state = decoder.logits(token, state)
            results.append(logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_a_sequence_does_not_depend_on_its_batch():
    network = network_of(table("full-xl-0-pre-0"), "float32")
    decoder = make_decoder(network, "float32")
    tokens = torch.randint(network.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    states = [network.init_state(n, mem_len=9, segment_len=8) for n in (3, 1)]
    for token in tokens.split(1, dim=1):
        together, states[0] = decoder.logits(token, states[0])
        alone, states[1] = decoder.logits(token[1:2], states[1])
        assert torch.equal(together[1:2], alone)


@pytest.mark.parametrize("name", DECODED[::6])
def test_joined_sequences_continue_as_each_alone(name):
    """To the bit if all blocks have kernels; with memories that are not full, and in several chunks of keys."""
    network = network_of(table(name), "float32")
    decoder = make_decoder(network, "float32")
    states, alone = [], []
    tokens = torch.randint(network.config.vocab_size, (3, 620), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for n, row in zip((1, 600, 7), tokens, strict=True):
            state = network.init_state(1, mem_len=590, segment_len=8)
            _, state = network.logits(row[None, :n], state)
            states.append(state)
        if len({state.join_keys[0] for state in states}) > 1:
            pytest.skip("sequences at different places cannot be joined")
        joined = type(state).join(states)
        for token in tokens[:, -9:].split(1, dim=1):
            together, joined = decoder.logits(token, joined)
            alone = []
            for i in range(3):
                logits, states[i] = decoder.logits(token[i : i + 1], states[i])
                alone.append(logits)
            tolerance = 0 if all(part.packed.size for part in decoder.parts) and decoder.parts[-1].head else 2e-5
            torch.testing.assert_close(together, torch.cat(alone), rtol=tolerance, atol=tolerance)


def test_a_saved_state_continues_to_the_bit():
    network = network_of(table("local-rope-0-pre-0"), "float32")
    decoder = make_decoder(network, "float32")
    tokens = torch.arange(30).view(30, 1, 1) % network.config.vocab_size
    state = network.init_state(1, mem_len=9, segment_len=8)
    with torch.inference_mode():
        for token in tokens[:20]:
            _, state = decoder.logits(token, state)
        other = type(state).restore({name: t.clone() for name, t in state.tensors().items()}, state.describe())
        for token in tokens[20:]:
            one, state = decoder.logits(token, state)
            two, other = decoder.logits(token, other)
            assert torch.equal(one, two)


def test_there_is_none_for_other_devices_types_and_stacks():
    network = network_of(table("full-xl-0-pre-0"), "float32")
    assert make_decoder(network.double(), "float32") is None
    reversible = {"vocab_size": 31, "dim": 12, "stack": {"kind": "reversible"}}
    assert make_decoder(network_of(reversible, "float32"), "float32") is None
    lsh = {"vocab_size": 31, "dim": 12, "attention": {"kind": "lsh", "n_heads": 2, "n_buckets": 4, "bucket_size": 4}}
    assert make_decoder(network_of(lsh | {"position": {"kind": "sinusoidal"}}, "float32"), "float32") is None


def test_it_says_which_kernels_are_missing():
    from xlcli.kernels import decode

    def is_compiled(*types):
        return known

    network = network_of(table("full-xl-0-pre-0"), "bfloat16")
    decoder = Decoder(network, "bfloat16", SimpleNamespace(**vars(decode) | {"is_compiled": is_compiled}))
    state = network.init_state(1, mem_len=9, segment_len=8, memory_dtype="int8")
    known = False
    missing = decoder.uncompiled(state, decoder.weight_type)
    assert [[each.dtype.name for each in types] for types in missing] == [["uint16", "int8"]]
    known = True
    assert decoder.uncompiled(state, decoder.weight_type) == []
    decode.compile_kernel(*missing[0], lambda: False)
    assert decode.is_compiled(*missing[0])


@pytest.mark.parametrize(("encoding", "memory_dtype"), [("float32", "float32"), ("bfloat16", "int8")])
@pytest.mark.parametrize("damaged", ["query", "key", "value"])
def test_undefined_numbers_are_not_lost(damaged, encoding, memory_dtype):
    network = network_of(table("full-xl-0-pre-0"), encoding, n_layers=1)
    weight = getattr(network.stack.blocks[0].attention, damaged).weight
    getattr(weight, "rows", weight.data)[0, 0] = torch.nan
    state = network.init_state(1, mem_len=9, segment_len=8, memory_dtype=memory_dtype)
    logits, _ = make_decoder(network, encoding).logits(torch.zeros(1, 1, dtype=torch.int64), state)
    assert logits.isnan().all()


@pytest.mark.parametrize("position", ["xl", "alibi"])
def test_tables_are_no_longer_than_the_memory(position, monkeypatch):
    from xlcli.kernels import decode

    lengths, run = [], decode.decode_token

    def decode_token(calls, *types):
        memory = (ctypes.c_char * CACHE.itemsize).from_address(int(calls[0]["caches"]))
        lengths.append(int(np.frombuffer(memory, CACHE)[0]["n_distances"]))
        return run(calls, *types)

    tree = {"vocab_size": 31, "dim": 12, "attention": {"n_heads": 2}, "position": {"kind": position}}
    network = network_of(tree | {"feedforward": {"kind": "relu"}}, "float32", n_layers=1)
    monkeypatch.setattr(decode, "decode_token", decode_token)
    decoder = make_decoder(network, "float32")
    with torch.inference_mode():
        _, state = network.logits(
            torch.arange(290).view(1, 290) % 31, network.init_state(1, mem_len=300, segment_len=8)
        )
        for token in torch.arange(14).view(14, 1, 1):
            expected, _ = network.logits(token, state.fork())
            logits, state = decoder.logits(token, state)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    assert set(lengths) == {301}
    if position == "xl":  # two features of high frequency are shared; two heads have two blocks, or one, of 6 rows
        numbers = 2 * 301 + 2 * 2 * 6 * 64, 2 + 2 * 6 * 64
    else:
        numbers = 2 * 301, 2
    assert [table_bytes(network, n) for n in (300, 0)] == [4 * n for n in numbers]
    matrices = [block.feedforward.up.weight.numel() for block in network.stack.blocks]
    assert weight_bytes(network, "float32") == 4 * 3 * 12 * 12
    assert weight_bytes(network, "int8") == 4 * 12 * 12 + 2 * sum(matrices)


def test_a_forked_process_uses_the_modules():
    """OpenMP would end it."""
    network = network_of(table("full-xl-0-pre-0"), "float32")
    decoder = make_decoder(network, "float32")
    state, token = network.init_state(1, mem_len=9, segment_len=8), torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        expected, state = decoder.logits(token, state)
        reader, writer = os.pipe()
        if not (child := os.fork()):
            torch.set_num_threads(1)
            logits, _ = decoder.logits(token, network.init_state(1, mem_len=9, segment_len=8))
            os.write(writer, str(torch.allclose(logits, expected, atol=2e-5)).encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 10) == b"True"
    os.close(reader)


@pytest.mark.parametrize("position", ["xl", "alibi"])
def test_a_call_reads_live_tables(position, monkeypatch):
    """A local block needs a shorter table than a full one, which replaces it in the same call."""
    from xlcli.kernels import decode

    read, run = [], decode.decode_token

    def decode_token(calls, *types):
        memory = (ctypes.c_char * (2 * CACHE.itemsize)).from_address(int(calls[0]["caches"]))
        live = {t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor}
        for cache in np.frombuffer(memory, CACHE):
            read.append(int(cache["position_keys"] or cache["bias"]))
            assert read[-1] in live
        return run(calls, *types)

    attention = {"kind": "mixed", "n_heads": 2, "layers": [{"kind": "local", "window": 5}, "full"]}
    tree = {"vocab_size": 31, "dim": 12, "attention": attention, "position": {"kind": position}}
    network = network_of(tree, "float32", n_layers=2)
    monkeypatch.setattr(decode, "decode_token", decode_token)
    decoder = make_decoder(network, "float32")
    tokens = torch.arange(301).view(1, 301) % 31
    with torch.inference_mode():
        _, state = network.logits(tokens[:, :300], network.init_state(1, mem_len=400, segment_len=8))
        expected, _ = network.logits(tokens[:, 300:], state.fork())
        logits, _ = decoder.logits(tokens[:, 300:], state)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    assert len(set(read)) == 2


def test_float32_matrices_are_not_copied():
    network = network_of({"vocab_size": 31, "dim": 12, "feedforward": {"kind": "relu"}}, "float32")
    [part] = make_decoder(network, "float32").parts
    for packed, block in zip(part.packed, part.blocks, strict=True):
        assert packed["up"]["weight"] == block.feedforward.up.weight.data_ptr()


def test_kernels_leave_the_number_of_threads_of_pytorch_alone():
    """In a process of its own, because Numba starts its threads once."""
    code = """
import torch
from tests.toys import toy
torch.set_num_threads(1)
model = toy(dtype=torch.float32)
with torch.inference_mode():
    model.decoder.logits(torch.tensor([[1]]), model.network.init_state(1, mem_len=9, segment_len=8))
assert torch.get_num_threads() == 1
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("encoding", ["int8", "bfloat16"])
def test_small_models_in_float32_give_the_logits_of_stored_matrices(encoding):
    found = []
    for smallest_stored in (0, 2**25):
        network = network_of(table("full-xl-0-pre-0"), encoding, n_layers=1, smallest_stored=smallest_stored)
        assert isinstance(network.stack.blocks[0].feedforward.up.weight, StoredMatrix) == (smallest_stored == 0)
        decoder = make_decoder(network, encoding)
        logits = []
        state = network.init_state(1, mem_len=9, segment_len=8)
        for token in (3, 1, 4):
            out, state = decoder.logits(torch.tensor([[token]]), state)
            logits.append(out)
        before = network.init_state(1, mem_len=9, segment_len=8)
        score = network.score(torch.tensor([[3, 1, 4]]), torch.tensor([[1, 4, 1]]), before)
        found.append((torch.cat(logits), score.nll))
    assert all(torch.equal(stored, wide) for stored, wide in zip(*found, strict=True))
