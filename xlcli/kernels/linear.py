"""Kernels of rows and matrices: inner products, norms, linear layers with their activation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xlcli.kernels.compiler import intrinsic, ir, numba, overload, register_jitable, types
from xlcli.kernels.records import GELU, GELU_TANH, LAYER, NONE, RELU, RELU2, Array
from xlcli.kernels.threads import FASTMATH, Team, array, finish, inner, take

TASK_BYTES = 2**17  # typical size of the part of a matrix that a thread takes at once
FLOAT_BYTES = 4  # size of a float32


@intrinsic
def from_float16(typing: Any, bits: Any) -> Any:
    """Float32 value of the bits of a float16, by the instruction of the processor."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), lower


def widen(value: Any) -> Any:
    """Float32 value of a float32, of the bits of a bfloat16 (uint16) or a float16 (int16), or of an int8."""
    raise NotImplementedError  # compiled code only


@overload(widen, inline="always")
def _widen(value: Any) -> Any:
    if value == numba.uint16:

        def from_bfloat16(value: Any) -> Any:
            return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

        return from_bfloat16

    if value == numba.int16:

        def from_half(value: Any) -> Any:
            return from_float16(value)  # type: ignore[call-arg]

        return from_half

    def from_number(value: Any) -> Any:
        return np.float32(value)

    return from_number


@inner(fastmath=FASTMATH)
def four_dots(rows: Array, r: int, near: int, far: int, x: Array) -> Any:
    """Inner products of x (d) and the rows r, r + near, r + far, r + near + far of (n d)."""
    # Reading four rows far apart is faster than one row at a time, four adjacent rows slower (measured).
    r0, r1, r2, r3 = rows[r], rows[r + near], rows[r + far], rows[r + near + far]
    t0 = t1 = t2 = t3 = np.float32(0)
    for i in range(x.size):
        t0 += widen(r0[i]) * x[i]
        t1 += widen(r1[i]) * x[i]
        t2 += widen(r2[i]) * x[i]
        t3 += widen(r3[i]) * x[i]
    return t0, t1, t2, t3


@inner(fastmath=FASTMATH)
def dots(rows: Array, x: Array, out: Array) -> None:
    """Inner products (n) of x (d) and rows (n d)."""
    step = out.size // 4  # the rows are read as four quarters; up to three more remain
    for r in range(step):
        out[r], out[r + step], out[r + 2 * step], out[r + 3 * step] = four_dots(rows, r, step, 2 * step, x)
    for r in range(4 * step, out.size):
        out[r] = four_dots(rows, r, 0, 0, x)[0]


@inner(fastmath=FASTMATH)
def pair_dots(rows: Array, x0: Array, x1: Array, out0: Array, out1: Array) -> None:
    """`dots` of x0 and of x1; each row is read and widened once, which saves a third of the time (benchmarks/log)."""
    step = out0.size // 4
    for r in range(step):
        r0, r1, r2, r3 = rows[r], rows[r + step], rows[r + 2 * step], rows[r + 3 * step]
        # Sums s are those of x0, sums t those of x1.
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
        for i in range(x0.size):
            v0, v1, v2, v3 = widen(r0[i]), widen(r1[i]), widen(r2[i]), widen(r3[i])
            s0 += v0 * x0[i]
            s1 += v1 * x0[i]
            s2 += v2 * x0[i]
            s3 += v3 * x0[i]
            t0 += v0 * x1[i]
            t1 += v1 * x1[i]
            t2 += v2 * x1[i]
            t3 += v3 * x1[i]
        out0[r], out0[r + step], out0[r + 2 * step], out0[r + 3 * step] = s0, s1, s2, s3
        out1[r], out1[r + step], out1[r + 2 * step], out1[r + 3 * step] = t0, t1, t2, t3
    # Up to three rows remain.
    dots(rows[4 * step :], x0, out0[4 * step :])
    dots(rows[4 * step :], x1, out1[4 * step :])


@inner(fastmath=FASTMATH)
def add_rows(rows: Array, first: int, weights: Array, out: Array) -> None:
    """Adds to `out` (d) the sum of columns `first` to `first + d` of rows (n, at least d) times weights (n)."""
    # A row is cut and not the matrix: only of a whole row the compiler knows that its numbers are adjacent.
    step, columns = weights.size // 4, slice(first, first + out.size)
    for r in range(step):
        r0, r1 = rows[r][columns], rows[r + step][columns]
        r2, r3 = rows[r + 2 * step][columns], rows[r + 3 * step][columns]
        w0, w1, w2, w3 = weights[r], weights[r + step], weights[r + 2 * step], weights[r + 3 * step]
        for i in range(out.size):
            out[i] += w0 * widen(r0[i]) + w1 * widen(r1[i]) + w2 * widen(r2[i]) + w3 * widen(r3[i])
    for r in range(4 * step, weights.size):
        r0, w0 = rows[r][columns], weights[r]
        for i in range(out.size):
            out[i] += w0 * widen(r0[i])


@inner(fastmath=FASTMATH)
def pair_add_rows(rows: Array, weights0: Array, weights1: Array, out0: Array, out1: Array) -> None:
    """`add_rows` of all columns (d) of rows (n d) with weights (n) to out0 and to out1 (d); each row is read once."""
    step = weights0.size // 4
    for r in range(step):
        r0, r1, r2, r3 = rows[r], rows[r + step], rows[r + 2 * step], rows[r + 3 * step]
        a0, a1, a2, a3 = weights0[r], weights0[r + step], weights0[r + 2 * step], weights0[r + 3 * step]
        b0, b1, b2, b3 = weights1[r], weights1[r + step], weights1[r + 2 * step], weights1[r + 3 * step]
        for i in range(out0.size):
            v0, v1, v2, v3 = widen(r0[i]), widen(r1[i]), widen(r2[i]), widen(r3[i])
            out0[i] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
            out1[i] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
    add_rows(rows[4 * step :], 0, weights0[4 * step :], out0)
    add_rows(rows[4 * step :], 0, weights1[4 * step :], out1)


@register_jitable
def exp(x: Any) -> Any:
    """e^x of float32 x ≤ 88 to 5 units in the last place; unlike the function of the C library it can be vectorized."""
    # Argument reduction and polynomial of Cephes (Moshier 1989).
    x = max(x, np.float32(-87.0))  # below it the result would not be a normal number
    # e^x = 2^n e^r with |r| <= log(2) / 2. The first part of log(2) has few bits, so its product with n is exact.
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    # 2^n is the float32 whose exponent bits are n + 127.
    return p * np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)).view(np.float32)


@register_jitable
def activate(x: Any, kind: int) -> Any:
    """Activation of a float32, by its number in `records`."""
    if kind == 0:  # none
        return x
    if kind == RELU:
        return max(x, np.float32(0))
    if kind == RELU2:
        return max(x, np.float32(0)) * max(x, np.float32(0))
    if kind == GELU:
        return np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    z = x
    if kind == GELU_TANH:  # x (1 + tanh(z/2)) / 2 is x times the logistic function of z; the factor is 2 sqrt(2 / pi)
        z = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exp(min(-z, np.float32(88))))  # SiLU is x times the logistic function of x


@inner(fastmath=FASTMATH)
def normalize(x: Array, norm: Any, out: Array) -> None:
    """Norm of x (d), written to `out` (d), which may be x."""
    d = x.size
    if norm.kind == NONE:
        for i in range(d):
            out[i] = x[i]
        return
    mean = np.float32(0)  # RMSNorm subtracts none
    if norm.kind == LAYER:
        total = 0.0
        for i in range(d):
            total += x[i]
        mean = np.float32(total / d)
    squares = 0.0
    for i in range(d):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1 / math.sqrt(squares / d + norm.epsilon))
    weight = array(norm.weight, d)
    for i in range(d):
        out[i] = (x[i] - mean) * scale * weight[i]
    if norm.bias:
        bias = array(norm.bias, d)
        for i in range(d):
            out[i] += bias[i]


@inner(fastmath=FASTMATH)
def apply_activation(matrix: Any, first: int, last: int, y: Array, out: Array) -> None:
    """Writes outputs `first` to `last` - 1 of a linear layer to `out` (n): its products with scale, bias, activation.

    `y` has the products of n rows, and if the layer is gated those of n gates behind them. It is changed.
    """
    n = out.size
    for half in range(1 + matrix.gated):
        part = y[half * n : (half + 1) * n]
        if matrix.scale:
            scale = array(matrix.scale + FLOAT_BYTES * half * n, n)
            for r in range(first, last):
                part[r] *= scale[r]
        if matrix.bias:
            bias = array(matrix.bias + FLOAT_BYTES * half * n, n)
            for r in range(first, last):
                part[r] += bias[r]
    activated = n * matrix.gated  # place in y of the first product that is activated: of a gate, if there are any
    for r in range(first, last):
        out[r] = activate(y[r + activated], matrix.activation)
    if matrix.gated:
        for r in range(first, last):
            out[r] *= y[r]


@inner(fastmath=FASTMATH)
def linear(matrix: Any, x: Array, weight_type: Array, out: Array, team: Team) -> None:
    """Computes the output (b n) of a linear layer and its activation from x (b d); this thread does some of the tasks.

    The n outputs are divided into quarters, and a task computes the same places in each of them, because `four_dots`
    reads four rows at once. If the layer is gated they are divided into halves, and the four rows are those of two
    outputs and of their gates. The weights have the type of `weight_type`.
    """
    batch, n = out.shape
    gated = matrix.gated  # 1, else 0: the number of gates of an output
    n_parts = 2 if gated else 4
    part_len = n // n_parts
    # The four rows that `four_dots` reads are r, r + near, r + far, r + near + far.
    near = part_len
    far = n if gated else 2 * part_len
    weight = array(matrix.weight, (n + gated * n, x.shape[1]), weight_type.dtype)
    y = np.empty(len(weight), np.float32)
    # Several tasks for each thread, which may be late, and none with more of a matrix than stays in its cache.
    n_cache_parts = weight.size * weight.itemsize // TASK_BYTES
    n_tasks = max(1, min(part_len, max(4 * team.size, n_cache_parts)))
    task = take(team, n_tasks)
    while task >= 0:
        first, last = task * part_len // n_tasks, (task + 1) * part_len // n_tasks
        for b in range(batch):
            for r in range(first, last):
                y[r], y[r + near], y[r + far], y[r + near + far] = four_dots(weight, r, near, far, x[b])
            for part in range(n_parts):
                apply_activation(matrix, part * part_len + first, part * part_len + last, y, out[b])
            if task == 0:
                # Up to three outputs are in no quarter, or one is in no half: each alone, with its gate if any.
                done = n_parts * part_len
                for r in range(done, n):
                    y[r], _, y[r + gated * n], _ = four_dots(weight, r, 0, gated * n, x[b])
                apply_activation(matrix, done, n, y, out[b])
        finish(team)
        task = take(team, n_tasks)
