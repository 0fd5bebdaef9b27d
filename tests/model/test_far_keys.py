"""Keys further back than in training: with less weight, the same wherever a text is cut, and still in use."""

import math

import pytest
import torch
from variants import VOCAB, make, read, tokens

from xlcli.ops.span import FAR_BIAS, Span

NAMES = [
    "full-none-0-pre-0", "full-xl-0-pre-0", "full-xl-2-pre-0", "full-rope-1-pre-0", "full-alibi-0-pre-0",
    "full-shaw-0-pre-0", "full-learned-0-pre-0", "full-t5-0-sandwich-2", "local-xl-0-pre-0",
    "full-contextual-2-0-pre-0",
]  # fmt: skip


def far(name, full_len=4):
    model = make(name)
    model.full_len = full_len
    return model


def test_all_far_keys_weigh_no_more_for_being_many():
    for span, longest in (
        (Span("uniform", 64, 8, full_len=16), 64),
        (Span("growing", 64, 9, full_len=16), 72),
        (Span("segment", 0, 33, full_len=16), 32),
    ):
        assert span.far_bias == pytest.approx(FAR_BIAS - math.log(longest / 16))
    assert Span("uniform", 64, 8).far_bias == 0
    assert Span("uniform", 9, 8, full_len=16).far_bias == FAR_BIAS


@pytest.mark.parametrize("name", NAMES)
def test_invariants(name):
    full_len = 9 if "xl-2" in name else 4  # 9 is also where these distances are clamped
    model, text = far(name, full_len), tokens(1, 50)
    with torch.inference_mode():
        whole, _ = read(model, text, [49], mem_len=20)
        for cuts, length in (([1], 30), ([7], 49), ([16, 3], 49)):
            cut, _ = read(model, text[:, : length + 1], cuts, mem_len=20)
            assert torch.allclose(cut, whole[:, :length], rtol=0, atol=1e-9)
        changed = text.clone()
        changed[:, 31:] = (changed[:, 31:] + 1) % VOCAB
        assert torch.equal(read(model, changed, [49], mem_len=20)[0][:, :30], whole[:, :30])
    assert (read(make(name), text, [49], mem_len=20)[0] - whole).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.allclose(read(model, text, [49], mem_len=20)[0], whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["full-xl-0-pre-0", "full-rope-0-pre-0"])
def test_a_far_token_changes_the_prediction(name):
    model, text = far(name), tokens(1, 80)
    with torch.inference_mode():
        last = lambda t: model.logits(t, model.init_state(1, mem_len=20, segment_len=13))[0]  # noqa: E731
        before = last(text)
        for distance, is_seen in ((20, True), (model.receptive_field(20) + 1, False)):
            changed = text.clone()
            changed[0, 79 - distance] = (changed[0, 79 - distance] + 1) % VOCAB
            assert torch.equal(last(changed), before) != is_seen
