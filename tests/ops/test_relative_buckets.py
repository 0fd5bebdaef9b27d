"""T5's buckets against whole-number arithmetic."""

import pytest
import torch
from oracles import positions

from xlcli.model.position.distance import relative_bucket

SIZES = [(32, 128), (8, 16), (2, 4), (5, 40), (16, 64), (7, 9), (12, 96), (64, 1024), (32, 4096)]
sizes = pytest.mark.parametrize(("n", "farthest"), SIZES)


def test_reference_has_the_borders_that_follow_from_the_paper():
    """16 * 8^(k/16) rounded up: where each logarithmic bucket of T5's 32 up to 128 begins."""
    begins = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    expected = [*range(16), *(16 + sum(d >= b for b in begins[1:]) for d in range(16, 5001))]
    assert [positions.bucket(d, 32, 128) for d in range(5001)] == expected


@sizes
def test_equals_whole_number_arithmetic(n, farthest):
    found = relative_bucket(torch.arange(5001), n_buckets=n, max_distance=farthest)
    assert found.dtype == torch.int64
    assert found.tolist() == [positions.bucket(d, n, farthest) for d in range(5001)]


@sizes
def test_every_bucket_is_reached_in_order_and_the_last_holds_all_farther(n, farthest):
    found = relative_bucket(torch.arange(5001), n_buckets=n, max_distance=farthest)
    assert found[: n // 2].tolist() == list(range(n // 2))
    assert found.unique().tolist() == list(range(n))
    assert (found.diff() >= 0).all()
    assert (found[farthest:] == n - 1).all()
    far = torch.tensor([farthest, 10**6, 2**31, 2**53 + 1, 2**62])
    assert relative_bucket(far, n_buckets=n, max_distance=farthest).tolist() == [n - 1] * 5


@pytest.mark.parametrize("k", [2, 3, 10, 25, 30, 50])
def test_borders_that_are_whole_powers_are_exact(k):
    """With 4 exact buckets, 5 others and the farthest at 4k^5 these begin at 4, 4k, 4k^2, 4k^3 and 4k^4."""
    borders = [4 * k**i for i in range(1, 5)]
    around = [border + step for border in borders for step in (-1, 0, 1)]
    expected = [4 + i + (step >= 0) for i in range(4) for step in (-1, 0, 1)]
    assert relative_bucket(torch.tensor(around), n_buckets=9, max_distance=4 * k**5).tolist() == expected
    assert [positions.bucket(d, 9, 4 * k**5) for d in around] == expected


def test_keeps_the_shape():
    distance = torch.arange(60).view(3, 4, 5)
    found = relative_bucket(distance, n_buckets=8, max_distance=16)
    assert found.shape == (3, 4, 5)
    assert found[1, 2, 3] == positions.bucket(distance[1, 2, 3].item(), 8, 16)
