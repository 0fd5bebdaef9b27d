import pytest
import torch
from oracles.transformer_xl import sinusoid

from xlcli.model.position.xl import RotationTables, rotate_query
from xlcli.ops.context import AttentionContext
from xlcli.ops.scoring import distance_scores, shifted
from xlcli.ops.span import Span

CASES = [(1, 0), (1, 9), (5, 0), (5, 3), (4, 9)]


def by_the_double_loop(q, weight, t, m, n_features):
    """(q + v)·(W_R R_distance) for each pair; zero for keys in the future."""
    out = torch.zeros(*q.shape[:3], t + m, dtype=q.dtype)
    for i in range(t):
        for j in range(t + m):
            if (distance := i + m - j) >= 0:
                r = torch.einsum("hef,f->he", weight, sinusoid(distance, n_features).to(q.dtype))
                out[:, :, i, j] = torch.einsum("bhe,he->bh", q[:, :, i], r)
    return out


@pytest.mark.parametrize(("t", "m"), CASES)
def test_rotation_equals_the_double_loop(t, m):
    n_features = 6
    q, weight = torch.randn(2, 3, t, 4, dtype=torch.float64), torch.randn(3, 4, n_features, dtype=torch.float64)
    context = AttentionContext(Span("uniform", mem_len=99, segment_len=8), n_memory=m, n_new=t, keep=0, device=q.device)
    tables = RotationTables.make(context.positions, n_features, q.dtype)
    scores = rotate_query(q @ weight, tables) @ tables.keys.mT
    causal = context.positions.distance >= 0
    expected = by_the_double_loop(q, weight, t, m, n_features)
    assert torch.allclose(scores * causal, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("t", "m"), CASES)
def test_relative_shift_equals_the_double_loop(t, m):
    n_features = 6
    q, weight = torch.randn(2, 3, t, 4, dtype=torch.float64), torch.randn(3, 4, n_features, dtype=torch.float64)
    table = torch.stack([sinusoid(d, n_features).double() for d in range(t + m - 1, -1, -1)])
    scores = shifted(distance_scores(q, torch.einsum("hef,sf->hse", weight, table), t + m))
    causal = torch.arange(t)[:, None] + m >= torch.arange(t + m)
    assert torch.allclose(scores * causal, by_the_double_loop(q, weight, t, m, n_features), rtol=0, atol=1e-12)


def test_the_identity_holds_in_float32_at_long_range():
    n_features, t, m = 32, 8, 20_000
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(1, 2, t, n_features, generator=generator)
    context = AttentionContext(Span("uniform", mem_len=m, segment_len=8), n_memory=m, n_new=t, keep=0, device=c.device)

    def scores(dtype):
        tables = RotationTables.make(context.positions, n_features, dtype)
        return rotate_query(c.to(dtype), tables) @ tables.keys.mT

    assert (scores(torch.float32) - scores(torch.float64)).abs().max() < 2e-5
