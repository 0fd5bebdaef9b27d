"""Records that the kernels of `kernels/decode.py` read, and the numbers in them. Imports no Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RELU, RELU2, GELU, GELU_TANH, SILU = range(1, 6)
ACTIVATIONS = {
    "relu": RELU, "relu2": RELU2, "gelu": GELU, "gelu-tanh": GELU_TANH, "geglu": GELU,
    "geglu-tanh": GELU_TANH, "swiglu": SILU,
}  # fmt: skip
"""Feed-forward kind to activation; 0: none."""
NONE, RMS, LAYER = range(3)  # norms
HALF, INTERLEAVED = 1, 2
ROPE_LAYOUTS = {"half": HALF, "interleaved": INTERLEAVED}  # pairs f and f + e/2, or 2f and 2f + 1; 0: no rotation


def record(integers: str = "", floats: str = "", **parts: np.dtype[Any]) -> np.dtype[Any]:
    """Type of a record of int64 and float32 numbers and of other records."""
    fields: list[tuple[str, Any]] = list(parts.items())
    fields += [(name, np.int64) for name in integers.split()]
    fields += [(name, np.float32) for name in floats.split()]
    return np.dtype(fields, align=True)


def pack(kind: np.dtype[Any], /, **values: Any) -> tuple[Any, ...]:
    """A record as a tuple of its fields, in their order; `values` has each of them."""
    names = kind.names
    assert names is not None
    assert len(values) == len(names)
    return tuple(map(values.__getitem__, names))


# Integers named after arrays are their addresses, 0: none. Arrays are float32 except for weights, keys and values.
MATRIX = record("weight scale bias activation gated")
"""Linear layer: weight (n d), scale of each row (n), bias (n), and activation.

If `gated` (1, else 0) there are 2n rows, and the first n outputs are multiplied by the activated others.
"""
NORM = record("kind weight bias", "epsilon")  # norm with weight (d), bias (d), and an addition to the mean square
RESIDUAL = record(floats="alpha", before=NORM, after=NORM, stream=NORM)
"""Norms before and after a branch and of the stream after it, and a factor on the output of the branch."""
HALF_LEN, RANK = 128, 32  # distances in half a block of compressed position keys, and numbers that stand for them
BLOCK_LEN = 2 * HALF_LEN
ATTENTION = record("n_heads n_kv_heads head_dim n_features n_projected content position relative rope rotary_dim",
                   "scale", qkv=MATRIX, output=MATRIX, query_norm=NORM, key_norm=NORM)  # fmt: skip
"""Attention branch of h heads of queries and g heads of keys and values, of width e: matrices ((h+2g)e d) and (d he),
norms of each query and key, layout of rotary pairs in the first r = `rotary_dim` features, and a factor on the scores.
Transformer-XL: f features, biases u = `content` and v = `position` (h e), and their part of W_R = `relative` (h f e),
sine half first. The keys of other features, if any, are projected and compressed: then p = `n_projected` is e, else 0.
"""
BLOCK = record("width vectors parallel", "stream_scale input_scale", attention=ATTENTION, attention_residual=RESIDUAL,
               up=MATRIX, down=MATRIX, feed_forward_residual=RESIDUAL)  # fmt: skip
"""Block: feed-forward branch down(up(x)) of this width, token vectors (v d), factors on stream and stack input.

If `parallel` (1, else 0) both branches read the input of the block.
"""
HEAD = record("size", norm=NORM, matrix=MATRIX)  # last norm, and logits of `size` symbols
CACHE = record("keys values key_scales value_scales sink_keys sink_values capacity row start stop "
               "n_distances n_blocks clamp_len full_len position_keys position_blocks basis bias sin cos turns "
               "n_sinks sink_counts sink_sin sink_cos", "far_bias")  # fmt: skip
"""Memory of a block for one token: buffers of keys and values (b g capacity row) and, if they are int8, of their scales
(b g capacity). The query attends to rows `start` to `stop`, whose last one is written by the call.

Tables by position relative to the query, whose last column belongs to the query itself: position keys (f n_distances)
of Transformer-XL, cosines, then sines, for distances up to `clamp_len`, which is that of all keys further back;
additions (h n_distances) to the scores. The products with projected position keys are, for each half of a block, those
with `position_blocks` (h n_blocks p 2 * `RANK`), the far half first, times `basis` (`RANK` `HALF_LEN`).
`sin` and `cos` (b r/2) belong to the rotary angles of the queries. Rows of `turns` (n r), sines, then cosines, rotate a
key by its distance beyond `clamp_len`; 0: no key is further back. `far_bias` is added to scores beyond `full_len`.

A query rotated by the angles of the sinks (b r/2) also attends to the first ones of their keys and values
(b g n_sinks e), `sink_counts` (b, int64) of them. All are 0 if no query of the batch sees any.
"""
CALL = record("n_blocks blocks caches tokens x x0 reach batch dim n_threads", head=HEAD)
"""Arguments of `decode_token`: `BLOCK` and `CACHE` of each block, tokens (b) in int64, inputs (b d) of the first block
and of the stack, the number of threads, and a head, of size 0 if there is none.

`reach` (b, int64) is the number of remembered tokens that each query may attend to, the latest ones; 0: all.
"""
