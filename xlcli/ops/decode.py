"""Blocks of a Transformer for one new token of each sequence, on all CPU threads: a kernel compiled by Numba.

Decoding reads every weight and the whole memory for one token, so its floor is the memory bandwidth. PyTorch multiplies
a single row by a matrix on one thread, and starts some forty operations per block; here a token is one parallel loop,
in which every thread follows all blocks. `model/decoder.py` packs the arrays; the slow twin is the modules of `model/`.

A block has six steps: queries, keys and values; heads; attention; output; and the two matrices of the feed-forward
branch. A step is cut into tasks. A thread takes tasks until none is left, waits until all are done, and goes on to the
next step. Norms and residual sums are so short that every thread computes them for itself. Each step writes to memory
of its own, so a late thread, which finds all tasks done, reads the same numbers as the others.

Weights are float32, bfloat16 (their bits as uint16) or int8 with a scale for each row; so are keys and values, with a
scale for each head and token. Sums are in float32. No result depends on the number of threads, and that of a sequence
not on the others of its batch.

All of it is one file, because compiled kernels are kept until the file of `decode_token` changes.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload, register_jitable
from numpy.typing import NDArray

from xlcli.ops.kernel_files import KernelFiles
from xlcli.ops.quantize import MAX_INT, MAX_SCALE, MIN_SCALE

CHUNK = 512
"""Typical number of keys whose softmax is computed at once by one thread; chunks are then merged."""
TASK_BYTES = 2**17
"""Typical size of the part of a matrix that a thread takes at once."""
SPINS = 2**20
"""Number of times that a waiting thread looks for the others, about 1 ms, before it lets other processes run."""
COUNTERS = 128
"""Size in bytes of the counters of a step, of tasks taken and of tasks done: two cache lines."""
PROCESS = os.getpid()
"""Process that may call the kernel: OpenMP ends a process that was forked from one that uses its threads."""
LOCK = threading.Lock()
FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vectors; infinite and undefined values stay."""

Array = NDArray[Any]
RELU, RELU2, GELU, SILU = range(1, 5)
ACTIVATIONS = {"relu": RELU, "relu2": RELU2, "gelu": GELU, "geglu": GELU, "swiglu": SILU}
"""Feed-forward kind to activation; 0: none."""
NONE, RMS, LAYER = range(3)
"""Norms."""
HALF, INTERLEAVED = 1, 2
ROPE_LAYOUTS = {"half": HALF, "interleaved": INTERLEAVED}
"""Layout of rotary pairs, features f and f + e/2 or 2f and 2f + 1, to rotation; 0: none."""
N_STEPS = 6
"""Number of steps of a block."""


def record(integers: str = "", floats: str = "", **parts: np.dtype[Any]) -> np.dtype[Any]:
    """Type of a record of int64 and float32 numbers and of other records."""
    fields = [*parts.items(), *((name, np.int64) for name in integers.split())]
    return np.dtype([*fields, *((name, np.float32) for name in floats.split())], align=True)


# Integers named after arrays are their addresses, 0: none. Arrays are float32 except for weights, keys and values.
MATRIX = record("weight scale bias activation gated")
"""Linear layer: weight (n d), scale of each row (n), bias (n), and activation.

If `gated` (1, else 0) there are 2n rows, and the first n outputs are multiplied by the activated others.
"""
NORM = record("kind weight bias", "epsilon")
"""Norm with weight (d), bias (d), and an addition to the mean square."""
RESIDUAL = record(floats="alpha", before=NORM, after=NORM, stream=NORM)
"""Norms before and after a branch and of the stream after it, and a factor on the output of the branch."""
ATTENTION = record("n_heads head_dim n_features content position relative rope", "scale",
                   qkv=MATRIX, output=MATRIX, query_norm=NORM, key_norm=NORM)  # fmt: skip
"""Attention branch of h heads of width e: matrices (3he d) and (d he), norms of each query and key, rotary pairs, and a
factor on the scores. Transformer-XL: f features, biases u = `content` and v = `position` (h e), and W_R = `relative`
(h f e), sine half first. Without `relative` the position keys are projected already, and f is e.
"""
BLOCK = record("width vectors", "stream_scale input_scale", attention=ATTENTION, attention_residual=RESIDUAL,
               up=MATRIX, down=MATRIX, feed_forward_residual=RESIDUAL)  # fmt: skip
"""Block: feed-forward branch down(up(x)) of this width, token vectors (v d), factors on stream and stack input."""
HEAD = record("size", norm=NORM, matrix=MATRIX)
"""Last norm, and logits of `size` symbols."""
CACHE = record("keys values key_scales value_scales capacity row start stop n_distances clamp_len far_len "
               "position_keys bias sin cos turns", "far_bias")  # fmt: skip
"""Memory of a block for one token: buffers of keys and values (b h capacity row) and, if they are int8, of their scales
(b h capacity). The query attends to rows `start` to `stop`, whose last one is written by the call.

Tables by position relative to the query, whose last column is that of the query itself: position keys (f n_distances)
of Transformer-XL, cosines, then sines, or projected ones (h e n_distances), for distances up to `clamp_len`, which is
that of all keys further back; additions (h n_distances) to the scores.
`sin` and `cos` (b e/2) belong to the rotary angles of the queries. Rows of `turns` (n e), sines, then cosines, rotate a
key by its distance beyond `clamp_len`; 0: no key is further back. `far_bias` is added to the scores of those beyond
`far_len`.
"""
CALL = record("n_blocks blocks caches tokens x x0 reach batch dim n_threads", head=HEAD)
"""Arguments of `decode_token`: `BLOCK` and `CACHE` of each block, tokens (b) in int64, inputs (b d) of the first block
and of the stack, the number of threads as `use_threads` returned it, and a head, of size 0 if there is none.

`reach` (b, int64) is the number of remembered tokens that each query may attend to, the latest ones; 0: all.
"""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that Python calls."""
    return cast("Callable[[Kernel], Kernel]", njit(nogil=True, error_model="numpy", **options))


def inner(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that only compiled functions call: compiled without the wrappers for other callers."""
    return compiled(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Pointer to an address."""
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], ir.IntType(8).as_pointer()
    )


@intrinsic
def add_at(typing: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at an address, in one operation for all threads; returns its value before that."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def read_at(typing: Any, address: Any) -> Any:
    """Int64 at an address, and with it everything that its writer wrote before."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), lower


sched_yield = types.ExternalFunction("sched_yield", types.int32())


@register_jitable
def array(address: int, shape: Any, dtype: Any = np.float32) -> Array:
    """Array at an address."""
    return numba.carray(pointer(address), shape, dtype)  # type: ignore[attr-defined, call-arg]


class Team(NamedTuple):
    """Threads that share the tasks of a step: their number, and the address of its counters, which are 0 at first."""

    size: int
    counters: int


@register_jitable
def next_step(team: Team) -> Team:
    """The threads at the next step."""
    return Team(team.size, team.counters + COUNTERS)


@register_jitable
def take(team: Team, n_tasks: int) -> int:
    """A task of the step for this thread alone, 0 to `n_tasks` - 1; -1 when all are done."""
    task: int = add_at(team.counters, 1)  # type: ignore[call-arg]
    if task < n_tasks:
        return task
    spins = 0
    while read_at(team.counters + COUNTERS // 2) < n_tasks:
        spins += 1
        if spins > SPINS:
            sched_yield()
    return -1


@register_jitable
def finish(team: Team) -> None:
    """Reports a task as done."""
    add_at(team.counters + COUNTERS // 2, 1)  # type: ignore[call-arg]


def widen(value: Any) -> Any:
    """Float32 value of a float32, of the bits of a bfloat16, or of an int8."""
    raise NotImplementedError  # compiled code only


@overload(widen, inline="always")
def _widen(value: Any) -> Any:
    if value == numba.uint16:

        def from_bfloat16(value: Any) -> Any:
            return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

        return from_bfloat16

    def from_number(value: Any) -> Any:
        return np.float32(value)

    return from_number


def store_row(row: Any, values: Any, scales: Any, at: Any) -> Any:
    """Writes float32 values (e) to a row of a buffer, rounded to its type, and its scale to `scales[at]`."""
    raise NotImplementedError  # compiled code only


@overload(store_row)
def _store_row(row: Any, values: Any, scales: Any, at: Any) -> Any:
    if row.dtype == numba.uint16:

        def to_bfloat16(row: Any, values: Any, scales: Any, at: Any) -> Any:
            for i in range(values.size):
                bits = np.float32(values[i]).view(np.uint32)
                bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))  # half to even
                row[i] = np.uint16(bits >> np.uint32(16)) if values[i] == values[i] else np.uint16(0x7FC0)

        return to_bfloat16
    if row.dtype == numba.int8:

        def to_int8(row: Any, values: Any, scales: Any, at: Any) -> Any:
            largest, is_number = np.float32(0), True
            for i in range(values.size):
                largest = max(largest, abs(values[i]))
                is_number &= values[i] == values[i]
            scale = min(max(largest / np.float32(MAX_INT), np.float32(MIN_SCALE)), np.float32(MAX_SCALE))
            scales[at] = scale if is_number else np.float32(np.nan)
            for i in range(values.size):
                whole = min(max(np.rint(values[i] / scale), np.float32(-MAX_INT)), np.float32(MAX_INT))
                row[i] = np.int8(whole) if is_number else np.int8(0)

        return to_int8

    def to_float32(row: Any, values: Any, scales: Any, at: Any) -> Any:
        for i in range(values.size):
            row[i] = values[i]

    return to_float32


@inner(fastmath=FASTMATH)
def four_dots(rows: Array, r: int, near: int, far: int, x: Array) -> Any:
    """Inner products of x (d) and the rows r, r + near, r + far, r + near + far of (n d).

    Reading four rows far apart is faster than one row at a time, four adjacent rows slower (measured).
    """
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
    step = out.size // 4
    for r in range(step):
        out[r], out[r + step], out[r + 2 * step], out[r + 3 * step] = four_dots(rows, r, step, 2 * step, x)
    for r in range(4 * step, out.size):
        out[r] = four_dots(rows, r, 0, 0, x)[0]


@inner(fastmath=FASTMATH)
def add_rows(rows: Array, weights: Array, out: Array) -> None:
    """Adds to `out` (d) the sum of rows (n d or longer) times weights (n)."""
    step = weights.size // 4
    for r in range(step):
        r0, r1, r2, r3 = rows[r], rows[r + step], rows[r + 2 * step], rows[r + 3 * step]
        w0, w1, w2, w3 = weights[r], weights[r + step], weights[r + 2 * step], weights[r + 3 * step]
        for i in range(out.size):
            out[i] += w0 * widen(r0[i]) + w1 * widen(r1[i]) + w2 * widen(r2[i]) + w3 * widen(r3[i])
    for r in range(4 * step, weights.size):
        r0, w0 = rows[r], weights[r]
        for i in range(out.size):
            out[i] += w0 * widen(r0[i])


@inner(fastmath=FASTMATH)
def rotated_dots(rows: Array, x: Array, turns: Array, first: int, layout: int, out: Array) -> None:
    """Inner products (n) of x (e) and rows (n e), row r rotated by `turns[first - r]` (sines, then cosines)."""
    half = x.size // 2
    for r in range(out.size):
        row, turn = rows[r], turns[first - r]
        total = np.float32(0)
        for f in range(half):
            i, j = (f, f + half) if layout == HALF else (2 * f, 2 * f + 1)
            a, b = widen(row[i]), widen(row[j])
            total += turn[half + f] * (x[i] * a + x[j] * b) + turn[f] * (x[j] * a - x[i] * b)
        out[r] = total


@register_jitable
def exp(x: Any) -> Any:
    """e^x of float32 x ≤ 88 to 5 units in the last place; unlike that of the C library it can be vectorized.

    Argument reduction and polynomial of Cephes (Moshier 1989).
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)).view(np.float32)


@register_jitable
def activate(x: Any, kind: int) -> Any:
    """Activation of a float32."""
    if kind == 0:
        return x
    if kind == RELU:
        return max(x, np.float32(0))
    if kind == RELU2:
        return max(x, np.float32(0)) * max(x, np.float32(0))
    if kind == GELU:
        return np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476))
    return x / (np.float32(1) + exp(min(-x, np.float32(88))))


@inner(fastmath=FASTMATH)
def normalize(x: Array, norm: Any, out: Array) -> None:
    """Norm of x (d), written to `out` (d), which may be x."""
    d = x.size
    if norm.kind == NONE:
        for i in range(d):
            out[i] = x[i]
        return
    mean = np.float32(0)
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
    """Outputs `first` to `last` (n) of a linear layer from its inner products y (n, or 2n if gated), in place."""
    n = out.size
    for i in range(1 + matrix.gated):
        part = y[i * n : (i + 1) * n]
        if matrix.scale:
            scale = array(matrix.scale + 4 * i * n, n)
            for r in range(first, last):
                part[r] *= scale[r]
        if matrix.bias:
            bias = array(matrix.bias + 4 * i * n, n)
            for r in range(first, last):
                part[r] += bias[r]
    for r in range(first, last):
        out[r] = activate(y[r + n * matrix.gated], matrix.activation)
    if matrix.gated:
        for r in range(first, last):
            out[r] *= y[r]


@inner(fastmath=FASTMATH)
def linear(matrix: Any, x: Array, weight_type: Array, out: Array, team: Team) -> None:
    """Linear layer with weights of the type of `weight_type`, and its activation: output (b n) of x (b d)."""
    (batch, n), d, gated = out.shape, x.shape[1], matrix.gated
    near, far = (n // 2, n) if gated else (n // 4, n // 4 * 2)
    weight = array(matrix.weight, (n + gated * n, d), weight_type.dtype)
    y = np.empty(len(weight), np.float32)
    n_tasks = max(1, min(near, max(4 * team.size, weight.size * weight.itemsize // TASK_BYTES)))
    task = take(team, n_tasks)
    while task >= 0:
        first, last = task * near // n_tasks, (task + 1) * near // n_tasks
        for b in range(batch):
            for r in range(first, last):
                y[r], y[r + near], y[r + far], y[r + near + far] = four_dots(weight, r, near, far, x[b])
            for k in range(2 if gated else 4):
                apply_activation(matrix, k * near + first, k * near + last, y, out[b])
            if task == 0:  # less than four rows remain, or less than two pairs
                done = n - n % (2 if gated else 4)
                for r in range(done, n):
                    y[r], _, y[r + gated * n], _ = four_dots(weight, r, 0, gated * n, x[b])
                apply_activation(matrix, done, n, y, out[b])
        finish(team)
        task = take(team, n_tasks)


@register_jitable
def rotate(x: Array, sin: Array, cos: Array, kind: int) -> None:
    """Rotation of a query or key (e) by angles (e/2), in place."""
    half = x.size // 2
    for f in range(half):
        i, j = (f, f + half) if kind == HALF else (2 * f, 2 * f + 1)
        a, b = x[i], x[j]
        x[i] = a * cos[f] - b * sin[f]
        x[j] = b * cos[f] + a * sin[f]


class Buffers(NamedTuple):
    """Keys and values (b h c row), and their scales (b h c), which exist for int8 only."""

    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array


@register_jitable
def buffers(n_heads: int, cache: Any, batch: int, memory_type: Array) -> Buffers:
    """Buffers of a memory of the type of `memory_type`."""
    shape = (batch, n_heads, cache.capacity)
    keys = array(cache.keys, (batch, n_heads, cache.capacity, cache.row), memory_type.dtype)
    values = array(cache.values, (batch, n_heads, cache.capacity, cache.row), memory_type.dtype)
    return Buffers(keys, values, array(cache.key_scales, shape), array(cache.value_scales, shape))


@inner(fastmath=FASTMATH)
def prepare(attention: Any, cache: Any, memory_type: Array, qkv: Array, queries: Array, team: Team) -> None:
    """Writes keys and values of the new tokens, and queries (b h e+f) with those for position keys behind them."""
    batch, n_heads, e, f = len(qkv), attention.n_heads, attention.head_dim, attention.n_features
    memory = buffers(n_heads, cache, batch, memory_type)
    last = cache.stop - 1
    angles = np.empty(f, np.float32)
    task = take(team, batch * n_heads)
    while task >= 0:
        b, h = task // n_heads, task % n_heads
        q = qkv[b, h * e : (h + 1) * e]
        k = qkv[b, (n_heads + h) * e : (n_heads + h + 1) * e]
        v = qkv[b, (2 * n_heads + h) * e : (2 * n_heads + h + 1) * e]
        query = queries[b, h]
        normalize(q, attention.query_norm, q)
        normalize(k, attention.key_norm, k)
        if attention.rope:
            sin, cos = array(cache.sin, (batch, e // 2))[b], array(cache.cos, (batch, e // 2))[b]
            rotate(q, sin, cos, attention.rope)
            rotate(k, sin, cos, attention.rope)
        store_row(memory.keys[b, h, last], k, memory.key_scales, (b, h, last))
        store_row(memory.values[b, h, last], v, memory.value_scales, (b, h, last))
        for i in range(e):
            query[i] = q[i]
        if f:
            content = array(attention.content, (n_heads, e))[h]
            position = array(attention.position, (n_heads, e))[h]
            for i in range(e):
                query[i] += content[i]
                q[i] += position[i]
            if attention.relative:
                # The query is at position 0, with sine 0 and cosine 1: q̃ = [b ; -a] (`ops/xl.py`).
                dots(array(attention.relative, (n_heads, f, e))[h], q, angles)
                for i in range(f // 2):
                    query[e + i] = angles[f // 2 + i]
                    query[e + f // 2 + i] = -angles[i]
            else:
                for i in range(e):
                    query[e + i] = q[i]
        finish(team)
        task = take(team, batch * n_heads)


@register_jitable
def count_chunks(n_keys: int) -> int:
    """Number of chunks of the keys of a head."""
    return max(1, (n_keys + CHUNK // 2) // CHUNK)


@register_jitable
def count_keys(call: Any, cache: Any, b: int) -> int:
    """Number of keys of the query of a sequence."""
    n_keys = cache.stop - cache.start
    return min(n_keys, array(call.reach, call.batch, np.int64)[b] + 1) if call.reach else n_keys  # type: ignore[no-any-return]


@inner(fastmath=FASTMATH)
def attend(call: Any, attention: Any, cache: Any, memory_type: Array, queries: Array, parts: Array, team: Team) -> None:
    """Attention to each chunk of keys: results (b h c e+2) of `attend_chunk`."""
    batch, n_heads, most_chunks = parts.shape[:3]
    memory = buffers(n_heads, cache, batch, memory_type)
    n_tasks = batch * most_chunks * n_heads
    task = take(team, n_tasks)
    while task >= 0:
        h, c = task % n_heads, task // n_heads  # heads of a chunk together: they share its position keys
        b, c = c // most_chunks, c % most_chunks
        n_keys = count_keys(call, cache, b)
        n_chunks = count_chunks(n_keys)
        if c < n_chunks:
            first, last = c * n_keys // n_chunks, (c + 1) * n_keys // n_chunks
            attend_chunk(attention, cache, memory, n_keys, b, h, first, last, queries[b, h], parts[b, h, c])
        finish(team)
        task = take(team, n_tasks)


@inner(fastmath=FASTMATH)
def attend_chunk(
    attention: Any,
    cache: Any,
    memory: Buffers,
    n_keys: int,
    b: int,
    h: int,
    first: int,
    last: int,
    query: Array,
    out: Array,
) -> None:
    """Softmax-weighted sum of the values of keys `first` to `last` of the `n_keys` latest ones.

    Output: (e), then largest score and sum of weights.
    """
    e, n = attention.head_dim, last - first
    start = cache.stop - n_keys
    rows = slice(start + first, start + last)
    scores = np.empty(n, np.float32)
    beyond = n_keys - 1 - cache.clamp_len - first
    n_far = max(0, min(n, beyond))
    n_turned = n_far if cache.turns else 0
    if n_turned:
        turns = array(cache.turns, (beyond + first + 1, e))
        rotated_dots(memory.keys[b, h, rows], query[:e], turns, beyond, attention.rope, scores[:n_turned])
    if n_turned < n:
        dots(memory.keys[b, h, rows][n_turned:], query[:e], scores[n_turned:])
    if cache.key_scales:
        scales = memory.key_scales[b, h, rows]
        for s in range(n):
            scores[s] *= scales[s]
    before = cache.n_distances - n_keys + first
    if cache.position_keys:
        tables = 1 if attention.relative else attention.n_heads
        position_keys = array(cache.position_keys, (tables, attention.n_features, cache.n_distances))
        own_keys = position_keys[h % tables]
        if n_far < n:
            add_rows(own_keys[:, before + n_far :], query[e:], scores[n_far:])
        if n_far:
            far = np.float32(0)
            for i in range(attention.n_features):
                far += own_keys[i, cache.n_distances - 1 - cache.clamp_len] * query[e + i]
            for s in range(n_far):
                scores[s] += far
    for s in range(n):
        scores[s] *= attention.scale
    if cache.bias:
        bias = array(cache.bias, (attention.n_heads, cache.n_distances))[h, before:]
        for s in range(n):
            scores[s] += bias[s]
    for s in range(min(n, n_keys - 1 - cache.far_len - first)):
        scores[s] += cache.far_bias
    largest = np.float32(-3e38)
    for s in range(n):
        largest = max(largest, scores[s])
    total = np.float32(0)
    for s in range(n):
        scores[s] = exp(scores[s] - largest)
        total += scores[s]
    if cache.value_scales:
        scales = memory.value_scales[b, h, rows]
        for s in range(n):
            scores[s] *= scales[s]
    for i in range(e):
        out[i] = 0
    add_rows(memory.values[b, h, rows], scores, out[:e])
    out[e], out[e + 1] = largest, total


@inner(fastmath=FASTMATH)
def merge_chunks(parts: Array, out: Array) -> None:
    """Softmax-weighted sum (h e) of all keys, from the results (h c e+2) of `attend_chunk`."""
    n_heads, n_chunks = parts.shape[:2]
    e = parts.shape[2] - 2
    for h in range(n_heads):
        largest = np.float32(-3e38)
        for c in range(n_chunks):
            largest = max(largest, parts[h, c, e])
        total = np.float32(0)
        head = out[h * e : (h + 1) * e]
        for i in range(e):
            head[i] = 0
        for c in range(n_chunks):
            weight = exp(parts[h, c, e] - largest)
            total += weight * parts[h, c, e + 1]
            for i in range(e):
                head[i] += weight * parts[h, c, i]
        for i in range(e):
            head[i] /= total


@inner(fastmath=FASTMATH)
def add_branch(x: Array, y: Array, residual: Any) -> None:
    """Adds the output y (b d) of a branch to the stream x (b d), in place."""
    normal = np.empty(x.shape[1], np.float32)
    for b in range(len(x)):
        normalize(y[b], residual.after, normal)
        for i in range(normal.size):
            x[b, i] += residual.alpha * normal[i]
        normalize(x[b], residual.stream, x[b])


@inner()
def normalize_all(x: Array, norm: Any) -> Array:
    """Norm of each row of x (b d)."""
    out = np.empty_like(x)
    for b in range(len(x)):
        normalize(x[b], norm, out[b])
    return out


@inner(fastmath=FASTMATH)
def follow(call: Any, weight_type: Array, memory_type: Array, space: Any, counters: Any, out: Array) -> None:
    """The part of one thread in `decode_token`; `space` is the address of memory for results of steps."""
    batch, d = call.batch, call.dim
    x, x0 = array(call.x, (batch, d)).copy(), array(call.x0, (batch, d))
    blocks, caches = array(call.blocks, call.n_blocks, BLOCK), array(call.caches, call.n_blocks, CACHE)
    team = Team(call.n_threads, counters)
    for i in range(call.n_blocks):
        block, cache = blocks[i], caches[i]
        attention = block.attention
        h, e, f = attention.n_heads, attention.head_dim, attention.n_features
        for b in range(batch):
            for j in range(d):
                x[b, j] = block.stream_scale * x[b, j] + block.input_scale * x0[b, j]
            if block.vectors:
                vector = array(block.vectors + array(call.tokens, batch, np.int64)[b] * d * x.itemsize, d)
                for j in range(d):
                    x[b, j] += vector[j]

        normal = normalize_all(x, block.attention_residual.before)
        qkv = array(space, (batch, 3 * h * e))
        queries = array(space + qkv.nbytes, (batch, h, e + f))
        most_chunks = count_chunks(cache.stop - cache.start)
        parts = array(space + qkv.nbytes + queries.nbytes, (batch, h, most_chunks, e + 2))
        space += qkv.nbytes + queries.nbytes + parts.nbytes
        linear(attention.qkv, normal, weight_type, qkv, team)
        team = next_step(team)
        prepare(attention, cache, memory_type, qkv, queries, team)
        team = next_step(team)
        attend(call, attention, cache, memory_type, queries, parts, team)
        team = next_step(team)
        attended = np.empty((batch, h * e), np.float32)
        for b in range(batch):
            merge_chunks(parts[b, :, : count_chunks(count_keys(call, cache, b))], attended[b])
        y = array(space, (batch, d))
        linear(attention.output, attended, weight_type, y, team)
        team = next_step(team)
        add_branch(x, y, block.attention_residual)

        normal = normalize_all(x, block.feed_forward_residual.before)
        up = array(space + y.nbytes, (batch, block.width))
        space += y.nbytes + up.nbytes
        linear(block.up, normal, weight_type, up, team)
        team = next_step(team)
        y = array(space, (batch, d))
        space += y.nbytes
        linear(block.down, up, weight_type, y, team)
        team = next_step(team)
        add_branch(x, y, block.feed_forward_residual)
    if call.head.size:
        linear(call.head.matrix, normalize_all(x, call.head.norm), weight_type, out, team)
    else:
        for b in range(batch):
            for j in range(d):
                out[b, j] = x[b, j]  # the same numbers from every thread


@compiled(parallel={"prange": True, "numpy": False, "setitem": False, "reduction": False, "fusion": False})
def decode_token(calls: Array, weight_type: Array, memory_type: Array) -> Array:
    """Blocks, and a head, for one new token of each sequence; writes its keys and values to the memories.

    Args:
        calls: `CALL` (1).
        weight_type: Empty array of the type of all weights of matrices.
        memory_type: Empty array of the type of all keys and values.

    Returns:
        Logits (b v), or without head the output (b d) of the last block.
    """
    call = calls[0]
    blocks, caches = array(call.blocks, call.n_blocks, BLOCK), array(call.caches, call.n_blocks, CACHE)
    size = 0
    for i in range(call.n_blocks):
        attention, h = blocks[i].attention, blocks[i].attention.n_heads
        e, f, c = attention.head_dim, attention.n_features, count_chunks(caches[i].stop - caches[i].start)
        size += h * (3 * e + e + f + c * (e + 2)) + 2 * call.dim + blocks[i].width
    space = np.empty(call.batch * size, np.float32)
    counters = np.zeros((call.n_blocks * N_STEPS + 1) * COUNTERS, np.uint8)
    out = np.empty((call.batch, call.head.size or call.dim), np.float32)
    for _ in prange(call.n_threads):
        follow(calls[0], weight_type, memory_type, np.int64(space.ctypes.data), np.int64(counters.ctypes.data), out)
    return out


def use_threads(n: int) -> int:
    """Sets the number of CPU threads, at most that of the machine; returns it."""
    n = min(n, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(n)
    return n


FILES = KernelFiles(decode_token)


def turn() -> AbstractContextManager[Any]:
    """Context of a call of `decode_token`: one at a time where the threads of Numba allow no more."""
    return LOCK if numba.threading_layer() == "workqueue" else nullcontext()  # type: ignore[attr-defined]


def is_compiled(weight_type: Array, memory_type: Array) -> bool:
    """Whether `decode_token` is compiled for weights and memories of these types, here or in a file."""
    return FILES.has(np.empty(1, CALL), weight_type, memory_type)
