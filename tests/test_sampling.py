import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xlcli.config import GenerateConfig
from xlcli.errors import CheckpointError, StateError
from xlcli.sampling import (
    REPETITION_WINDOW,
    SampleRNG,
    StreamingDetokenizer,
    apply_repetition_penalty,
    apply_temperature,
    draw,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    sample_tokens,
)

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0], [3.0, 1.0, 0.0, -5.0, 2.9]])


def kept(logits):
    return [[i for i, value in enumerate(row) if value > -math.inf] for row in logits.tolist()]


def test_top_k_keeps_exactly_k_even_with_ties():
    assert [len(row) for row in kept(filter_top_k(LOGITS, 1))] == [1, 1]
    assert kept(filter_top_k(LOGITS, 2)) == [[1, 3], [0, 4]]
    assert torch.equal(filter_top_k(LOGITS, 0), LOGITS)
    assert torch.equal(filter_top_k(LOGITS, 9), LOGITS)


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p(values, p):
    weights = torch.tensor([values], dtype=torch.float64).softmax(-1)[0].tolist()
    left = kept(filter_top_p(torch.tensor([values], dtype=torch.float64), p))[0]
    inside = sum(weights[i] for i in left)
    assert inside >= p - 1e-9
    assert inside - min(weights[i] for i in left) < p + 1e-9
    assert min(weights[i] for i in left) >= max((w for i, w in enumerate(weights) if i not in left), default=0.0)


def test_min_p_is_a_share_of_the_likeliest():
    weights = LOGITS.softmax(-1)
    left = kept(filter_min_p(LOGITS, 0.2))
    assert left == [[i for i, w in enumerate(row) if w >= 0.2 * max(row)] for row in weights.tolist()]
    assert torch.equal(filter_min_p(LOGITS, 0.0), LOGITS)


def test_penalty_lowers_repeated_tokens_whatever_their_sign():
    out = apply_repetition_penalty(LOGITS, [[1, 2, 2], []], 2.0)
    assert out.tolist() == [[0.5, 1.0, -2.0, 2.0, 0.0], LOGITS[1].tolist()]
    assert apply_repetition_penalty(LOGITS, [[1], [1]], 1.0) is LOGITS


def test_tiny_temperatures_do_not_overflow():
    assert apply_temperature(LOGITS, 1e-38).softmax(-1)[1].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_draw_inverts_the_distribution():
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()[None].expand(8, -1)
    levels = torch.tensor([0.0, 0.49, 0.501, 0.74, 0.76, 0.99, 1 - 2**-53, 0.25], dtype=torch.float64)
    assert draw(logits, levels).tolist() == [0, 0, 2, 2, 3, 3, 3, 0]


def test_samples_follow_the_probabilities():
    logits = LOGITS[:1]
    dice = [SampleRNG.of(3)]
    options = GenerateConfig(temperature=1.0)
    counts = torch.zeros(5)
    for _ in range(3000):
        counts[sample_tokens(logits, dice, options)[0]] += 1
    assert torch.allclose(counts / 3000, logits.softmax(-1)[0], atol=0.03)


def test_temperature_zero_is_greedy_and_needs_no_luck():
    assert sample_tokens(LOGITS[1:], [SampleRNG.of(1)], GenerateConfig(temperature=0.0)) == [0]


def test_a_row_is_drawn_with_its_own_dice():
    options = GenerateConfig(temperature=1.5, repetition_penalty=1.3)
    together, alone = [SampleRNG.of(7), SampleRNG.of(8)], [SampleRNG.of(7), SampleRNG.of(8)]
    for _ in range(50):
        both = sample_tokens(LOGITS, together, options)
        assert both == [sample_tokens(LOGITS[i : i + 1], alone[i : i + 1], options)[0] for i in range(2)]
    assert list(together[0].recent) == list(alone[0].recent)


def test_nan_is_an_error():
    with pytest.raises(CheckpointError, match="NaN"):
        sample_tokens(torch.tensor([[0.0, math.nan]]), [SampleRNG.of(1)], GenerateConfig())


def test_dice_go_on_from_a_state():
    dice = SampleRNG.of(11)
    options = GenerateConfig(temperature=1.0, repetition_penalty=1.2)
    for _ in range(REPETITION_WINDOW + 9):
        sample_tokens(LOGITS[:1], [dice], options)
    again = SampleRNG.restore(dice.save(), None)
    assert list(again.recent) == list(dice.recent)
    assert again.seed == 11
    assert [sample_tokens(LOGITS[:1], [again], options) for _ in range(20)] == [
        sample_tokens(LOGITS[:1], [dice], options) for _ in range(20)
    ]


def test_dice_of_a_state_may_be_thrown_anew():
    saved = {**SampleRNG.of(1).save(), "recent": "[5, 6]"}
    assert SampleRNG.restore(saved, 9).seed == 9
    assert list(SampleRNG.restore(saved, 9).recent) == [5, 6]
    assert SampleRNG.restore({}, None) is None


@pytest.mark.parametrize(
    "bad", [{"dice": "!!", "seed": "1"}, {"dice": "AAAA", "seed": "1"}, {"dice": ""}, {"recent": "7"}]
)
def test_damaged_dice_are_refused(bad):
    with pytest.raises(StateError, match="damaged"):
        SampleRNG.restore(bad, None)


def shown_by(outlet, portions):
    out = []
    for portion in portions:
        out.append(outlet.feed(portion))
        if outlet.stopped:
            return out
    return [*out, outlet.finish()]


@given(st.text(alphabet="ab\u00e9\u4e16\U0001f98a", max_size=12), st.lists(st.integers(1, 5), min_size=1))
def test_only_whole_characters_come_out(text, sizes):
    data, portions, at = text.encode(), [], 0
    for size in [*sizes, 99]:
        portions.append(data[at : at + size])
        at += size
    out = shown_by(StreamingDetokenizer(), portions)
    assert b"".join(out) == data
    for piece in out:
        piece.decode()


@given(st.text(alphabet="ab", max_size=14), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_stops_cut_the_text_wherever_the_tokens_end(text, stops):
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    outlet = StreamingDetokenizer(stops)
    assert b"".join(shown_by(outlet, [c.encode() for c in text])).decode() == expected
    assert outlet.stopped == bool(ends)
    outlet = StreamingDetokenizer(stops)
    assert b"".join(shown_by(outlet, [text.encode()])).decode() == expected


def test_what_cannot_be_a_stop_is_not_held():
    outlet = StreamingDetokenizer(["\n\n", "END"])
    assert outlet.feed(b"line") == b"line"
    assert outlet.feed(b"\nE") == b"\n"
    assert outlet.feed(b"NT") == b"ENT"
    assert outlet.feed(b"EN") == b""
    assert outlet.finish() == b"EN"
