import pytest
import torch

from xlcli.ops import attend_blocks
from xlcli.ops.attend import attend, attend_plain
from xlcli.ops.attend_blocks import Band, BandAttention, attend_band
from xlcli.ops.context import Mask, VisibleKeys
from xlcli.ops.positions import Positions
from xlcli.ops.scoring import ScoreTerm, Scoring

CALLS = [(1, 0, None), (9, 0, None), (13, 20, None), (2, 7, 7), (13, 20, 20), (13, 5, 20), (13, 20, 3), (13, 2, 0)]
SIZES = [(4, 2**20, 2**25), (4, 1, 2**25), (4, 480, 0), (256, 2**20, 2**25), (256, 2**20, 0)]


@pytest.fixture(autouse=True, params=SIZES)
def sizes(request, monkeypatch):
    """Queries of a block, scores at once, and saved bytes: weights of several parts and of one, saved and not."""
    for name, size in zip(("BLOCK", "PART_BYTES", "SAVED_BYTES"), request.param, strict=True):
        monkeypatch.setattr(attend_blocks, name, size)


def tensors(t, m, dtype=torch.float64, n_kv_heads=3):
    generator = torch.Generator().manual_seed(t * 100 + m)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    # Heads are interleaved in memory, as a projection writes them.
    q, query = (draw(2, t, 3, width).transpose(1, 2).requires_grad_() for width in (6, 10))
    k, v = (draw(2, n_kv_heads, t + m, width).requires_grad_() for width in (6, 8))
    return q, k, v, query, draw(t + m, 10)


def mask_of(t, m, max_distance):
    positions = Positions(n_memory=m, n_new=t, first=m, offsets=None, device=torch.device("cpu"))
    return Mask(positions, max_distance)


def test_queries_are_divided_into_blocks():
    """The sizes of the fixture take effect."""
    (q, k, *_), band = tensors(13, 20), Band(20, None)
    parts = list(attend_blocks.parts(q, k, band, attend_blocks.PART_BYTES // q.element_size()))
    assert {part.new.stop - part.new.start for part in parts} == ({4, 1} if attend_blocks.BLOCK == 4 else {13})


def close(found, expected, leaves, atol):
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = (torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves) for y in (found, expected))
    pairs = [(found, expected), *zip(*gradients, strict=True)]
    return all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in pairs)


def attend_training(q, k, v, band, *, scale, term=None):
    return attend_band(q, k, v, band, None if term is None else ScoreTerm(*term), scale)


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize("with_term", [False, True])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_equals_the_plain_kernel_with_gradients(t, m, max_distance, with_term, n_kv_heads):
    q, k, v, query, key = tensors(t, m, n_kv_heads=n_kv_heads)
    bias = torch.einsum("bhtf,sf->bhts", query, key) * 0.3 if with_term else None
    expected = attend_plain(q, k, v, visible=mask_of(t, m, max_distance), scale=0.3, bias=bias)
    found = attend_training(q, k, v, Band(m, max_distance), scale=0.3, term=(query, key) if with_term else None)
    assert close(found, expected, (q, k, v, *([query] if with_term else [])), 1e-12)


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize(("t", "m", "max_distance"), CALLS)
def test_keys_of_earlier_documents_are_hidden(t, m, max_distance, n_kv_heads):
    q, k, v, query, key = tensors(t, m, n_kv_heads=n_kv_heads)
    positions = Positions(n_memory=m, n_new=t, first=m, offsets=None, device=torch.device("cpu"))
    reach = torch.stack((torch.arange(t) % 4, torch.arange(t) + m // 2))
    mask = Mask(positions, max_distance, reach)
    expected = attend(q, k, v, VisibleKeys(mask.visible), Scoring(0.3, term=ScoreTerm(query, key)))
    assert close(attend_training(q, k, v, mask.band, scale=0.3, term=(query, key)), expected, (q, k, v, query), 1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.05)])
def test_number_types_of_training(dtype, atol):
    q, k, v, query, key = tensors(13, 20, dtype)
    found = attend_training(q, k, v, Band(20, None), scale=0.3, term=(query, key))
    assert found.dtype == dtype
    scores = torch.einsum("bhtf,sf->bhts", query, key) * 0.3
    assert close(found, attend_plain(q, k, v, visible=mask_of(13, 20, None), scale=0.3, bias=scores), (q, k, v), atol)


def test_later_tokens_change_no_bit():
    q, k, v, *term = (x.detach() for x in tensors(13, 20, torch.float32))
    before = attend_training(q, k, v, Band(20, None), scale=0.3, term=tuple(term))
    for i in range(12):
        others = [x.clone() for x in (q, k, v)]
        for x, first in zip(others, (i + 1, i + 21, i + 21), strict=True):
            x[:, :, first:] = 1e3
        after = attend_training(*others, Band(20, None), scale=0.3, term=tuple(term))
        assert torch.equal(before[:, :, : i + 1], after[:, :, : i + 1])


@pytest.mark.parametrize("reach", [None, torch.arange(9)[None].expand(2, 9) % 4])
def test_attend_takes_it_for_the_mask_of_a_call(monkeypatch, reach):
    q, k, v, query, key = tensors(9, 4)
    positions = Positions(n_memory=4, n_new=9, first=4, offsets=None, device=torch.device("cpu"))
    calls = []
    apply = BandAttention.apply
    monkeypatch.setattr(BandAttention, "apply", lambda *given: calls.append(given) or apply(*given))
    mask = Mask(positions, 9, reach)
    found = attend(q, k, v, mask, Scoring(0.3, term=ScoreTerm(query, key)))
    expected = attend(q, k, v, VisibleKeys(mask.visible), Scoring(0.3, term=ScoreTerm(query, key)))
    assert len(calls) == 1
    assert close(found, expected, (q, k, v, query), 1e-12)
