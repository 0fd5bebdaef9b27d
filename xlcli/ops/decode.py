"""One block of a Transformer for one new token of each sequence, on all CPU threads: kernels compiled by Numba.

Decoding reads every weight and the whole memory for one token, so its floor is the memory bandwidth. PyTorch multiplies
a single row by a matrix on one thread, and starts some forty operations per block; here a block is six parallel loops.
`model/decoder.py` packs the arrays; the modules of `model/` are the slow twin.

Weights are float32, bfloat16 (their bits as uint16) or int8 with a scale for each row; so are keys and values, with a
scale for each head and token. Sums are in float32. No result depends on the number of threads, and that of a sequence
not on the others of its batch.

All of it is one file, because Numba's cache of compiled functions notices changes of the file of `block_step` only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numba import njit, prange
from numba.extending import overload, register_jitable
from numpy.typing import NDArray

from xlcli.ops.quantize import MAX_INT, MIN_SCALE

CHUNK = 512
"""Number of keys whose softmax is computed at once by one thread; chunks are then merged. Shorter ones read slower."""
PARTS = 4
"""Number of parts of a matrix for each thread."""
PROCESS = os.getpid()
"""Process that may call the kernels: OpenMP ends a process that was forked from one that uses its threads."""
NORM_EPS = 1e-5
"""Epsilon of every norm."""
FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vectors; infinite and undefined values stay."""

Array = NDArray[Any]
RELU, RELU2, GELU, SILU = range(4)
ACTIVATIONS = {"relu": RELU, "relu2": RELU2, "gelu": GELU, "geglu": GELU, "swiglu": SILU}
"""Feed-forward kind to activation."""
NONE, RMS, LAYER = range(3)
"""Norms."""
NO_VECTOR: Array = np.empty(0, np.float32)
NO_VECTORS: Array = np.empty((0, 0), np.float32)
NO_RELATIVE = NO_SCALES = np.empty((0, 0, 0), np.float32)

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that Python calls."""
    return cast("Callable[[Kernel], Kernel]", njit(nogil=True, error_model="numpy", **options))


def inner(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that only compiled functions call: compiled without the wrappers for other callers."""
    return compiled(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


class Matrix(NamedTuple):
    """Linear layer: weight (n d), scale of each row (n; n = 0: all 1), and bias (n; n = 0: none)."""

    weight: Array
    scale: Array
    bias: Array


class Norm(NamedTuple):
    """Norm of `kind` with weight (d) and bias (d, or 0: none)."""

    kind: int
    weight: Array
    bias: Array


class Residual(NamedTuple):
    """Norms before and after a branch and of the stream after it, and a factor on the output of the branch."""

    before: Norm
    after: Norm
    stream: Norm
    alpha: float


class Heads(NamedTuple):
    """Attention of h heads of width e; f is 0 without a Transformer-XL term.

    Attributes:
        content: Bias u (h e) of the queries for the content, or (0 0).
        position: Bias v (h e) of the queries for the position, or (0 0).
        relative: W_R (h f e), sine half first, or (h 0 e).
        query_norm: Weight (e) of the RMSNorm of each query, or (0).
        key_norm: Weight (e) of the RMSNorm of each key, or (0).
        scale: Factor on the scores.
        rope: 0 none, 1 pairs f and f + e/2, 2 pairs 2f and 2f + 1.
    """

    content: Array
    position: Array
    relative: Array
    query_norm: Array
    key_norm: Array
    scale: float
    rope: int


class Attention(NamedTuple):
    """Attention branch: queries, keys and values (3he d), heads, and output (d he)."""

    qkv: Matrix
    heads: Heads
    output: Matrix


class FeedForward(NamedTuple):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) if `gated`, with the gate rows after those of `up`."""

    up: Matrix
    down: Matrix
    activation: int
    gated: bool


class Cache(NamedTuple):
    """Buffers of keys and values (b h c e) and, if they are int8, of their scales (b h c; else of size 0).

    The query attends to rows `start` to `stop`, whose last one is written by the call.
    """

    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array
    start: int
    stop: int


class Distances(NamedTuple):
    """Tables by position relative to the query, whose last row is that of the query itself.

    Attributes:
        keys: Position keys (s f) of Transformer-XL: cosines, then sines; or (0 0).
        bias: Addition (h s) to the scores; or (0 0).
        sin: Sine (b e/2) of the rotary angles of the queries; or (0 0).
        cos: Cosine (b e/2) of the rotary angles of the queries; or (0 0).
    """

    keys: Array
    bias: Array
    sin: Array
    cos: Array


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
                row[i] = np.uint16(bits >> np.uint32(16))

        return to_bfloat16
    if row.dtype == numba.int8:

        def to_int8(row: Any, values: Any, scales: Any, at: Any) -> Any:
            largest = np.float32(0)
            for i in range(values.size):
                largest = max(largest, abs(values[i]))
            scale = max(largest / np.float32(MAX_INT), np.float32(MIN_SCALE))
            scales[at] = scale
            for i in range(values.size):
                row[i] = np.int8(np.rint(values[i] / scale))

        return to_int8

    def to_float32(row: Any, values: Any, scales: Any, at: Any) -> Any:
        for i in range(values.size):
            row[i] = values[i]

    return to_float32


@inner(fastmath=FASTMATH)
def dot(weights: Array, x: Array) -> Any:
    """Inner product of weights (d) and x (d)."""
    total = np.float32(0)
    for i in range(x.size):
        total += widen(weights[i]) * x[i]
    return total


@inner(fastmath=FASTMATH)
def add_dots(rows: Array, first: int, x: Array, out: Array) -> None:
    """Adds to `out` (n) the inner products of x (d) and n rows from `first` on: four at a time, which share x."""
    n, d = out.size, x.size
    for s in range(0, n - 3, 4):
        r0, r1, r2, r3 = rows[first + s], rows[first + s + 1], rows[first + s + 2], rows[first + s + 3]
        t0 = t1 = t2 = t3 = np.float32(0)
        for i in range(d):
            t0 += widen(r0[i]) * x[i]
            t1 += widen(r1[i]) * x[i]
            t2 += widen(r2[i]) * x[i]
            t3 += widen(r3[i]) * x[i]
        out[s] += t0
        out[s + 1] += t1
        out[s + 2] += t2
        out[s + 3] += t3
    for s in range(n - n % 4, n):
        out[s] += dot(rows[first + s], x)


@register_jitable
def exp(x: Any) -> Any:
    """e^x of float32 x ≤ 88 to one unit in the last place; unlike that of the C library it can be vectorized.

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
    if kind == RELU:
        return max(x, np.float32(0))
    if kind == RELU2:
        return max(x, np.float32(0)) * max(x, np.float32(0))
    if kind == GELU:
        return np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476))
    return x / (np.float32(1) + exp(min(-x, np.float32(88))))


@inner()
def normalize(x: Array, norm: Norm, out: Array) -> None:
    """Norm of x (d), written to `out` (d), which may be x."""
    d = x.size
    mean = np.float32(0)
    if norm.kind == LAYER:
        total = 0.0
        for i in range(d):
            total += x[i]
        mean = np.float32(total / d)
    if norm.kind == NONE:
        for i in range(d):
            out[i] = x[i]
        return
    squares = 0.0
    for i in range(d):
        squares += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1 / math.sqrt(squares / d + NORM_EPS))
    for i in range(d):
        out[i] = (x[i] - mean) * scale * norm.weight[i]
    for i in range(norm.bias.size):
        out[i] += norm.bias[i]


@register_jitable
def row_product(matrix: Matrix, r: int, x: Array) -> Any:
    """Output r of a linear layer for input x (d)."""
    y = dot(matrix.weight[r], x)
    if matrix.scale.size:
        y *= matrix.scale[r]
    if matrix.bias.size:
        y += matrix.bias[r]
    return y


@inner(parallel=True, fastmath=FASTMATH)
def linear(matrix: Matrix, x: Array, n_parts: int) -> Array:
    """Linear layer (b n) of x (b d)."""
    weight, scale, bias = matrix  # parallel loops take arrays only
    n = weight.shape[0]
    out = np.empty((x.shape[0], n), np.float32)
    for part in prange(n_parts):
        for r in range(part * n // n_parts, (part + 1) * n // n_parts):
            for b in range(x.shape[0]):
                out[b, r] = row_product(Matrix(weight, scale, bias), r, x[b])
    return out


@register_jitable
def rotate(x: Array, sin: Array, cos: Array, kind: int) -> None:
    """Rotation of a query or key (e), in place."""
    half = x.size // 2
    for f in range(half):
        i, j = (f, f + half) if kind == 1 else (2 * f, 2 * f + 1)
        a, b = x[i], x[j]
        x[i] = a * cos[f] - b * sin[f]
        x[j] = b * cos[f] + a * sin[f]


@inner(fastmath=FASTMATH)
def prepare_head(heads: Heads, distances: Distances, cache: Cache, qkv: Array, b: int, h: int, query: Array) -> None:
    """Writes key and value of the new token, and the query (e + f) with the one for position keys behind it."""
    width = qkv.shape[1] // 3
    e = width // cache.keys.shape[1]
    f = query.size - e
    q = qkv[b, h * e : (h + 1) * e]
    k = qkv[b, width + h * e : width + (h + 1) * e]
    v = qkv[b, 2 * width + h * e : 2 * width + (h + 1) * e]
    if heads.query_norm.size:
        normalize(q, Norm(RMS, heads.query_norm, heads.query_norm[:0]), q)
        normalize(k, Norm(RMS, heads.key_norm, heads.key_norm[:0]), k)
    if heads.rope:
        rotate(q, distances.sin[b], distances.cos[b], heads.rope)
        rotate(k, distances.sin[b], distances.cos[b], heads.rope)
    last = cache.stop - 1
    store_row(cache.keys[b, h, last], k, cache.key_scales, (b, h, last))
    store_row(cache.values[b, h, last], v, cache.value_scales, (b, h, last))
    for i in range(e):
        query[i] = q[i]
    if f:
        biased = np.empty(e, np.float32)
        for i in range(e):
            query[i] += heads.content[h, i]
            biased[i] = q[i] + heads.position[h, i]
        # The query is at position 0, with sine 0 and cosine 1: q̃ = [b ; -a] (`ops/xl.py`).
        for i in range(f // 2):
            query[e + i] = dot(heads.relative[h, f // 2 + i], biased)
            query[e + f // 2 + i] = -dot(heads.relative[h, i], biased)


@inner(fastmath=FASTMATH)
def attend_chunk(
    heads: Heads, distances: Distances, cache: Cache, b: int, h: int, first: int, query: Array, out: Array
) -> None:
    """Softmax-weighted sum of the values of one chunk of keys: (e), then its largest score and its sum of weights."""
    e = out.size - 2
    length = cache.stop - cache.start
    n = min(CHUNK, length - first)
    keys, values = cache.keys[b, h], cache.values[b, h]
    row = cache.start + first
    scores = np.zeros(n, np.float32)
    add_dots(keys, row, query[:e], scores)
    if cache.key_scales.size:
        for s in range(n):
            scores[s] *= cache.key_scales[b, h, row + s]
    if distances.keys.size:
        add_dots(distances.keys, distances.keys.shape[0] - length + first, query[e:], scores)
    for s in range(n):
        scores[s] *= np.float32(heads.scale)
    if distances.bias.size:
        before = distances.bias.shape[1] - length + first
        for s in range(n):
            scores[s] += distances.bias[h, before + s]
    largest = np.float32(-3e38)
    for s in range(n):
        largest = max(largest, scores[s])
    total = np.float32(0)
    for s in range(n):
        scores[s] = exp(scores[s] - largest)
        total += scores[s]
    if cache.value_scales.size:
        for s in range(n):
            scores[s] *= cache.value_scales[b, h, row + s]
    out[:e] = 0
    for s in range(0, n - 3, 4):
        w0, w1, w2, w3 = scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
        v0, v1, v2, v3 = values[row + s], values[row + s + 1], values[row + s + 2], values[row + s + 3]
        for i in range(e):
            out[i] += w0 * widen(v0[i]) + w1 * widen(v1[i]) + w2 * widen(v2[i]) + w3 * widen(v3[i])
    for s in range(n - n % 4, n):
        w0, v0 = scores[s], values[row + s]
        for i in range(e):
            out[i] += w0 * widen(v0[i])
    out[e], out[e + 1] = largest, total


@inner(fastmath=FASTMATH)
def merge_chunks(parts: Array, out: Array) -> None:
    """Softmax-weighted sum (e) of all chunks, from the results (c e+2) of `attend_chunk`."""
    e = out.size
    largest = np.float32(-3e38)
    for c in range(parts.shape[0]):
        largest = max(largest, parts[c, e])
    total = np.float32(0)
    out[:] = 0
    for c in range(parts.shape[0]):
        weight = exp(parts[c, e] - largest)
        total += weight * parts[c, e + 1]
        for i in range(e):
            out[i] += weight * parts[c, i]
    for i in range(e):
        out[i] /= total


@inner(parallel=True)
def attend(heads: Heads, distances: Distances, cache: Cache, qkv: Array) -> Array:
    """Attention output (b he) of one token of each sequence, with queries, keys and values (b 3he)."""
    # Parallel loops take arrays and numbers only.
    content, position, relative, query_norm, key_norm, scale, rope = heads
    position_keys, bias, sin, cos = distances
    keys, values, key_scales, value_scales, start, stop = cache
    (batch, n_heads), f = keys.shape[:2], position_keys.shape[1]
    e = qkv.shape[1] // 3 // n_heads  # rows of keys may be longer, for alignment
    n_chunks = (stop - start + CHUNK - 1) // CHUNK
    queries = np.empty((batch, n_heads, e + f), np.float32)
    parts = np.empty((batch, n_heads, n_chunks, e + 2), np.float32)
    out = np.empty((batch, n_heads * e), np.float32)
    for i in prange(batch * n_heads):
        b, h = i // n_heads, i % n_heads
        own_heads = Heads(content, position, relative, query_norm, key_norm, scale, rope)
        own_distances = Distances(position_keys, bias, sin, cos)
        own_cache = Cache(keys, values, key_scales, value_scales, start, stop)
        prepare_head(own_heads, own_distances, own_cache, qkv, b, h, queries[b, h])
    for i in prange(batch * n_chunks * n_heads):
        h, c = i % n_heads, i // n_heads  # heads of a chunk together: they share its position keys
        b, c = c // n_chunks, c % n_chunks
        own_heads = Heads(content, position, relative, query_norm, key_norm, scale, rope)
        own_distances = Distances(position_keys, bias, sin, cos)
        own_cache = Cache(keys, values, key_scales, value_scales, start, stop)
        attend_chunk(own_heads, own_distances, own_cache, b, h, c * CHUNK, queries[b, h], parts[b, h, c])
    for i in range(batch * n_heads):
        b, h = i // n_heads, i % n_heads
        merge_chunks(parts[b, h], out[b, h * e : (h + 1) * e])
    return out


@register_jitable
def before_branch(x: Array, residual: Residual) -> Array:
    """Input (b d) of a branch."""
    normal = np.empty_like(x)
    for b in range(x.shape[0]):
        normalize(x[b], residual.before, normal[b])
    return normal


@register_jitable
def after_branch(x: Array, y: Array, residual: Residual) -> None:
    """Adds the output y (b d) of a branch to the stream x (b d), in place."""
    for b in range(x.shape[0]):
        normalize(y[b], residual.after, y[b])
        for i in range(x.shape[1]):
            x[b, i] += np.float32(residual.alpha) * y[b, i]
        normalize(x[b], residual.stream, x[b])


@inner(parallel=True, fastmath=FASTMATH)
def feed_forward(network: FeedForward, x: Array, n_parts: int) -> Array:
    """Feed-forward branch (b d) of x (b d)."""
    (weight, scale, bias), down, activation, gated = network  # parallel loops take arrays and numbers only
    n = down.weight.shape[1]
    inner = np.empty((x.shape[0], n), np.float32)
    for part in prange(n_parts):
        for r in range(part * n // n_parts, (part + 1) * n // n_parts):
            for b in range(x.shape[0]):
                up = row_product(Matrix(weight, scale, bias), r, x[b])
                if gated:
                    inner[b, r] = activate(row_product(Matrix(weight, scale, bias), n + r, x[b]), activation) * up
                else:
                    inner[b, r] = activate(up, activation)
    return linear(down, inner, n_parts)


@compiled(cache=True)
def block_step(
    x: Array,
    attention: Attention,
    attention_residual: Residual,
    network: FeedForward,
    network_residual: Residual,
    cache: Cache,
    distances: Distances,
    n_parts: int,
) -> None:
    """One block for one new token of each sequence: x (b d), in place; writes key and value of the token to `cache`."""
    qkv = linear(attention.qkv, before_branch(x, attention_residual), n_parts)
    y = linear(attention.output, attend(attention.heads, distances, cache, qkv), n_parts)
    after_branch(x, y, attention_residual)
    y = feed_forward(network, before_branch(x, network_residual), n_parts)
    after_branch(x, y, network_residual)


@compiled(cache=True)
def predict(x: Array, norm: Norm, head: Matrix, n_parts: int) -> Array:
    """Logits (b v) of the outputs x (b d) of the last block."""
    normal = np.empty_like(x)
    for b in range(x.shape[0]):
        normalize(x[b], norm, normal[b])
    return linear(head, normal, n_parts)


def use_threads(n: int) -> int:
    """Sets the number of CPU threads, at most that of the machine; returns the number of parts of parallel loops."""
    n = min(n, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(n)
    return PARTS * n


def is_compiled() -> bool:
    """Whether the cache of Numba holds a compiled `block_step`, for whichever types."""
    folder = block_step.stats.cache_path  # type: ignore[attr-defined]
    return any(Path(folder).glob("decode.block_step-*.nbi"))
