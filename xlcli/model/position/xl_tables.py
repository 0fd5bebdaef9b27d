"""Position keys of Transformer-XL for the kernels of `kernels/decode.py`, by distance.

The position term of a head is one inner product for each distance (`model/position/xl.py`). If there are no more
features than a head has numbers, the position keys are the sinusoids, which all heads and layers share. Else they are
split by frequency. The few features of high frequency are shared as before. The others change slowly with the distance,
so what they add to the scores of `HALF_LEN` successive distances is a combination of `RANK` fixed vectors. Only the
products of these vectors and the keys projected by W_R are kept for each layer: a quarter of the projected keys
themselves, which a token would read from RAM. The scores are those of all features to the rounding of float32.
"""

from __future__ import annotations

import functools

import torch
from einops import rearrange
from torch import Tensor

from xlcli.kernels.records import BLOCK_LEN, HALF_LEN, RANK
from xlcli.model.position.xl import XLPosition
from xlcli.ops.positions import frequencies

CPU = torch.device("cpu")
PLACES = torch.arange(HALF_LEN, dtype=torch.float64) - (HALF_LEN - 1) / 2  # places in half a block, from its middle
HIGHEST_COMPRESSED = 0.4
"""Largest frequency, in radians per token, of a feature whose keys are compressed.

Sinusoids up to ω need about `HALF_LEN` ω / π vectors, and a dozen more for the ends of the stretch (Slepian 1978).
"""
NEGLIGIBLE = 1e-9  # norm of a part of a sinusoid that is left out


def n_shared_features(position: XLPosition) -> int:
    """Number of features whose position keys all heads share, sines and cosines; the keys of others are compressed."""
    head_dim = position.biases.content.shape[1]
    if position.n_features <= head_dim:
        return position.n_features
    return position.n_features - 2 * len(low_frequencies(position.n_features))


@functools.cache
def low_frequencies(n_features: int) -> Tensor:
    """The frequencies up to `HIGHEST_COMPRESSED`, which are the last ones, in float64."""
    series = frequencies(n_features, CPU)
    return series[series <= HIGHEST_COMPRESSED]


def shared_keys(position: XLPosition, n: int) -> Tensor:
    """Shared position keys (f n) of distances n - 1 to 0."""
    angle = torch.arange(1 - n, 1)[:, None] * frequencies(position.n_features, CPU)[: n_shared_features(position) // 2]
    return torch.cat((angle.cos().float(), angle.sin().float()), dim=-1).T


@functools.cache
def block_basis(n_features: int) -> Tensor:
    """Orthonormal vectors (`RANK` `HALF_LEN`) that combine to the sinusoids of low frequency in half a block.

    Each vector is what the earlier ones leave of the sinusoid that they fit worst. The sums do not depend on the number
    of threads, as a decomposition by PyTorch would.
    """
    angle = low_frequencies(n_features)[:, None] * PLACES
    rest = torch.cat([angle.cos(), angle.sin()])
    basis = torch.zeros(RANK, HALF_LEN, dtype=torch.float64)
    for i in range(RANK):
        norm, worst = rest.square().sum(-1).sqrt().max(dim=0)
        if norm < NEGLIGIBLE:
            break
        vector = rest[worst]
        vector = vector - ((basis * vector).sum(-1, keepdim=True) * basis).sum(0)  # else rounding would remain
        basis[i] = vector / vector.square().sum().sqrt()
        rest = rest - (rest * basis[i]).sum(-1, keepdim=True) * basis[i]
    return basis.float()


def position_blocks(position: XLPosition, n: int) -> Tensor:
    """Products (h n_blocks e 2r) of projected position keys and `block_basis`, for n distances or more.

    A block has the products of its two halves side by side. The last one has distances `BLOCK_LEN` - 1 to 0.
    """
    frequency = low_frequencies(position.n_features)
    basis = block_basis(position.n_features).double()
    n_halves = 2 * -(-n // BLOCK_LEN)  # of whole blocks
    middle = HALF_LEN * torch.arange(n_halves - 1, -1, -1) + (HALF_LEN - 1) / 2  # distance of the middle of each half
    # Place p of a half with the middle m is at distance m - p, and of each frequency f it has the features
    #     sin(f (m - p)) = sin(f m) cos(f p) - cos(f m) sin(f p)
    #     cos(f (m - p)) = cos(f m) cos(f p) + sin(f m) sin(f p)
    # The factors with p are the same in all halves, so the basis is multiplied by them once.
    angle_of_place = PLACES[:, None] * frequency  # (p f)
    basis_sin, basis_cos = basis @ angle_of_place.sin(), basis @ angle_of_place.cos()  # (r f)
    angle_of_middle = middle[:, None, None] * frequency  # (halves 1 f)
    sin_middle, cos_middle = angle_of_middle.sin(), angle_of_middle.cos()
    sines = sin_middle * basis_cos - cos_middle * basis_sin
    cosines = cos_middle * basis_cos + sin_middle * basis_sin
    sinusoids = torch.cat([sines, cosines], dim=-1).float()  # (halves r f)
    # W_R of the low frequencies, which are the last ones of its sine half, which comes first, and of its cosine half.
    weight = rearrange(position.relative.weight, "o (half f) -> o half f", half=2)[..., -len(frequency) :]
    products = weight.flatten(1) @ sinusoids.flatten(0, 1).T
    return rearrange(products, "(h e) (k half r) -> h k e (half r)", h=position.n_heads, half=2, r=RANK)
