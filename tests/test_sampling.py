import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xlcli.config import GenerateConfig, Sampling
from xlcli.errors import CheckpointError
from xlcli.sampling import (
    REPETITION_WINDOW,
    SampleRNG,
    StreamingDetokenizer,
    apply_repetition_penalty,
    apply_temperature,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    invert_cdf,
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


def test_min_p_is_relative_to_the_most_likely():
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


def test_invert_cdf():
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()[None].expand(8, -1)
    levels = torch.tensor([0.0, 0.49, 0.501, 0.74, 0.76, 0.99, 1 - 2**-53, 0.25], dtype=torch.float64)
    assert invert_cdf(logits, levels).tolist() == [0, 0, 2, 2, 3, 3, 3, 0]


def test_samples_follow_the_probabilities():
    logits = LOGITS[:1]
    rngs = [SampleRNG(3)]
    options = Sampling(temperature=1.0)
    counts = torch.zeros(5)
    for _ in range(3000):
        counts[sample_tokens(logits, rngs, options)[0]] += 1
    assert torch.allclose(counts / 3000, logits.softmax(-1)[0], atol=0.03)


def test_temperature_zero_is_greedy():
    assert sample_tokens(LOGITS[1:], [SampleRNG(1)], Sampling(temperature=0.0)) == [0]


def test_a_row_is_sampled_with_its_own_generator():
    options = Sampling(temperature=1.5, repetition_penalty=1.3)
    together, alone = [SampleRNG(7), SampleRNG(8)], [SampleRNG(7), SampleRNG(8)]
    for _ in range(50):
        both = sample_tokens(LOGITS, together, options)
        assert both == [sample_tokens(LOGITS[i : i + 1], alone[i : i + 1], options)[0] for i in range(2)]
    assert list(together[0].recent) == list(alone[0].recent)


def test_nan_is_an_error():
    with pytest.raises(CheckpointError, match="NaN"):
        sample_tokens(torch.tensor([[0.0, math.nan]]), [SampleRNG(1)], Sampling())


def test_the_latest_tokens_are_remembered():
    rng = SampleRNG(11, recent=range(3))
    options = Sampling(temperature=1.0, repetition_penalty=1.2)
    drawn = [sample_tokens(LOGITS[:1], [rng], options)[0] for _ in range(REPETITION_WINDOW - 1)]
    assert REPETITION_WINDOW == 256
    assert list(rng.recent) == [2, *drawn]
    assert list(SampleRNG(12, rng.recent).recent) == [2, *drawn]


def shown_by(detokenizer, portions):
    out = []
    for portion in portions:
        out.append(detokenizer.feed(portion))
        if detokenizer.stopped:
            return out
    return [*out, detokenizer.finish()]


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
    detokenizer = StreamingDetokenizer(stops)
    assert b"".join(shown_by(detokenizer, [c.encode() for c in text])).decode() == expected
    assert detokenizer.stopped == bool(ends)
    detokenizer = StreamingDetokenizer(stops)
    assert b"".join(shown_by(detokenizer, [text.encode()])).decode() == expected


def test_text_that_cannot_be_a_stop_is_not_held():
    detokenizer = StreamingDetokenizer(["\n\n", "END"])
    assert detokenizer.feed(b"line") == b"line"
    assert detokenizer.feed(b"\nE") == b"\n"
    assert detokenizer.feed(b"NT") == b"ENT"
    assert detokenizer.feed(b"EN") == b""
    assert detokenizer.finish() == b"EN"


def test_settings_that_are_not_given():
    """Chosen ones for subwords if none is given; otherwise the distribution of the model, but for the temperature."""
    assert GenerateConfig().sampling("sentencepiece") == Sampling(0.8, 0, 0.95, 0.0, 1.1)
    for kind in ("bytes", "words"):
        assert GenerateConfig().sampling(kind) == Sampling(temperature=0.8)
    for kind in ("bytes", "sentencepiece"):
        assert GenerateConfig(temperature=1.0).sampling(kind) == Sampling()
        assert GenerateConfig(top_k=3).sampling(kind) == Sampling(temperature=0.8, top_k=3)
        assert GenerateConfig(temperature=0.0, min_p=0.1).sampling(kind) == Sampling(temperature=0.0, min_p=0.1)
