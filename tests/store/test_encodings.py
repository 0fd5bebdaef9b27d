import math

import pytest
import torch
from torch import nn

from xlcli.errors import CheckpointError
from xlcli.files.tensors import TensorInfo
from xlcli.store.layout import ENCODINGS, n_weights
from xlcli.store.weights import decode, encode, stored_infos


def some_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "matrix": nn.Parameter(torch.randn(4, 6, generator=draw)),
        "cube": nn.Parameter(torch.randn(2, 3, 5, generator=draw)),
        "vector": nn.Parameter(torch.randn(6, generator=draw)),
        "scalar": nn.Parameter(torch.randn((), generator=draw)),
        "directions": torch.randn(4, 6, generator=draw),
        "counts": torch.arange(3),
    }


def test_int8_stores_parameters_of_two_or_more_axes_as_rows():
    assert stored_infos(some_tensors(), "int8") == {
        "matrix": TensorInfo("I8", (4, 6)),
        "matrix:scale": TensorInfo("BF16", (4,)),
        "cube": TensorInfo("I8", (2, 3, 5)),
        "cube:scale": TensorInfo("BF16", (2, 3)),
        "vector": TensorInfo("F32", (6,)),
        "scalar": TensorInfo("F32", ()),
        "directions": TensorInfo("F32", (4, 6)),
        "counts": TensorInfo("I64", (3,)),
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stored_tensors_are_as_announced_and_decode_once_and_for_all(encoding):
    tensors = some_tensors()
    infos = stored_infos(tensors, encoding)
    stored = encode(tensors, infos)
    names = {"I8": torch.int8, "I64": torch.int64, **{s: getattr(torch, n) for n, s in ENCODINGS.items()}}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == {
        name: (names[info.dtype], info.shape) for name, info in infos.items()
    }
    assert n_weights(infos) == sum(t.numel() for t in tensors.values())
    decoded = decode(stored)
    assert decoded.keys() == tensors.keys()
    assert {t.dtype for name, t in decoded.items() if name != "counts"} == {torch.float32}
    assert torch.equal(decoded["counts"], tensors["counts"])
    again = encode(decoded, infos)
    assert all(torch.equal(again[name], stored[name]) for name in infos)
    exact = tensors.keys() if encoding in ("float32", "float64") else {"counts"}
    exact = {"vector", "scalar", "directions", "counts"} if encoding == "int8" else exact
    assert {name for name in tensors if torch.equal(tensors[name], decoded[name])} == exact


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_a_positive_number(scale):
    stored = encode(some_tensors(), stored_infos(some_tensors(), "int8"))
    stored["matrix:scale"][2] = scale
    with pytest.raises(ValueError, match="matrix:scale"):
        decode(stored)


def test_a_value_that_is_not_used():
    stored = encode(some_tensors(), stored_infos(some_tensors(), "int8"))
    stored["cube"][1, 2, 3] = -128
    with pytest.raises(ValueError, match="-128"):
        decode(stored)


@pytest.mark.parametrize(
    ("encoding", "name", "value"),
    [
        ("int8", "matrix", math.nan),
        ("int8", "cube", -math.inf),
        ("bfloat16", "vector", math.nan),
        ("bfloat16", "matrix", 3.4e38),
        ("float16", "directions", 1e5),
        ("float64", "scalar", math.inf),
    ],
)
def test_a_weight_that_an_encoding_cannot_represent(encoding, name, value):
    tensors = some_tensors()
    with torch.no_grad():
        tensors[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=f"{name}.*{encoding}") as caught:
        encode(tensors, stored_infos(tensors, encoding))
    assert caught.value.remedy


def test_float32_weights_are_stored_as_they_are():
    tensors = {"matrix": nn.Parameter(torch.tensor([[math.nan, math.inf]]))}
    stored = encode(tensors, stored_infos(tensors, "float32"))
    assert stored["matrix"].data_ptr() == tensors["matrix"].data_ptr()
    assert not stored["matrix"].requires_grad
