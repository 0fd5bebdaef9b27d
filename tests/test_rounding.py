"""Weights and memory in other number types: results, their cost, and what belongs to a model or a state."""

import re

import pytest
import torch
from toys import PROSE, RUNTIME, slow_bits, toy

from xlcli.config import EvalConfig, GenerateConfig, InferenceConfig, ModelConfig, StreamConfig
from xlcli.errors import ConfigError, StateError
from xlcli.evaluation import evaluate
from xlcli.events import GeneratedText, Score, TokenScore
from xlcli.generation import generate
from xlcli.ops.layers import dequantize, quantize
from xlcli.store import folder as store
from xlcli.store.folder import copy_model
from xlcli.store.state_files import load_state, save_state
from xlcli.store.weights import weights as weights_of
from xlcli.streaming import stream

TEXT = PROSE.encode()[:130]
ROUNDED = ["bfloat16", "int8"]


@pytest.fixture
def folder(tmp_path):
    """A model in a folder, in float32."""
    model = toy(dtype=torch.float32)
    weights = weights_of(model.network)
    store.save_model(tmp_path / "model", model.config, weights, model.tokenizer, {})
    return tmp_path / "model"


def evaluated(model, path, **options):
    """Scores of an evaluation, and bits of all tokens."""
    events = list(evaluate(model, [path], EvalConfig(**options), RUNTIME, per_token=True))
    bits = [event.bits for event in events if isinstance(event, TokenScore)]
    return [event for event in events if isinstance(event, Score)], bits


def streamed(model, portions, **options):
    events = stream(model, portions, StreamConfig(emit="tokens", **options), RUNTIME)
    return [event.bits for event in events if isinstance(event, TokenScore)]


def generated(model, *, save=None, resume=None, **options):
    chosen = GenerateConfig(temperature=0.0, **{"max_new_tokens": 20} | options)
    events = generate(model, TEXT if resume is None else b"", chosen, RUNTIME, resume=resume, save=save)
    return b"".join(event.text for event in events if isinstance(event, GeneratedText))


@pytest.mark.parametrize("variant", [None, "local", "universal"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_every_way_of_reading_gives_the_scores_of_one_call(dtype, variant, tmp_path):
    model = toy(variant=variant)
    expected = slow_bits(model, TEXT, memory_dtype=dtype)
    assert expected != pytest.approx(slow_bits(model, TEXT), abs=1e-5)
    (tmp_path / "t.txt").write_bytes(TEXT)
    for sizes in ({"batch_size": 1}, {"segment_len": 5, "batch_size": 3}):
        [score], bits = evaluated(model, tmp_path / "t.txt", memory_dtype=dtype, **sizes)
        assert (score.weight_dtype, score.memory_dtype) == ("float32", dtype)
        assert bits == pytest.approx(expected, abs=1e-5)
    assert streamed(model, [TEXT[:7], TEXT[7:90], TEXT[90:]], memory_dtype=dtype) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", ["float32", *ROUNDED])
def test_a_state_keeps_the_number_type_of_its_memory(dtype, tmp_path):
    model, path = toy(), tmp_path / "state"
    whole = generated(model, memory_dtype=dtype)
    save = lambda session: save_state(path, session, model=model)  # noqa: E731
    begun = generated(model, memory_dtype=dtype, max_new_tokens=8, save=save)
    saved = load_state(path, model=model, device="cpu")
    assert saved.model_state.memory_dtype == dtype
    for given in ("auto", dtype):
        assert begun + generated(model, max_new_tokens=12, memory_dtype=given, resume=saved.fork()) == whole
    for other in {"float32", *ROUNDED} - {dtype}:
        with pytest.raises(StateError) as error:
            generated(model, memory_dtype=other, resume=saved.fork())
        assert re.search(f"{dtype}.*{other}", error.value.message)
        assert "memory_dtype" in error.value.remedy


@pytest.mark.parametrize("dtype", ROUNDED)
def test_weights_are_rounded_as_if_they_were_stored_so(folder, dtype):
    copy_model(folder, folder.with_name("copy"), dtype)
    loaded, copied = store.load(folder, InferenceConfig(weight_dtype=dtype)), store.load(folder.with_name("copy"))
    assert (loaded.weight_dtype, copied.weight_dtype) == (dtype, "float32")
    expected, changed = weights_of(copied.network), 0
    for name, weight in weights_of(loaded.network).items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name])
        changed += not torch.equal(weight, weights_of(store.load(folder).network)[name])
    assert changed > 5
    again = weights_of(store.load(folder.with_name("copy"), InferenceConfig(weight_dtype=dtype)).network)
    assert all(torch.equal(weight, expected[name]) for name, weight in again.items())


def test_rows_of_rounded_matrices_are_found_again(folder):
    loaded = store.load(folder, InferenceConfig(weight_dtype="int8"))
    for weight in loaded.network.parameters():
        if weight.ndim == 2:
            values, scales = quantize(weight)
            assert values.dtype == torch.int8
            assert torch.equal(dequantize(values, scales), weight)


def test_the_number_type_of_weights_is_an_option_of_loading(folder):
    model = store.load(folder, InferenceConfig(weight_dtype="int8"))
    for dtype in ("auto", "int8"):
        assert generated(model, weight_dtype=dtype)
    with pytest.raises(ConfigError, match="weight_dtype") as error:
        generated(model, weight_dtype="bfloat16")
    assert "weight_dtype" in error.value.remedy


@pytest.mark.parametrize("variant", ["linear", "lsh"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_memories_without_keys_and_values_are_not_rounded(variant, dtype):
    model = toy(variant=variant)
    assert generated(model, memory_dtype="float32")
    with pytest.raises(ConfigError, match="memory_dtype") as error:
        generated(model, memory_dtype=dtype)
    assert "float32" in error.value.remedy


def test_sizes_of_memory():
    """Bytes of a key and a value of each head, with scales; a converted layer is counted once."""
    config = ModelConfig(dim=64, n_layers=3)
    assert [config.memory_bytes(10, dtype) for dtype in ("float32", *ROUNDED)] == [
        3 * 10 * 2 * 4 * row for row in (64, 32, 20)
    ]
    plain, rounded = (config.inference_bytes(2, 1, 10, dtype) for dtype in ("float32", "int8"))
    assert plain - rounded == 2 * (3 * 10 * 2 * 4 * (64 - 20) - 10 * 2 * 4 * 64)
