"""Kernels of attention: keys and values of the new token in memory, and softmax over chunks of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xlcli.kernels.compiler import numba, overload, register_jitable
from xlcli.kernels.linear import add_rows, dots, exp, normalize, pair_add_rows, pair_dots, widen
from xlcli.kernels.records import BLOCK_LEN, HALF, HALF_LEN, RANK, Array
from xlcli.kernels.threads import FASTMATH, Team, array, finish, inner, take
from xlcli.ops.layers import MAX_INT, MAX_SCALE, MIN_SCALE

CHUNK = 512  # typical number of scores whose softmax is computed at once by one thread; chunks are then merged
LARGEST, TOTAL, N_STATISTICS = 0, 1, 2  # behind the summed values (e) of a chunk: largest score, sum of weights
LOWEST = np.float32(-3e38)  # start of a search for the largest score
BFLOAT16_NAN = np.uint16(0x7FC0)  # bits of an undefined bfloat16


def store_row(row: Any, values: Any, scales: Any, at: Any) -> Any:
    """Writes float32 values (e) to a row of a buffer, rounded to its type, and its scale to `scales[at]`."""
    raise NotImplementedError  # compiled code only


@overload(store_row)
def _store_row(row: Any, values: Any, scales: Any, at: Any) -> Any:
    if row.dtype == numba.uint16:

        def to_bfloat16(row: Any, values: Any, scales: Any, at: Any) -> Any:
            for i in range(values.size):
                # The upper 16 bits, rounded to nearest, half to even.
                bits = np.float32(values[i]).view(np.uint32)
                bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
                is_number = values[i] == values[i]
                row[i] = np.uint16(bits >> np.uint32(16)) if is_number else BFLOAT16_NAN

        return to_bfloat16
    if row.dtype == numba.int8:

        def to_int8(row: Any, values: Any, scales: Any, at: Any) -> Any:
            # As `ops.layers.quantize`; an undefined number makes the whole row undefined.
            largest = np.float32(0)
            is_number = True
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
def rotated_dots(rows: Array, x: Array, turns: Array, first: int, layout: int, out: Array) -> None:
    """Writes the inner products of x (e) and rows (n e), which are rotated, to `out` (n).

    Row r is rotated by `turns[first - r]` (r), the sines and then the cosines of its pairs of features.
    """
    n_pairs = turns.shape[1] // 2
    for r in range(out.size):
        row, turn = rows[r], turns[first - r]
        total = np.float32(0)
        for f in range(n_pairs):
            i, j = (f, f + n_pairs) if layout == HALF else (2 * f, 2 * f + 1)  # the features of a pair
            a, b = widen(row[i]), widen(row[j])
            sin, cos = turn[f], turn[n_pairs + f]
            total += cos * (x[i] * a + x[j] * b) + sin * (x[j] * a - x[i] * b)
        # Features that are not rotated.
        for f in range(2 * n_pairs, x.size):
            total += x[f] * widen(row[f])
        out[r] = total


@register_jitable
def rotate(x: Array, sin: Array, cos: Array, kind: int) -> None:
    """Rotation of the first r features of a query or key (e) by angles (r/2), in place."""
    half = sin.size
    for f in range(half):
        i, j = (f, f + half) if kind == HALF else (2 * f, 2 * f + 1)
        a, b = x[i], x[j]
        x[i] = a * cos[f] - b * sin[f]
        x[j] = b * cos[f] + a * sin[f]


class Buffers(NamedTuple):
    """Keys and values (b g c row), and their scales (b g c), which exist for int8 only."""

    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array


@register_jitable
def buffers(n_kv_heads: int, cache: Any, batch: int, memory_type: Array) -> Buffers:
    shape = (batch, n_kv_heads, cache.capacity)
    keys = array(cache.keys, (batch, n_kv_heads, cache.capacity, cache.row), memory_type.dtype)
    values = array(cache.values, (batch, n_kv_heads, cache.capacity, cache.row), memory_type.dtype)
    return Buffers(keys, values, array(cache.key_scales, shape), array(cache.value_scales, shape))


@inner(fastmath=FASTMATH)
def prepare(attention: Any, cache: Any, memory_type: Array, qkv: Array, queries: Array, team: Team) -> None:
    """Writes new keys and values to the memories, and what keys are multiplied by to `queries` (b h e+f+p)."""
    batch, h, g, e = len(qkv), attention.n_heads, attention.n_kv_heads, attention.head_dim
    memory = buffers(g, cache, batch, memory_type)
    new_row = cache.stop - 1
    task = take(team, batch * g)
    while task >= 0:
        # A task is head j of keys and values of sequence b, with the heads i of queries that share it.
        b, j = task // g, task % g
        # A row of qkv has the h heads of queries, then the g heads of keys, then those of values.
        k = qkv[b, (h + j) * e : (h + j + 1) * e]
        v = qkv[b, (h + g + j) * e : (h + g + j + 1) * e]
        normalize_and_rotate(k, attention.key_norm, attention, cache, b)
        store_row(memory.keys[b, j, new_row], k, memory.key_scales, (b, j, new_row))
        store_row(memory.values[b, j, new_row], v, memory.value_scales, (b, j, new_row))
        for i in range(j * h // g, (j + 1) * h // g):
            q = qkv[b, i * e : (i + 1) * e]
            normalize_and_rotate(q, attention.query_norm, attention, cache, b)
            prepare_query(attention, i, q, queries[b, i])
        finish(team)
        task = take(team, batch * g)


@register_jitable
def normalize_and_rotate(x: Array, norm: Any, attention: Any, cache: Any, b: int) -> None:
    """Changes a query or key (e) of sequence b in place: its norm, then, with rotary positions, its rotation."""
    normalize(x, norm, x)
    if attention.rope:
        shape = (b + 1, attention.rotary_dim // 2)
        rotate(x, array(cache.sin, shape)[b], array(cache.cos, shape)[b], attention.rope)


@inner(fastmath=FASTMATH)
def prepare_query(attention: Any, h: int, q: Array, query: Array) -> None:
    """Writes what the keys of head h are multiplied by to `query` (e+f+p), from the query q (e), which it changes.

    Behind the query for the keys (e) follow, with Transformer-XL, that for position keys which all heads share (f), and
    that for projected position keys (p = e, or 0 if there are none).
    """
    e, f = attention.head_dim, attention.n_features
    for i in range(e):
        query[i] = q[i]
    if not f:
        return
    # The formula is in `model/position/xl.py`: the keys are multiplied by q + u, the position keys by q + v.
    u = array(attention.content, (attention.n_heads, e))[h]
    v = array(attention.position, (attention.n_heads, e))[h]
    for i in range(e):
        query[i] += u[i]
        q[i] += v[i]
    # [a ; b] = W_Rᵀ(q + v). The query is at position 0, with sine 0 and cosine 1, so what is there becomes [b ; -a].
    a_and_b = np.empty(f, np.float32)
    dots(array(attention.relative, (attention.n_heads, f, e))[h], q, a_and_b)
    half = f // 2
    for i in range(half):
        query[e + i] = a_and_b[half + i]
        query[e + half + i] = -a_and_b[i]
    for i in range(attention.n_projected):
        query[e + f + i] = q[i]


@register_jitable
def count_keys(call: Any, cache: Any, b: int) -> int:
    n_keys = cache.stop - cache.start
    if call.reach:
        n_keys = min(n_keys, array(call.reach, call.batch, np.int64)[b] + 1)
    return n_keys  # type: ignore[no-any-return]


@register_jitable
def count_parts(attention: Any, cache: Any, n_keys: int) -> int:
    """Number of results for a head: of chunks of its keys, and of sinks."""
    n_scores = n_keys * (attention.n_heads // attention.n_kv_heads)
    return max(1, (n_scores + CHUNK // 2) // CHUNK) + (cache.n_sinks > 0)  # type: ignore[no-any-return]


@register_jitable
def start_of_chunk(cache: Any, n_keys: int, c: int, n_chunks: int) -> int:
    """Number of the first key of chunk c; all keys are before chunk `n_chunks`.

    Chunks are as equal as possible: of 5 keys in 2 chunks, the first one has keys 0 and 1, the second 2 to 4. A chunk
    begins with a block of position keys, if there are blocks, because a divided block costs as much as two.
    """
    start = c * n_keys // n_chunks
    if cache.position_blocks and 0 < c < n_chunks:
        start -= (start - n_keys) % BLOCK_LEN  # blocks are counted from the query back
    return start


@inner(fastmath=FASTMATH)
def attend(call: Any, attention: Any, cache: Any, memory_type: Array, queries: Array, parts: Array, team: Team) -> None:
    """Computes attention to each chunk of keys, and to sinks: writes results of `attend_chunk` to `parts` (b c h e+2).

    A task is chunk c of the keys of head j of sequence b. Heads of a chunk follow each other, because they share its
    position keys. Sequences with fewer keys than others have fewer chunks; behind the last one come the sinks, if any.
    """
    batch, most_chunks, n_heads = parts.shape[:3]
    g, n_shared = attention.n_kv_heads, n_heads // attention.n_kv_heads
    memory = buffers(g, cache, batch, memory_type)
    n_tasks = batch * most_chunks * g
    task = take(team, n_tasks)
    while task >= 0:
        j, place = task % g, task // g
        b, c = place // most_chunks, place % most_chunks
        n_keys = count_keys(call, cache, b)
        n_chunks = count_parts(attention, cache, n_keys) - (cache.n_sinks > 0)
        heads = slice(j * n_shared, (j + 1) * n_shared)  # of queries that share the keys
        if c == n_chunks and cache.n_sinks:
            attend_sinks(attention, cache, b, j, queries[b, heads], parts[b, c, heads])
        if c < n_chunks:
            first, last = start_of_chunk(cache, n_keys, c, n_chunks), start_of_chunk(cache, n_keys, c + 1, n_chunks)
            attend_chunk(attention, cache, memory, n_keys, b, j, first, last, queries[b, heads], parts[b, c, heads])
        finish(team)
        task = take(team, n_tasks)


@inner(fastmath=FASTMATH)
def attend_chunk(
    attention: Any,
    cache: Any,
    memory: Buffers,
    n_keys: int,
    b: int,
    j: int,
    first: int,
    last: int,
    queries: Array,
    out: Array,
) -> None:
    """Computes the attention of the queries of a head to a chunk of its keys, to be merged with that to other chunks.

    The chunk has keys `first` to `last` - 1 of the `n_keys` latest ones of head j of sequence b. Keys count from the
    oldest one, number 0; the last one, number `n_keys` - 1, is that of the query. For each of the n `queries` that
    share the head, `out` (n e+2) gets the values (e) summed with softmax weights, which are relative to the largest
    score of the chunk, then that score, then the sum of the weights.
    """
    e, n, n_queries = attention.head_dim, last - first, len(queries)
    rows = slice(cache.stop - n_keys + first, cache.stop - n_keys + last)
    keys, values = memory.keys[b, j, rows], memory.values[b, j, rows]
    scores = np.empty((n_queries, n), np.float32)

    # Keys further back than clamp_len come first, and count as at this distance. With rotary positions they are stored
    # as rotated by their own, so they are turned back: the first one by so many positions, the next one by one less.
    turn_of_first = n_keys - 1 - cache.clamp_len - first
    n_far = max(0, min(n, turn_of_first))
    n_turned = n_far if cache.turns else 0
    if n_turned:
        turns = array(cache.turns, (turn_of_first + first + 1, attention.rotary_dim))
        for i in range(n_queries):
            rotated_dots(keys, queries[i, :e], turns, turn_of_first, attention.rope, scores[i, :n_turned])

    # Inner products with all other keys, for two queries at once where possible.
    near = keys[n_turned:]
    for i in range(1, n_queries, 2):
        pair_dots(near, queries[i - 1, :e], queries[i, :e], scores[i - 1, n_turned:], scores[i, n_turned:])
    if n_queries % 2:
        dots(near, queries[n_queries - 1, :e], scores[n_queries - 1, n_turned:])

    # Scales of int8 keys belong to the products, scales of int8 values to the weights.
    for i in range(n_queries):
        if cache.key_scales:
            multiply(scores[i], memory.key_scales[b, j, rows])
        complete_scores(attention, cache, n_keys, j * n_queries + i, first, n_far, queries[i], scores[i])
        exponentiate(scores[i], out[i])
        if cache.value_scales:
            multiply(scores[i], memory.value_scales[b, j, rows])

    # Weighted sums of the values, again for two queries at once.
    for i in range(1, n_queries, 2):
        pair_add_rows(values, scores[i - 1], scores[i], out[i - 1, :e], out[i, :e])
    if n_queries % 2:
        add_rows(values, 0, scores[n_queries - 1], out[n_queries - 1, :e])


@inner(fastmath=FASTMATH)
def attend_sinks(attention: Any, cache: Any, b: int, j: int, queries: Array, out: Array) -> None:
    """`attend_chunk` for the sinks of a head that the queries see, if any."""
    e, n_seen = attention.head_dim, array(cache.sink_counts, b + 1, np.int64)[b]
    shape = (b + 1, attention.n_kv_heads, cache.n_sinks, e)
    keys, values = array(cache.sink_keys, shape)[b, j, :n_seen], array(cache.sink_values, shape)[b, j, :n_seen]
    shape_of_angles = (b + 1, attention.rotary_dim // 2)
    sin, cos = array(cache.sink_sin, shape_of_angles)[b], array(cache.sink_cos, shape_of_angles)[b]
    scores = np.empty(n_seen, np.float32)
    for i in range(len(queries)):
        query = queries[i, :e].copy()
        rotate(query, sin, cos, attention.rope)
        dots(keys, query, scores)
        for s in range(n_seen):
            scores[s] *= attention.scale
        exponentiate(scores, out[i])
        add_rows(values, 0, scores, out[i, :e])


@inner(fastmath=FASTMATH)
def multiply(x: Array, y: Array) -> None:
    for i in range(x.size):
        x[i] *= y[i]


@inner(fastmath=FASTMATH)
def complete_scores(
    attention: Any, cache: Any, n_keys: int, h: int, first: int, n_far: int, query: Array, scores: Array
) -> None:
    """Turns inner products (n) of the query of head h into scores, in place, by position terms, scale and biases.

    The products are those of the keys from number `first` on, of which the first `n_far` are beyond `clamp_len`.
    """
    n = scores.size
    # Transformer-XL: products with the position keys; of far keys all have the product at clamp_len.
    if cache.position_keys:
        if n_far < n:
            add_position_scores(attention, cache, h, n_keys - 1 - first - n_far, query, scores[n_far:])
        if n_far:
            far = np.zeros(1, np.float32)
            add_position_scores(attention, cache, h, cache.clamp_len, query, far)
            for s in range(n_far):
                scores[s] += far[0]
    for s in range(n):
        scores[s] *= attention.scale
    if cache.bias:
        bias = array(cache.bias, (attention.n_heads, cache.n_distances))[h, cache.n_distances - n_keys + first :]
        for s in range(n):
            scores[s] += bias[s]
    n_beyond_full_len = n_keys - 1 - cache.full_len - first
    for s in range(min(n, n_beyond_full_len)):
        scores[s] += cache.far_bias


@inner(fastmath=FASTMATH)
def add_position_scores(attention: Any, cache: Any, h: int, distance: int, query: Array, out: Array) -> None:
    """Adds the products of the query (e+f+p) of head h and successive position keys to `out` (n).

    The first of these keys is that of `distance`, the next one that of `distance` - 1.
    """
    e, f, p = attention.head_dim, attention.n_features, attention.n_projected
    # Keys that all heads share: the last column is that of distance 0.
    keys = array(cache.position_keys, (f, cache.n_distances))
    add_rows(keys, cache.n_distances - 1 - distance, query[e : e + f], out)
    if not cache.position_blocks:
        return
    # Projected keys, in blocks; the last key of the last block is that of distance 0.
    blocks = array(cache.position_blocks, (attention.n_heads, cache.n_blocks, p, 2 * RANK))[h]
    basis = array(cache.basis, (RANK, HALF_LEN))
    first = cache.n_blocks * BLOCK_LEN - 1 - distance
    weights, scores = np.empty(2 * RANK, np.float32), np.empty(BLOCK_LEN, np.float32)
    done = 0
    while done < out.size:
        block, start = (first + done) // BLOCK_LEN, (first + done) % BLOCK_LEN
        score_block(blocks[block], basis, query[e + f :], weights, scores)
        n = min(BLOCK_LEN - start, out.size - done)
        for i in range(n):
            out[done + i] += scores[start + i]
        done += n


@inner(fastmath=FASTMATH)
def score_block(block: Array, basis: Array, query: Array, weights: Array, scores: Array) -> None:
    """Writes the products of a query (p) and the keys of a block to `scores` (`BLOCK_LEN`).

    The keys are compressed (`model/position/xl_tables.py`): `block` (p 2r) gives the weights with which the r rows of
    the `basis` (r `HALF_LEN`) add up to the products of each half of the block, the far half first. `weights` (2r) is
    room for them.
    """
    # Four rows are added at once, as in `add_rows`. Here the compiler knows the lengths, which halves the time.
    for i in range(2 * RANK):
        weights[i] = 0
    quarter = query.size // 4
    for r in range(quarter):
        r0, r1, r2, r3 = block[r], block[r + quarter], block[r + 2 * quarter], block[r + 3 * quarter]
        q0, q1, q2, q3 = query[r], query[r + quarter], query[r + 2 * quarter], query[r + 3 * quarter]
        for i in range(2 * RANK):
            weights[i] += q0 * r0[i] + q1 * r1[i] + q2 * r2[i] + q3 * r3[i]
    for r in range(4 * quarter, query.size):  # up to three rows are in no quarter
        for i in range(2 * RANK):
            weights[i] += query[r] * block[r, i]
    for i in range(BLOCK_LEN):
        scores[i] = 0
    far, near = weights[:RANK], weights[RANK:]
    for r in range(0, RANK, 4):  # `RANK` is a multiple of 4
        v0, v1, v2, v3 = basis[r], basis[r + 1], basis[r + 2], basis[r + 3]
        a0, a1, a2, a3 = far[r], far[r + 1], far[r + 2], far[r + 3]
        b0, b1, b2, b3 = near[r], near[r + 1], near[r + 2], near[r + 3]
        for i in range(HALF_LEN):
            scores[i] += a0 * v0[i] + a1 * v1[i] + a2 * v2[i] + a3 * v3[i]
            scores[HALF_LEN + i] += b0 * v0[i] + b1 * v1[i] + b2 * v2[i] + b3 * v3[i]


@inner(fastmath=FASTMATH)
def exponentiate(scores: Array, out: Array) -> None:
    """Replaces scores (n) by weights, relative to the largest one, in place.

    Writes zeros (e), to which the values are added later, the largest score and the sum of weights to `out` (e+2).
    """
    e = out.size - N_STATISTICS
    largest = LOWEST
    for s in range(scores.size):
        largest = max(largest, scores[s])
    total = np.float32(0)
    for s in range(scores.size):
        scores[s] = exp(scores[s] - largest)
        total += scores[s]
    for i in range(e):
        out[i] = 0
    out[e + LARGEST] = largest
    out[e + TOTAL] = total


@inner(fastmath=FASTMATH)
def merge_chunks(parts: Array, out: Array) -> None:
    """Softmax-weighted sum (h e) of all keys, from the results (c h e+2) of `attend_chunk`."""
    n_chunks, n_heads = parts.shape[:2]
    e = parts.shape[2] - N_STATISTICS
    for h in range(n_heads):
        # Weights of a chunk are relative to its own largest score; here all become relative to the largest of all.
        largest = LOWEST
        for c in range(n_chunks):
            largest = max(largest, parts[c, h, e + LARGEST])
        total = np.float32(0)
        head = out[h * e : (h + 1) * e]
        for i in range(e):
            head[i] = 0
        for c in range(n_chunks):
            weight = exp(parts[c, h, e + LARGEST] - largest)
            total += weight * parts[c, h, e + TOTAL]
            for i in range(e):
                head[i] += weight * parts[c, h, i]
        for i in range(e):
            head[i] /= total
