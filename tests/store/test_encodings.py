import math

import numpy as np
import pytest
import torch
from torch import nn

from xlcli.errors import CheckpointError
from xlcli.files.tensors import TensorInfo
from xlcli.store.encodings import ENCODINGS, decode, dequantize, encode, n_bytes, n_weights, quantize, stored_infos

TINY, LARGE = 2.0**-126, 2.0**121


def to_bfloat16(value: np.float32) -> np.float32:
    """Nearest number with 8 significant bits, ties to even."""
    mantissa, exponent = math.frexp(float(value))
    return np.float32(math.ldexp(round(mantissa * 256) / 256, exponent))


def slow_quantize(x: torch.Tensor) -> tuple[list[list[int]], list[float]]:
    """Values and scales of the rows of a matrix, one number at a time."""
    rows, scales = [], []
    for row in x.numpy():
        scale = max(abs(value) for value in row) / np.float32(127)
        scale = to_bfloat16(min(max(scale, np.float32(TINY)), np.float32(LARGE)))
        rows.append([max(-127, min(127, round(float(np.float32(value / scale))))) for value in row])
        scales.append(float(scale))
    return rows, scales


def some_rows() -> torch.Tensor:
    """Rows of all magnitudes, of zeros, and at the limits of float32."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 17, generator=draw) * 2.0 ** torch.randint(-140, 120, (400, 1), generator=draw)
    rows[0], rows[1], rows[2] = 0.0, 1e-45, torch.finfo(torch.float32).max
    rows[3], rows[3, 5] = 0.0, -torch.finfo(torch.float32).max
    rows[4] = torch.arange(17) - 8.0
    return rows


def test_quantize_equals_a_loop():
    values, scale = quantize(some_rows())
    assert (values.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    slow_values, slow_scale = slow_quantize(some_rows())
    assert values.tolist() == slow_values
    assert scale.tolist() == slow_scale


def test_rounding_errors_are_at_most_half_a_step():
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(1))
    values, scale = quantize(x)
    error = (dequantize("x", values, scale).double() - x.double()).abs()
    assert bool((error <= scale.double().unsqueeze(-1) / 2).all())
    assert values.abs().amax(-1).tolist() == [127] * 300


def test_quantizing_decoded_rows_changes_nothing():
    for x in (some_rows(), torch.randn(5000, 3, generator=torch.Generator().manual_seed(2))):
        values, scale = quantize(x)
        decoded = dequantize("x", values, scale)
        assert bool(decoded.isfinite().all())
        again = quantize(decoded)
        assert torch.equal(again[0], values)
        assert torch.equal(again[1], scale)


def test_rows_are_the_last_axis():
    x = torch.randn(2, 3, 5)
    values, scale = quantize(x)
    assert (values.shape, scale.shape) == ((2, 3, 5), (2, 3))
    flat = quantize(x.reshape(6, 5))
    assert torch.equal(values.reshape(6, 5), flat[0])
    assert torch.equal(scale.reshape(6), flat[1])


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
    assert n_bytes(infos) == sum(t.numel() * t.itemsize for t in stored.values())
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
    with pytest.raises(ValueError, match=r"'matrix:scale' has a scale that is not a positive number"):
        decode(stored)


def test_a_value_that_is_not_used():
    stored = encode(some_tensors(), stored_infos(some_tensors(), "int8"))
    stored["cube"][1, 2, 3] = -128
    with pytest.raises(ValueError, match="'cube' holds -128"):
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
    with pytest.raises(CheckpointError, match=f"weight '{name}' holds .* {encoding}") as caught:
        encode(tensors, stored_infos(tensors, encoding))
    assert caught.value.remedy


def test_float32_weights_are_stored_as_they_are():
    tensors = {"matrix": nn.Parameter(torch.tensor([[math.nan, math.inf]]))}
    stored = encode(tensors, stored_infos(tensors, "float32"))
    assert stored["matrix"].data_ptr() == tensors["matrix"].data_ptr()
    assert not stored["matrix"].requires_grad
