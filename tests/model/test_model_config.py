"""Facts that follow from the configuration of a model: its memory, and the settings that inference may change."""

import pytest
import torch

from xlcli import config
from xlcli.config import InferenceConfig, TrainConfig
from xlcli.config.attention import MAX_HASHES
from xlcli.errors import ConfigError
from xlcli.model.build import build_model

LSH = {"kind": "lsh", "n_buckets": [2, 4], "bucket_size": 6, "n_hashes": 2}
LINEAR = {"kind": "linear", "n_features": 16}
LOCAL = {"kind": "local", "window": 7}
UNIVERSAL = {"stack": {"kind": "universal", "n_steps": 3}}
ACT = {"stack": {"kind": "universal", "n_steps": 3, "act": True}}


def model(*layers, **more):
    """A configuration with these attention kinds in its layers."""
    attention = layers[0] if len(set(map(str, layers))) == 1 else {"kind": "mixed", "layers": list(layers)}
    tree = {"dim": 16, "n_layers": len(layers), "position": {"kind": "none"}, "attention": attention | {"n_heads": 2}}
    return config.make({"model": tree | more}).model


FULL = {"kind": "full"}


@pytest.mark.parametrize(("layers", "effective"), [
    ([FULL, LOCAL], 20), ([LOCAL], 7), ([LSH, LOCAL], 20), ([LINEAR, LINEAR], None), ([LINEAR, FULL], None),
])  # fmt: skip
def test_effective_memory_is_the_longest_of_all_layers(layers, effective):
    assert model(*layers).effective_mem_len(20) == effective


@pytest.mark.parametrize(("layers", "mem_len", "said"), [
    ([FULL, LOCAL], 20, None), ([LOCAL, LOCAL], 7, None), ([LOCAL, LOCAL], 8, "at most 7 earlier tokens"),
    ([LINEAR], 8, "all tokens"), ([LINEAR], 0, None), ([LINEAR, LOCAL], 8, "at most 7 earlier tokens"),
    ([LINEAR, FULL], 8, None), ([LSH], 10**6, None),
])  # fmt: skip
def test_a_memory_length_without_effect_is_warned_of(layers, mem_len, said):
    warning = model(*layers).mem_len_warning(mem_len)
    assert (warning is None) == (said is None)
    assert said is None or said in warning


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", [FULL, LOCAL])
def test_shared_heads_make_memory_and_matrices_smaller(kind, dtype):
    """By counts of the model itself."""
    shape = model(kind | {"n_kv_heads": 1}, dim=16, position={"kind": "rope"})
    network = build_model(shape)
    state = network.init_state(1, mem_len=12, segment_len=4, memory_dtype=dtype)
    with torch.inference_mode():
        _, state = network(torch.zeros(1, 40, dtype=torch.long), state)[:2]
    n_bytes = sum(t.nbytes for memory in state.layers for t in memory.tensors().values())
    assert shape.memory_bytes(12, dtype) == n_bytes
    blocks = network.stack.blocks
    assert shape.n_matrix_weights == sum(p.numel() for p in blocks.parameters() if p.ndim == 2)


def test_inference_settings_change_nothing_else():
    trained = model(LOCAL, LSH, **UNIVERSAL)
    chosen = trained.for_inference(n_steps=5, n_hashes=8)
    assert (chosen.stack.n_steps, chosen.depth, [a.kind for a in chosen.attentions]) == (5, 10, ["local", "lsh"])
    assert chosen.attentions[1].n_hashes == 8
    assert chosen.for_inference(n_steps=3, n_hashes=2) == trained == trained.for_inference()
    weights, others = (build_model(c, torch.Generator().manual_seed(0)).state_dict() for c in (trained, chosen))
    assert {name: t.shape for name, t in weights.items()} == {name: t.shape for name, t in others.items()}
    assert chosen.memory_bytes(9) == 5 * sum(
        model(layer).for_inference(n_hashes=n).memory_bytes(9) for layer, n in ((LOCAL, None), (LSH, 8))
    )


@pytest.mark.parametrize(("shape", "settings", "said"), [
    (model(FULL), {"n_steps": 2}, "universal"),
    (model(FULL, LINEAR), {"n_hashes": 2}, "LSH"),
    (model(FULL), {"n_sinks": 4}, "rotary"),
    (model(FULL, position={"kind": "rope"}), {"n_sinks": 4}, "clamp_len"),
])  # fmt: skip
def test_inference_settings_that_do_not_apply_are_refused(shape, settings, said):
    with pytest.raises(ConfigError, match=said):
        shape.for_inference(**settings)


@pytest.mark.parametrize("settings", [{"n_hashes": 0}, {"n_hashes": MAX_HASHES + 1}, {"n_steps": 0}])
def test_inference_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        config.validate(InferenceConfig, settings)


def test_random_features_are_redrawn_when_asked():
    layers = model(FULL, LINEAR, LSH | {"redraw_every": 5}).attentions
    assert [getattr(layer, "redraw_every", None) for layer in layers] == [None, None, 5]


@pytest.mark.parametrize(("layers", "train", "expected"), [
    ([FULL], {"mem_len": 20, "segment_len": 8}, 27), ([FULL], {"mem_len": 20, "segment_len": 8, "span": "uniform"}, 20),
    ([FULL], {"mem_len": 0, "segment_len": 8, "span": "uniform"}, 7), ([LOCAL], {"mem_len": 20, "segment_len": 8}, 7),
    ([LOCAL, FULL, LINEAR], {"mem_len": 20, "segment_len": 8}, 27),
])  # fmt: skip
def test_the_largest_distance_of_training(layers, train, expected):
    trained, train = model(*layers, position={"kind": "xl"}), TrainConfig(**train)
    assert train.limits(trained, None) == (expected, expected)
    assert (train.limits(trained, 5), train.limits(trained, "none")) == ((5, None), (None, None))


def test_keys_further_back_than_in_training_are_far_for_every_encoding():
    train, alibi = TrainConfig(mem_len=20, segment_len=8), model(FULL, position={"kind": "alibi"})
    assert [train.limits(alibi, n) for n in (None, "none")] == [(None, 27), (None, None)]
    clamped = model(FULL, position={"kind": "xl", "clamp_len": 5})
    assert [train.limits(clamped, n) for n in (None, 9, 99, "none")] == [(5, 27), (9, None), (99, None), (None, None)]
    for position in ({"kind": "none"}, {"kind": "contextual-2"}):
        assert train.limits(model(FULL, position=position), None) == (None, 20)


def test_a_largest_distance_needs_softmax_attention_and_an_encoding_of_distances():
    InferenceConfig(clamp_len=9).check_model(model(LINEAR, FULL, position={"kind": "xl"}))
    alibi = model(LINEAR, FULL, position={"kind": "alibi"})
    InferenceConfig(clamp_len="none").check_model(alibi)
    assert TrainConfig().limits(model(LINEAR), None) == (None, None)
    for clamp_len, trained in (("none", model(LINEAR)), (9, model(LINEAR)), (9, alibi)):
        with pytest.raises(ConfigError, match="clamp_len"):
            InferenceConfig(clamp_len=clamp_len).check_model(trained)
