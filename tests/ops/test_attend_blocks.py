import pytest
import torch

from xlcli.ops import attend_blocks as module
from xlcli.ops.attend import attend, attend_plain
from xlcli.ops.attend_blocks import Band, attend_blocks
from xlcli.ops.context import AttentionContext, Mask, VisibleKeys
from xlcli.ops.positions import Positions
from xlcli.ops.scoring import Clamp, FarBias, FarKeys, ScoreTerm, Scoring, ShiftedTerm
from xlcli.ops.span import Span

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[(4, 2**19), (4, 1), (1, 60), (256, 2**19)])
def sizes(request, monkeypatch):
    """Queries of a block and scores at once: several blocks, heads one at a time and together, and one block."""
    monkeypatch.setattr(module, "BLOCK", request.param[0])
    monkeypatch.setattr(module, "SCORES", request.param[1])


def tensors(t, m, *, rows=2, width=6, features=10, dtype=torch.float64, n_kv_heads=3):
    generator = torch.Generator().manual_seed(t * 100 + m)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v = draw(rows, 3, t, width), *(draw(rows, n_kv_heads, t + m + 5, width + i) for i in (0, 2))
    # Keys and values are rows of larger buffers, as in memory.
    term = ScoreTerm(draw(rows, 3, t, features), draw(t + m, features))
    return q, k[:, :, 2 : t + m + 2], v[:, :, 3 : t + m + 3], term


def mask(t, m, max_distance):
    return Mask(Positions(n_memory=m, n_new=t, first=m, offsets=None, device=CPU), max_distance)


CALLS = [(1, 0, None), (9, 0, None), (13, 20, None), (2, 7, 7), (13, 20, 20), (13, 5, 20), (13, 20, 3), (13, 2, 0)]


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize("with_term", [False, True])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_blocks_equal_the_plain_kernel(t, m, max_distance, with_term, n_kv_heads):
    q, k, v, term = tensors(t, m, n_kv_heads=n_kv_heads)
    term = term if with_term else None
    bias = torch.einsum("bhtf,sf->bhts", *term[:2]) * 0.3 if with_term else None
    expected = attend_plain(q, k, v, visible=mask(t, m, max_distance), scale=0.3, bias=bias)
    out = attend_blocks(q, k, v, Band(m, max_distance), Scoring(0.3, term=term))
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_keys_by_distance_equal_a_bias_by_distance(t, m, max_distance, n_kv_heads):
    """Keys are there for the distances that a query sees, and for no others."""
    q, k, v, _ = tensors(t, m, n_kv_heads=n_kv_heads)
    keys = mask(t, m, max_distance)
    longest = keys.positions.farthest(max_distance)
    queries, by_distance = torch.randn_like(q), torch.randn(3, longest + 1, q.shape[3], dtype=q.dtype)
    place = (longest - keys.positions.distance).clamp(0, longest)  # the last key is that of distance 0
    bias = torch.einsum("bhte,htse->bhts", queries, by_distance[:, place]) * 0.3
    expected = attend_plain(q, k, v, visible=keys, scale=0.3, bias=bias)
    scoring = Scoring(0.3, shifted=ShiftedTerm(queries, by_distance))
    with torch.inference_mode():
        assert torch.allclose(attend(q, k, v, keys, scoring), expected, rtol=0, atol=1e-12)
    assert torch.allclose(attend(q, k, v, keys, scoring), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clamp_len", [1, 4, 11, 17, 40])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_far_keys_have_one_score_of_the_term(t, m, max_distance, clamp_len):
    """In blocks, and in the bias of the plain kernels."""
    q, k, v, term = tensors(t, m)
    keys = mask(t, m, max_distance)
    clamp = Clamp(term.queries @ torch.randn(term.keys.shape[1], 1, dtype=torch.float64), clamp_len)
    near = torch.einsum("bhtf,sf->bhts", *term[:2])
    bias = torch.where(keys.positions.distance > clamp_len, clamp.scores, near) * 0.3
    expected = attend_plain(q, k, v, visible=keys, scale=0.3, bias=bias)
    term = term._replace(clamp=clamp)
    with torch.inference_mode():
        for out in (
            attend_blocks(q, k, v, Band(m, max_distance), Scoring(0.3, term=term)),
            attend(q, k, v, keys, Scoring(0.3, term=term)),
            attend(q, k, v, VisibleKeys(keys.visible), Scoring(0.3, term=term)),
        ):
            assert torch.allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize("clamp_len", [1, 11, 40])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_far_keys_have_other_products(t, m, max_distance, clamp_len, n_kv_heads):
    (q, k, v, _), keys = tensors(t, m, n_kv_heads=n_kv_heads), mask(t, m, max_distance)
    far = FarKeys(torch.randn_like(q), torch.randn_like(k), clamp_len, keys.positions)
    difference = (far.queries @ far.keys.mT - q @ k.mT) * (keys.positions.distance > clamp_len)
    expected = attend_plain(q, k, v, visible=keys, scale=0.3, bias=difference * 0.3)
    with torch.inference_mode():
        for out in (
            attend_blocks(q, k, v, Band(m, max_distance), Scoring(0.3, far=far)),
            attend(q, k, v, keys, Scoring(0.3, far=far)),
            attend(q, k, v, VisibleKeys(keys.visible), Scoring(0.3, far=far)),
        ):
            assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    assert torch.allclose(attend(q, k, v, keys, Scoring(0.3, far=far)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("full_len", [1, 11, 40])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_far_keys_have_lower_scores(t, m, max_distance, full_len):
    (q, k, v, term), keys = tensors(t, m), mask(t, m, max_distance)
    addition = -1.5 * (keys.positions.distance > full_len)
    bias = torch.einsum("bhtf,sf->bhts", *term[:2]) * 0.3 + addition
    expected = attend_plain(q, k, v, visible=keys, scale=0.3, bias=bias)
    scoring = Scoring(0.3, term=term, far_bias=FarBias(-1.5, full_len, keys.positions))
    with torch.inference_mode():
        for out in (
            attend_blocks(q, k, v, Band(m, max_distance), scoring),
            attend(q, k, v, keys, scoring),
            attend(q, k, v, VisibleKeys(keys.visible), scoring),
        ):
            assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    assert torch.allclose(attend(q, k, v, keys, scoring), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_distance", [None, 3])
def test_later_tokens_do_not_change_a_bit(max_distance):
    q, k, v, term = tensors(13, 20, dtype=torch.float32)
    before = attend_blocks(q, k, v, Band(20, max_distance), Scoring(0.3, term=term))
    for i in range(12):
        others = [x.clone() for x in (q, k, v)]
        for x, first in zip(others, (i + 1, i + 21, i + 21), strict=True):
            x[:, :, first:] = 1e3
        after = attend_blocks(*others, Band(20, max_distance), Scoring(0.3, term=term))
        assert torch.equal(before[:, :, : i + 1], after[:, :, : i + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_may_have_another_type(dtype):
    q, k, v, _ = tensors(13, 20, dtype=torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    out = attend_blocks(q, k, v, Band(20, None), Scoring(0.3))
    assert out.dtype == torch.float32
    assert torch.allclose(out, attend_blocks(q, k.float(), v.float(), Band(20, None), Scoring(0.3)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["uniform", "growing", "segment"])
def test_attention_of_a_call_equals_that_with_its_mask(kind):
    """With every part of a score, at inference and in training."""
    t, m = 9, 6
    q, k, v, term = tensors(t, m)
    context = AttentionContext(Span(kind, 6, 15), n_memory=m, n_new=t, keep=6, device=CPU, start=m)
    bias, vectors = torch.randn(3, t, t + m, dtype=torch.float64), torch.randn(t + m, 8, dtype=torch.float64)
    for given in ({}, {"term": term}, {"bias": bias}, {"term": term, "value_bias": lambda weights: weights @ vectors}):
        expected = attend(q, k, v, VisibleKeys(context.mask.visible), Scoring(0.3, **given))
        with torch.inference_mode():
            inference = attend(q, k, v, context.mask, Scoring(0.3, **given))
        for out in (inference, attend(q, k, v, context.mask, Scoring(0.3, **given))):
            assert torch.allclose(out, expected, rtol=0, atol=1e-12)
