"""Intervals over documents and comparisons of models: against plain loops, simulations, and exact fractions."""

import json
from dataclasses import replace
from fractions import Fraction
from math import comb
from statistics import fmean

import numpy as np
import pytest
from toys import PROSE, RUNTIME, slow_bits, toy

from xlcli.cli.score_report import spread_text
from xlcli.config import EvalConfig
from xlcli.evaluation import evaluate
from xlcli.evaluation.spread import compare, discordance, mcnemar, remark_on_memory, seed_difference, spread_of
from xlcli.events import Notice, PairShare, Score
from xlcli.metrics import half_width

TEXTS = [f"{line}\n" for line in PROSE.splitlines()[:5] if line]


def documents(n, seed=0):
    """Bits and bytes of documents whose bits per byte differ."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(20, 400, n)
    return np.stack((sizes * draw.uniform(1, 4, n), sizes), 1)


def means(sums):
    """Bits per byte of the text, and their mean over documents."""
    return [sum(bits for bits, _ in sums) / sum(size for _, size in sums), fmean(bits / size for bits, size in sums)]


def bounds(found):
    return [
        [found.bits_per_byte_low, found.bits_per_byte_high],
        [found.document_mean_low, found.document_mean_high],
    ]


def left_out(sums, statistic):
    """Standard error of a statistic: the jackknife, computing it again without each document."""
    n, whole = len(sums), statistic(sums)
    squares = sum((statistic(sums[:i] + sums[i + 1 :]) - whole) ** 2 for i in range(n))
    return ((n - 1) / n * squares) ** 0.5


def test_the_interval_of_documents_that_are_left_out_in_turn():
    sums = documents(11).tolist()
    found, wanted = spread_of(np.array(sums)), means(sums)
    assert [found.documents, found.bits_per_byte, found.document_mean] == pytest.approx([11, *wanted])
    sizes = [size for _, size in sums]
    n_effective = sum(sizes) ** 2 / sum(size**2 for size in sizes)
    assert 5 < n_effective < 11
    for i, ((low, high), n) in enumerate(zip(bounds(found), (n_effective, 11), strict=True)):
        margin = half_width(left_out(sums, lambda sums, i=i: means(sums)[i]), n - 1)
        assert [low, high] == pytest.approx([wanted[i] - margin, wanted[i] + margin])


def test_documents_of_one_size_have_the_interval_of_their_mean():
    sums = documents(7)
    sums[:, 0] *= 100 / sums[:, 1]
    sums[:, 1] = 100
    text, mean = bounds(spread_of(sums))
    assert text == pytest.approx(mean)


@pytest.mark.parametrize("n", [2, 4])
def test_few_documents_have_no_interval(n):
    sums = documents(n)
    found = spread_of(sums)
    assert [found.bits_per_byte, found.document_mean] == pytest.approx(means(sums.tolist()))
    assert bounds(found) == [[None, None], [None, None]]
    assert None not in bounds(spread_of(documents(5)))[0]


def test_a_text_that_is_nearly_one_document_has_a_wide_interval():
    sums = documents(10)
    sums[0] *= 1e6
    low, high = bounds(spread_of(sums))[0]
    assert 1.0 < high - low < 100


@pytest.mark.parametrize("n", [5, 10])
@pytest.mark.parametrize("correlation", [0.0, -0.4])
def test_intervals_hold(n, correlation):
    """Of samples of documents whose sizes differ by a factor of seven (two standard deviations), and bits with them."""
    draw = np.random.default_rng(3)

    def sample(n):
        z, noise = draw.normal(size=(2, n))
        sizes = np.exp(8 + 0.5 * z)
        return np.stack((sizes * (1.5 + 0.2 * (correlation * z + (1 - correlation**2) ** 0.5 * noise)), sizes), 1)

    wanted = means(sample(200_000).tolist())
    held = [
        [low <= x <= high for x, (low, high) in zip(wanted, bounds(spread_of(sample(n))), strict=True)]
        for _ in range(2_000)
    ]
    assert (np.mean(held, axis=0) > (0.92 if n == 10 else 0.91)).all()
    assert (np.mean(held, axis=0) < 0.98).all()


def test_a_difference_is_paired():
    first = documents(60)
    second = first.copy()
    second[:, 0] += first[:, 1] * np.random.default_rng(7).normal(0.1, 0.05, 60)
    found = spread_of(second, first)
    assert [found.bits_per_byte, found.document_mean] == pytest.approx(np.subtract(means(second), means(first)))
    both = np.hstack((second, first)).tolist()
    error = left_out(both, lambda rows: means([row[:2] for row in rows])[0] - means([row[2:] for row in rows])[0])
    n_effective = first[:, 1].sum() ** 2 / (first[:, 1] ** 2).sum()
    high = found.bits_per_byte + half_width(error, n_effective - 1)
    assert found.bits_per_byte_high == pytest.approx(high)
    for (low, high), (its_low, its_high) in zip(bounds(found), bounds(spread_of(first)), strict=True):
        assert high - low < 0.1 * (its_high - its_low)
    assert bounds(spread_of(first, first)) == [[0.0, 0.0], [0.0, 0.0]]


def test_a_difference_of_documents_that_end_elsewhere():
    """Two vocabularies can divide a row of a context and its continuation at different bytes."""
    first, second = documents(8), documents(8, seed=1)
    second[:, 1] = first[:, 1] + [0, 1, 0, 2, 0, 0, 3, 0]
    found = spread_of(second, first)
    assert [found.bits_per_byte, found.document_mean] == pytest.approx(np.subtract(means(second), means(first)))
    rows = np.hstack((second, first)).tolist()
    error = left_out(rows, lambda rows: means([row[:2] for row in rows])[0] - means([row[2:] for row in rows])[0])
    n_effective = second[:, 1].sum() ** 2 / (second[:, 1] ** 2).sum()
    assert found.bits_per_byte_low == pytest.approx(found.bits_per_byte - half_width(error, n_effective - 1))


def student_quantile(freedom):
    """97.5 % quantile by the substitution t = tan(x), with trapezoids."""
    x = np.linspace(0, np.pi / 2, 2_000_001)[:-1]
    density = (1 + np.tan(x) ** 2 / freedom) ** (-(freedom + 1) / 2) / np.cos(x) ** 2
    mass = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2))
    return np.tan(np.interp(0.95 * mass[-1], mass, x))


@pytest.mark.parametrize("freedom", [1.0, 1.2, 1.7, 1.99])
def test_few_degrees_of_freedom_have_the_half_width_of_student(freedom):
    assert half_width(2.0, freedom) == pytest.approx(2 * student_quantile(freedom), rel=0.03)
    assert student_quantile(1.0) == pytest.approx(12.7062, rel=1e-3)


@pytest.mark.parametrize(("n", "m", "is_noisy"), [(2, 2, False), (4, 4, False), (6, 3, True)])
def test_the_difference_of_groups_of_seeds_holds_in_95_percent(n, m, is_noisy, rows):
    draw, score = np.random.default_rng(5), score_of(rows)
    spreads = (0.02, 0.08 if is_noisy else 0.02)
    n_held = 0
    for _ in range(1_500):
        first, second = (
            [replace(score, bits_per_byte=value) for value in draw.normal(mean, spread, size)]
            for mean, spread, size in zip((1.5, 1.4), spreads, (n, m), strict=True)
        )
        found = seed_difference(first, second)
        n_held += found["low"] <= 0.1 <= found["high"]
    assert 0.93 < n_held / 1_500 < 0.99
    nothing = {"to": [score.model] * 2, "bits_per_byte": 0.0, "low": 0.0, "high": 0.0}
    assert seed_difference([score] * 2, [score] * 2) == nothing


@pytest.mark.parametrize(("n", "m"), [(0, 0), (1, 0), (5, 5), (3, 11), (40, 61), (1200, 1300)])
def test_mcnemar_of_exact_fractions(n, m):
    tail = sum(Fraction(comb(n + m, i)) for i in range(min(n, m) + 1)) / 2 ** (n + m)
    assert mcnemar(n, m) == mcnemar(m, n) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-9)


def test_pairs_that_are_equal_are_not_discordant():
    one, other = (
        PairShare("a", 6, 0.5, 0.1, 0.9, 0.5, signs) for signs in ((1, 1, -1, 0, 1, -1), (1, -1, 1, -1, -1, -1))
    )
    found = discordance(one, other)
    assert (found.group, found.only_model, found.only_other) == ("a", 2, 1)


def score_of(path, *, seed=0, **options):
    [score] = [
        each for each in evaluate(toy(seed=seed), [path], EvalConfig(**options), RUNTIME) if isinstance(each, Score)
    ]
    return score


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text.rstrip("\n")}) + "\n" for text in TEXTS))
    return path


def test_documents_are_those_that_are_scored_alone(rows, tmp_path):
    score = score_of(rows, reset_on_document=True)
    model = toy()
    wanted = [(sum(slow_bits(model, text.encode())), len(text.encode())) for text in TEXTS]
    assert np.array(score.sums) == pytest.approx(np.array(wanted), abs=1e-4)
    assert [score.spread.bits_per_byte, score.spread.document_mean] == pytest.approx(means(wanted), abs=1e-6)
    assert score.spread.bits_per_byte == pytest.approx(score.bits_per_byte, rel=1e-7)
    (tmp_path / "lines.txt").write_text("".join(TEXTS))
    assert score_of(tmp_path / "lines.txt", each_line=True).spread == score.spread
    for path, options in ((rows, {}), (tmp_path / "lines.txt", {"reset_on_document": True})):
        assert score_of(path, **options).spread is None


def test_blank_lines_are_not_in_the_spread(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n\n".join(TEXTS))  # two blank lines after each
    score, model = score_of(path, each_line=True), toy()
    wanted = [(sum(slow_bits(model, text.encode())), len(text.encode())) for text in TEXTS]
    assert np.array(score.sums) == pytest.approx(np.array(wanted), abs=1e-4)
    assert [score.spread.bits_per_byte, score.spread.document_mean] == pytest.approx(means(wanted), abs=1e-6)
    assert score.documents == 3 * len(TEXTS) - 2
    assert f"{len(TEXTS)} lines that are not blank" in spread_text([score], [])
    path.write_text("one\n\n\n")
    assert score_of(path, each_line=True).spread is None


def test_grouped_rows_and_pairs_have_no_spread(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"one": "a fox", "two": f"dog {i}", "item": i % 2} for i in range(4)]))
    assert score_of(path, text_field="one", score_field="two").spread.documents == 4
    assert score_of(path, text_field="one", score_field="two", by="item").spread is None
    score, other = (score_of(path, pairs=("one", "two"), by="item", seed=seed) for seed in (0, 1))
    assert (score.spread, [pair.pairs for pair in score.pairs]) == (None, [4, 2, 2])
    found = compare(score, other)
    assert found.spread is None
    for pair, its, each in zip(score.pairs, other.pairs, found.pairs, strict=True):
        assert each.only_model - each.only_other == round(pair.pairs * (pair.share - its.share))
        assert each.p == mcnemar(each.only_model, each.only_other)
    assert compare(score_of(path, text_field="one"), score_of(path, text_field="one")) is None


def at_lengths(score, bits_by_length, noise=0.0):
    """Scores of 30 documents of 100 bytes by memory length; `noise` alternates from document to document."""
    scores = []
    for number, (mem_len, bits) in enumerate(bits_by_length.items()):
        sums = tuple((100 * bits + noise * number * (-1) ** i, 100) for i in range(30))
        spread = spread_of(np.array(sums))
        scores.append(replace(score, mem_len=mem_len, bits_per_byte=bits, sums=sums, spread=spread))
    return scores


def test_a_memory_that_is_worse_than_a_shorter_one_is_remarked_on(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    score = score_of(path, segment_len=50)
    assert remark_on_memory(at_lengths(score, {0: 2.5, 16: 2.4, 64: 2.3, 128: 2.3}), 64) is None
    assert remark_on_memory(at_lengths(score, {64: 2.3}), 64) is None
    without_memory = remark_on_memory(at_lengths(score, {64: 2.4, 0: 2.3, 128: 2.2}), 64)
    assert without_memory.startswith("a memory of 64 costs 0.1000 bits per byte more than 0: ")
    assert "segments of 50 tokens" in without_memory
    assert "trained with 64" in remark_on_memory(at_lengths(score, {0: 2.5, 64: 2.3, 128: 2.35}), 64)
    noisy = at_lengths(score, {0: 2.5, 64: 2.3, 128: 2.301}, noise=50.0)
    assert "within the 95 % interval" in remark_on_memory(noisy, 64)
    one_text = [replace(each, sums=(), spread=None) for each in noisy]
    assert "within" not in remark_on_memory(one_text, 64)


def test_a_sweep_ends_with_the_remark(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    model = toy(mem_len=9)
    events = list(evaluate(model, [str(path)], EvalConfig(sweep_mem_len=(0, 1, 9)), RUNTIME))
    remark = remark_on_memory([event for event in events if isinstance(event, Score)], model.config.train.mem_len)
    assert ([] if remark is None else [Notice(remark)]) == [
        e for e in events if type(e) is Notice and "costs" in e.text
    ]
