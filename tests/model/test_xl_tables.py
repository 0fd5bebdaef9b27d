"""Position keys of Transformer-XL for the kernels: the scores of the paper's sum over all features."""

import pytest
import torch

from xlcli.kernels.records import BLOCK_LEN, HALF_LEN, RANK
from xlcli.model.position.xl import XLBiases, XLPosition
from xlcli.model.position.xl_tables import (
    PLACES,
    block_basis,
    low_frequencies,
    n_shared_features,
    position_blocks,
    shared_keys,
)


def position_of(n_features, n_heads, head_dim):
    position = XLPosition(n_features=n_features, biases=XLBiases(n_heads, head_dim)).requires_grad_(False)
    position.relative.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return position


@pytest.mark.parametrize(("n_features", "n_heads", "head_dim"), [
    (512, 2, 64), (1024, 2, 41), (256, 2, 32), (96, 3, 8), (12, 2, 6), (4, 1, 2),
])  # fmt: skip
@pytest.mark.parametrize("n", [1, BLOCK_LEN, 900])
def test_scores_are_the_sum_over_all_features(n_features, n_heads, head_dim, n):
    position = position_of(n_features, n_heads, head_dim)
    q = torch.randn(n_heads, head_dim, generator=torch.Generator().manual_seed(1))
    distance = torch.arange(n - 1, -1, -1, dtype=torch.float64)
    frequency = 10000.0 ** -(torch.arange(0, n_features, 2, dtype=torch.float64) / n_features)
    sinusoids = torch.cat([(distance[:, None] * frequency).sin(), (distance[:, None] * frequency).cos()], dim=-1)
    weight = position.relative.weight.double().view(n_heads, head_dim, n_features)
    expected = torch.einsum("he,hef,nf->hn", q.double(), weight, sinusoids)

    n_shared = n_shared_features(position)
    a, b = torch.einsum("he,hef->hf", q, position.relative.weight.view(weight.shape)).chunk(2, dim=-1)
    turned = torch.cat([b[:, : n_shared // 2], -a[:, : n_shared // 2]], dim=-1)
    scores = turned @ shared_keys(position, n)
    if n_shared < n_features:
        blocks = position_blocks(position, n)
        halves = blocks.unflatten(-1, (2, RANK))
        scores += torch.einsum("he,hkesr,rx->hksx", q, halves, block_basis(n_features)).flatten(1)[:, -n:]
    # The tolerance is that of a sum of so many numbers in float32.
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6 * n_features**0.5)


def test_no_key_is_compressed_if_a_head_is_as_wide():
    assert n_shared_features(position_of(64, 2, 64)) == 64


@pytest.mark.parametrize("n_features", [8, 64, 256, 512, 1024, 4096])
def test_every_low_sinusoid_is_a_combination_of_the_basis(n_features):
    angle = low_frequencies(n_features)[:, None] * PLACES
    sinusoids = torch.cat([angle.cos(), angle.sin()])
    basis = block_basis(n_features).double()
    assert basis.shape == (RANK, HALF_LEN)
    torch.testing.assert_close(sinusoids @ basis.T @ basis, sinusoids, rtol=0, atol=2e-7)


def test_the_number_of_threads_changes_nothing():
    position, before = position_of(512, 2, 64), torch.get_num_threads()
    tables = []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            block_basis.cache_clear()
            tables.append(position_blocks(position, 900))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
