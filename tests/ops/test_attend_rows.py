"""Attention of some queries of a call against the plain kernel."""

import pytest
import torch

from xlcli.ops import attend_blocks
from xlcli.ops.attend import attend, attend_plain
from xlcli.ops.attend_blocks import Band
from xlcli.ops.context import Mask
from xlcli.ops.positions import Positions
from xlcli.ops.scoring import Scoring

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    monkeypatch.setattr(attend_blocks, "BLOCK", 10)
    monkeypatch.setattr(attend_blocks, "GROUP", 3)


def tensors(t, m, dtype=torch.float64, n_kv_heads=3):
    generator = torch.Generator().manual_seed(t * 100 + m)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    return draw(2, 3, t, 6), draw(2, n_kv_heads, t + m, 6), draw(2, n_kv_heads, t + m, 8)


def some(t, share):
    needed = torch.rand(2, t, generator=torch.Generator().manual_seed(t)) < share
    needed[0, 0] = True
    return needed


@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize("saved", [2**25, 0])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
@pytest.mark.parametrize(("t", "m", "max_distance"), [(2, 0, None), (24, 20, None), (24, 20, 20), (24, 5, 3)])
def test_needed_queries_and_gradients_equal_the_plain_kernel(t, m, max_distance, share, saved, n_kv_heads, monkeypatch):
    monkeypatch.setattr(attend_blocks, "SAVED_BYTES", saved)
    given, needed = tensors(t, m, n_kv_heads=n_kv_heads), some(t, share)
    mask = Mask(Positions(n_memory=m, n_new=t, first=m, offsets=None, device=CPU), max_distance)
    made = []
    for y in (
        attend(*given, mask, Scoring(0.3), needed=needed),
        attend_plain(*given, visible=mask, scale=0.3),
    ):
        chosen = y.transpose(1, 2)[needed]
        made.append((chosen, *torch.autograd.grad(chosen.sin().sum(), given)))
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(*made, strict=True))


def test_later_tokens_and_their_need_do_not_change_a_bit():
    given, needed, band = tensors(24, 20, torch.float32), some(24, 0.6), Band(20, None)
    with torch.inference_mode():
        before = attend_blocks.attend_rows(*given, needed, band, scale=0.3).transpose(1, 2)
        for i in range(23):
            q, k, v = (x.detach().clone() for x in given)
            for x, first in ((q, i + 1), (k, i + 21), (v, i + 21)):
                x[:, :, first:] = 1e3
            changed = torch.cat((needed[:, : i + 1], ~needed[:, i + 1 :]), dim=1)
            after = attend_blocks.attend_rows(q, k, v, changed, band, scale=0.3).transpose(1, 2)
            kept = needed[:, : i + 1]
            assert torch.equal(before[:, : i + 1][kept], after[:, : i + 1][kept])
