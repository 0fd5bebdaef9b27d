"""Blocks of a Transformer for one new token of each sequence, on all CPU threads: a kernel compiled by Numba.

Decoding reads every weight and the whole memory for one token, so its floor is the memory bandwidth. PyTorch multiplies
a single row by a matrix on one thread, and starts some forty operations per block; here a token is one parallel loop,
in which every thread follows all blocks. `model/decoder.py` packs the arrays; the slow twin is the modules of `model/`.

A block has six steps: queries, keys and values; heads; attention; output; and the two matrices of the feed-forward
branch. A step is cut into tasks. A thread takes tasks until none is left, waits until all are done, and goes on to the
next step. Norms and residual sums are so short that every thread computes them for itself. Each step writes to memory
of its own, so a late thread, which finds all tasks done, reads the same numbers as the others.

Weights are float32, bfloat16 (their bits as uint16), float16 (as int16) or int8 with a scale for each row; keys and
values are float32, bfloat16 or int8 with a scale for each head and token. Sums are in float32. No result depends on the
number of threads, nor on the other sequences of a batch.

Compiled kernels are kept until a file of this package or `ops/layers.py`, whose constants they contain, changes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from xlcli.kernels.attention import N_STATISTICS, attend, count_keys, count_parts, merge_chunks, prepare
from xlcli.kernels.compiler import numba, register_jitable
from xlcli.kernels.files import KernelFiles
from xlcli.kernels.linear import linear, normalize
from xlcli.kernels.records import BLOCK, CACHE, CALL, Array, pack
from xlcli.kernels.threads import COUNTERS, FASTMATH, Team, array, compiled, inner, next_step
from xlcli.ops import layers

PROCESS = os.getpid()  # process that may call `decode`
LOCK = threading.Lock()
N_STEPS = 6  # number of steps of a block


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
def add_inputs(call: Any, block: Any, x: Array, x0: Array) -> None:
    """Turns the stream x (b d) into the input of a block, in place; x0 (b d) is the input of the stack."""
    batch, d = x.shape
    for b in range(batch):
        for j in range(d):
            x[b, j] = block.stream_scale * x[b, j] + block.input_scale * x0[b, j]
        if block.vectors:
            token = array(call.tokens, batch, np.int64)[b]
            vector = array(block.vectors + token * d * x.itemsize, d)
            for j in range(d):
                x[b, j] += vector[j]


@inner(fastmath=FASTMATH)
def follow(call: Any, weight_type: Array, memory_type: Array, space: Any, counters: Any, out: Array) -> None:
    """Computes the part of one thread in `decode_token`: its tasks of each block, one step after the other.

    The results of steps are in memory that all threads share and divide in the same way, `floats_of_block` numbers for
    each sequence and block: `space` is its address, and moves on. The stream x is a copy of each thread.
    """
    batch, d = call.batch, call.dim
    x, x0 = array(call.x, (batch, d)).copy(), array(call.x0, (batch, d))
    blocks, caches = array(call.blocks, call.n_blocks, BLOCK), array(call.caches, call.n_blocks, CACHE)
    team = Team(call.n_threads, counters)
    for i in range(call.n_blocks):
        block, cache = blocks[i], caches[i]
        attention = block.attention
        h, g, e = attention.n_heads, attention.n_kv_heads, attention.head_dim
        add_inputs(call, block, x, x0)

        # With `parallel` the feed-forward branch reads the x that attention reads, and later changes.
        attention_input = normalize_all(x, block.attention_residual.before)
        up_input = normalize_all(x, block.feed_forward_residual.before) if block.parallel else attention_input

        # The attention branch: places for the results of its steps, one behind the other, then the steps.
        qkv = array(space, (batch, (h + 2 * g) * e))
        queries = array(space + qkv.nbytes, (batch, h, e + attention.n_features + attention.n_projected))
        most_chunks = count_parts(attention, cache, cache.stop - cache.start)
        parts = array(space + qkv.nbytes + queries.nbytes, (batch, most_chunks, h, e + N_STATISTICS))
        space += qkv.nbytes + queries.nbytes + parts.nbytes
        linear(attention.qkv, attention_input, weight_type, qkv, team)
        team = next_step(team)
        prepare(attention, cache, memory_type, qkv, queries, team)
        team = next_step(team)
        attend(call, attention, cache, memory_type, queries, parts, team)
        team = next_step(team)
        attended = np.empty((batch, h * e), np.float32)
        for b in range(batch):
            merge_chunks(parts[b, : count_parts(attention, cache, count_keys(call, cache, b))], attended[b])
        y = array(space, (batch, d))
        linear(attention.output, attended, weight_type, y, team)
        team = next_step(team)
        add_branch(x, y, block.attention_residual)

        # The feed-forward branch. A late thread may still read y, so `up` gets a place of its own.
        if not block.parallel:
            up_input = normalize_all(x, block.feed_forward_residual.before)
        up = array(space + y.nbytes, (batch, block.width))
        space += y.nbytes + up.nbytes
        linear(block.up, up_input, weight_type, up, team)
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


@register_jitable
def floats_of_block(call: Any, block: Any, cache: Any) -> int:
    """Number of results of the steps of a block, for each sequence: all that `follow` takes from `space`."""
    attention = block.attention
    h, g, e = attention.n_heads, attention.n_kv_heads, attention.head_dim
    of_query = e + attention.n_features + attention.n_projected
    most_chunks = count_parts(attention, cache, cache.stop - cache.start)
    of_attention = (h + 2 * g) * e + h * of_query + most_chunks * h * (e + N_STATISTICS)
    of_outputs = 2 * call.dim
    return of_attention + of_outputs + block.width  # type: ignore[no-any-return]


@compiled(parallel={"prange": True, "numpy": False, "setitem": False, "reduction": False, "fusion": False})
def decode_token(calls: Array, weight_type: Array, memory_type: Array) -> Array:
    """Runs blocks, and a head if there is one, on a new token of each sequence, and adds the token to the memories.

    `calls` is `CALL` (1); the other arguments are empty arrays of the type of all weights of matrices, and of all keys
    and values. Returns logits (b v), or without head the output (b d) of the last block.
    """
    call = calls[0]
    blocks, caches = array(call.blocks, call.n_blocks, BLOCK), array(call.caches, call.n_blocks, CACHE)
    n_floats = 0
    for i in range(call.n_blocks):
        n_floats += floats_of_block(call, blocks[i], caches[i])
    space = np.empty(call.batch * n_floats, np.float32)
    counters = np.zeros((call.n_blocks * N_STEPS + 1) * COUNTERS, np.uint8)
    out = np.empty((call.batch, call.head.size or call.dim), np.float32)
    for _ in numba.prange(call.n_threads):
        follow(calls[0], weight_type, memory_type, np.int64(space.ctypes.data), np.int64(counters.ctypes.data), out)
    return out


def decode(call: Mapping[str, Any], n_threads: int, weight_type: Array, memory_type: Array) -> Array:
    """Result of `decode_token` for the fields of `CALL` other than `n_threads`, on at most `n_threads` threads.

    Not for a process that was forked from `PROCESS`: OpenMP ends one that uses its threads there.
    """
    calls = np.array([pack(CALL, **call, n_threads=use_threads(n_threads))], CALL)
    one_at_a_time = numba.threading_layer() == "workqueue"  # type: ignore[attr-defined]
    with LOCK if one_at_a_time else nullcontext():
        return decode_token(calls, weight_type, memory_type)


def use_threads(n: int) -> int:
    """Sets the number of CPU threads, at most as many as the machine has; returns it."""
    n = min(n, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(n)
    return n


def _program(signature: tuple[Any, ...]) -> str:
    """Python program that compiles `decode_token` for arguments of these types and writes its files."""
    weight_type, memory_type = (str(array.dtype) for array in signature[1:])
    arguments = f"np.empty(1, decode.CALL), np.empty(0, {weight_type!r}), np.empty(0, {memory_type!r})"
    return f"import numpy as np; from xlcli.kernels import decode; decode.FILES.compile_here({arguments})"


FILES = KernelFiles(decode_token, _program, [layers.__file__])


def is_compiled(weight_type: Array, memory_type: Array) -> bool:
    """True if `decode_token` is compiled for weights and memories of these types, here or in a file."""
    return FILES.has(np.empty(1, CALL), weight_type, memory_type)


def compile_kernel(weight_type: Array, memory_type: Array, stop: Callable[[], bool]) -> str | None:
    """Compiles `decode_token` for such weights and memories, unless `stop` becomes true; returns why it is not kept."""
    return FILES.compile(np.empty(1, CALL), weight_type, memory_type, stop=stop)
