"""A saved memory on disk is taken back by the model that made it and by no other."""

from dataclasses import replace

import pytest
import torch
from toys import RUNTIME, VARIANTS, toy

from xlcli.errors import StateError
from xlcli.files import read_tensors, write_tensors
from xlcli.store.state_files import FORMAT, load_state, save_state


def read_some(model, mem_len=9):
    state = model.network.init_state(1, mem_len=mem_len, segment_len=8)
    with torch.inference_mode():
        return model.network.logits(torch.arange(12)[None], state)[1]


def rewritten(path, *, tensors=None, **metadata):
    """The file with other metadata, and checksums that are right."""
    old, facts = read_tensors(path, expected=None)
    facts = {key: value for key, value in (facts | metadata).items() if value is not None and key != "sha256"}
    write_tensors(path, old | (tensors or {}), facts)


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def path(tmp_path, model):
    save_state(tmp_path / "s", read_some(model), {"text": "abc"}, model=model)
    return tmp_path / "s"


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("mem_len", [0, 9])
def test_saved_and_loaded_it_is_the_same(variant, mem_len, tmp_path):
    model = toy(variant=variant)
    state = read_some(model, mem_len)
    save_state(tmp_path / "s", state, {"text": "abc", "n": "1"}, model=model)
    loaded, carry = load_state(tmp_path / "s", model=model, device=str(RUNTIME.device))
    assert carry == {"text": "abc", "n": "1"}
    assert loaded.describe() == state.describe()
    assert loaded.tensors().keys() == state.tensors().keys()
    assert all(torch.equal(t, state.tensors()[name]) for name, t in loaded.tensors().items())


@pytest.mark.parametrize("other", [{"n_layers": 3}, {"variant": "local"}, {"variant": "linear"}])
def test_a_model_of_another_shape_refuses_it(other, path):
    """Even one that claims the same fingerprints, as these do."""
    with pytest.raises(StateError, match="shape of model toy"):
        load_state(path, model=toy(**other), device="cpu")


@pytest.mark.parametrize("name", ["config", "weights", "tokenizer"])
def test_a_model_of_another_fingerprint_is_named(name, path, model):
    other = replace(model, name="other", fingerprints=model.fingerprints | {name: "123"})
    with pytest.raises(StateError, match=f"made with {name} .* but other has {name} 123"):
        load_state(path, model=other, device="cpu")


@pytest.mark.parametrize("metadata", [{"format": "1"}, {"format": None}, {"memory": None}])
def test_another_format_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match=f"not a saved memory of format {FORMAT}"):
        load_state(path, model=model, device="cpu")


@pytest.mark.parametrize("metadata", [
    {"memory": "keyvalue"}, {"memory": "sums sums"}, {"seen": "x"}, {"span": "uniform 9"}, {"span": None},
])  # fmt: skip
def test_a_description_that_makes_no_sense_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match="the state is damaged"):
        load_state(path, model=model, device="cpu")


@pytest.mark.parametrize("metadata", [{"seen": "3"}, {"span": "uniform 5 8"}, {"span": "segment 0 8"}])
def test_a_description_of_another_length_is_refused(metadata, path, model):
    rewritten(path, **metadata)
    with pytest.raises(StateError, match="does not have the shape"):
        load_state(path, model=model, device="cpu")


def test_numbers_of_another_kind_are_refused(path, model):
    rewritten(path, tensors={"0.k": torch.zeros(1, 2, 9, 8, dtype=torch.int64)})
    with pytest.raises(StateError, match="tensor 'k' of memory 'keyvalue'"):
        load_state(path, model=model, device="cpu")


def test_a_damaged_file_is_refused(path, model):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="damaged"):
        load_state(path, model=model, device="cpu")
