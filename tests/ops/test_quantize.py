"""Rounding to int8 rows: exactness, bounds, and agreement with a loop."""

import math

import numpy as np
import torch

from xlcli.ops.layers import dequantize, quantize

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
    error = (dequantize(values, scale).double() - x.double()).abs()
    assert bool((error <= scale.double().unsqueeze(-1) / 2).all())
    assert values.abs().amax(-1).tolist() == [127] * 300


def test_quantizing_decoded_rows_changes_nothing():
    for x in (some_rows(), torch.randn(5000, 3, generator=torch.Generator().manual_seed(2))):
        values, scale = quantize(x)
        decoded = dequantize(values, scale)
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
