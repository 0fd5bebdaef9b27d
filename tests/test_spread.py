"""Intervals over documents and comparisons of models: against plain loops, all resamples, and exact fractions."""

import itertools
import json
import random
from fractions import Fraction
from math import comb
from statistics import fmean

import numpy as np
import pytest
from toys import PROSE, RUNTIME, slow_bits, toy

from xlcli.config import EvalConfig
from xlcli.evaluation import evaluate
from xlcli.evaluation import spread as module
from xlcli.evaluation.spread import compare, discordance, mcnemar, spread_of
from xlcli.events import PairShare, Score

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


def plain_bounds(statistics):
    """The 2.5 % and the 97.5 % quantile of each column."""
    return [[sorted(column)[int(share * len(column))] for share in (0.025, 0.975)] for column in zip(*statistics)]  # noqa: B905


@pytest.mark.parametrize("most", [2_000, 30])
def test_the_interval_of_a_plain_loop(most, monkeypatch):
    """Also where documents are drawn in random groups, with the noise of other draws."""
    monkeypatch.setattr(module, "MOST_UNITS", most)
    sums, draw = documents(90), random.Random(5)
    found = spread_of(sums)
    assert [found.bits_per_byte, found.document_mean] == pytest.approx(means(sums))
    assert (found.documents, found.resamples) == (90, 10_000)
    plain = plain_bounds([means(draw.choices(sums.tolist(), k=90)) for _ in range(4_000)])
    for (low, high), wanted in zip(bounds(found), plain, strict=True):
        noise = (0.06 if most > 90 else 0.25) * (wanted[1] - wanted[0])
        assert [low, high] == pytest.approx(wanted, abs=noise)


def test_the_interval_of_all_resamples_of_five_documents():
    sums = documents(5, seed=3)
    every = [means(sums[list(drawn)]) for drawn in itertools.product(range(5), repeat=5)]
    for found, column in zip(bounds(spread_of(sums)), zip(*every, strict=True), strict=True):
        ordered = np.sort(column)
        for bound, share in zip(found, (0.025, 0.975), strict=True):
            below, up_to = np.searchsorted(ordered, (bound - 1e-9, bound + 1e-9)) / len(ordered)
            assert below - 0.006 < share < up_to + 0.006


def test_draws_in_blocks_are_those_of_one_loop(monkeypatch):
    units, draw = np.random.default_rng(1).uniform(size=(7, 4)), np.random.default_rng(0)
    monkeypatch.setattr(module, "BLOCK", 50)
    plain = [units[draw.integers(7, size=7)].sum(0) for _ in range(10_000)]
    assert module.resampled(units) == pytest.approx(np.array(plain), abs=1e-12)


def test_a_difference_is_paired():
    first, draw = documents(60), random.Random(2)
    second = first.copy()
    second[:, 0] += first[:, 1] * np.random.default_rng(7).normal(0.1, 0.05, 60)
    found = spread_of(second, first)
    pairs = list(zip(second.tolist(), first.tolist(), strict=True))
    statistics = []
    for _ in range(4_000):
        ones, others = zip(*draw.choices(pairs, k=60), strict=True)
        statistics.append(np.subtract(means(ones), means(others)))
    for (low, high), wanted in zip(bounds(found), plain_bounds(statistics), strict=True):
        assert [low, high] == pytest.approx(wanted, abs=0.06 * (wanted[1] - wanted[0]))
        assert high - low < 0.1 * (spread_of(first).bits_per_byte_high - spread_of(first).bits_per_byte_low)
    assert bounds(spread_of(first, first)) == [[0.0, 0.0], [0.0, 0.0]]


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
