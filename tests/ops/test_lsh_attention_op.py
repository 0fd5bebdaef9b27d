"""Hashed attention against loops over its definition."""

import math

import pytest
import torch
from oracles import reformer
from torch.nn import functional as F

from xlcli.ops import lsh_attention as lsh
from xlcli.ops import lsh_gather
from xlcli.ops.attend import attend_plain
from xlcli.ops.context import VisibleKeys
from xlcli.ops.lsh_attention import attend_hashed, attend_hashed_one
from xlcli.ops.lsh_gather import KeyWindow, Lookup
from xlcli.ops.lsh_table import Table, draw_rotations, hash_buckets, insert, rank_in_buckets

ROWS, HEADS, WIDTH, SCALE = 2, 3, 4, 1.3
FACTORS = [(), (2,), (4,), (16,), (4, 6), (64,)]


class Case:
    """Random tokens, buckets and settings."""

    def __init__(self, seed, longest=300, **given):
        self.generator = torch.Generator().manual_seed(seed)
        self.t = given.get("t", self.draw(1, longest))
        self.rounds = given.get("rounds", [1, 2, 4, 8][seed % 4])
        self.factors = given.get("factors", FACTORS[self.draw(0, len(FACTORS) - 1)])
        self.size = given.get("size", self.draw(1, 12) * [1, lsh.TILE][seed // 4 % 2])
        self.limit = given.get("limit", [None, self.draw(1, longest // 2)][self.draw(0, 1)])
        self.q, self.v = self.normal(2, ROWS, HEADS, self.t, WIDTH).unbind()
        self.rotations = draw_rotations(self.rounds, self.factors, WIDTH, self.generator).double()

    def draw(self, low, high):
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    @property
    def k(self):
        return F.normalize(self.q, dim=-1)

    @property
    def buckets(self):
        return hash_buckets(self.q, self.rotations, self.factors)

    def table(self):
        return Table.empty(self.q, ROWS, HEADS, self.rounds, math.prod(self.factors), self.size)

    def whole(self, **settings):
        line = rank_in_buckets(self.buckets, self.table().counts)
        key_window = KeyWindow(0, 0, self.limit)
        return attend_hashed(SCALE * self.q, self.k, self.v, Lookup(line, None, key_window, self.size), **settings)

    def plain(self):
        return reformer.attend_masked(
            self.q, self.k, self.v, self.buckets, bucket_size=self.size, limit=self.limit, scale=SCALE
        )

    def call(self, table, start, stop, one_by_one=False):
        """Reads some tokens, the earlier ones lying in the table, and writes them into it."""
        if one_by_one:
            return torch.cat([self.one(table, i) for i in range(start, stop)], 2)
        q, k, v = (part[:, :, start:stop] for part in (self.q, self.k, self.v))
        line = rank_in_buckets(self.buckets[..., start:stop], table.counts)
        key_window = KeyWindow(start, 0, self.limit)
        y = attend_hashed(SCALE * q, k, v, Lookup(line, table, key_window, self.size))
        insert(table, line, k, v, start)
        return y

    def one(self, table, i):
        q, k, v = (part[:, :, i : i + 1] for part in (self.q, self.k, self.v))
        return attend_hashed_one(SCALE * q, k, v, self.buckets[..., i : i + 1], table, KeyWindow(i, 0, self.limit))


@pytest.fixture(params=["tiles", "gathered"])
def form(request, monkeypatch):
    """Both forms of a call, whatever its number of tokens for each bucket; gathered in several parts."""
    monkeypatch.setattr(lsh, "GATHERED_TOKENS", 0 if request.param == "tiles" else math.inf)
    monkeypatch.setattr(lsh_gather, "PART_FLOATS", 20_000)
    return request.param


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factors", FACTORS)
def test_buckets_equal_the_loop(factors):
    case = Case(1, t=40, rounds=3, factors=factors)
    for r in range(3):
        for i in range(40):
            expected = reformer.bucket(case.q[1, 2, i].tolist(), case.rotations[r].tolist(), factors)
            assert case.buckets[1, 2, r, i] == expected


def test_vectors_without_a_direction_have_buckets():
    """Zero vectors and infinite or undefined numbers, which a model that diverges produces."""
    x = torch.zeros(1, 1, 4, WIDTH)
    x[0, 0, 1:, 0] = torch.tensor([math.inf, -math.inf, math.nan])
    buckets = hash_buckets(x, draw_rotations(8, (4, 6), WIDTH), (4, 6))
    assert buckets[..., 0].eq(0).all()
    assert 0 <= buckets.min() <= buckets.max() < 24


def test_a_bucket_is_a_direction():
    case = Case(2, t=3000, rounds=2, factors=(4, 6))
    assert torch.equal(hash_buckets(case.k, case.rotations, (4, 6)), case.buckets)
    opposite = hash_buckets(-case.q, case.rotations, (4, 6))
    assert torch.equal(opposite // 6, (case.buckets // 6 + 2) % 4)
    assert torch.equal(opposite % 6, (case.buckets % 6 + 3) % 6)
    assert len(case.buckets.unique()) == 24


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", range(16))
def test_equals_the_loops(seed):
    case = Case(seed, longest=50)
    y = case.whole()
    for row, head in ((0, 1), (1, 2)):
        args = (part[row, head].tolist() for part in (case.q, case.v, case.buckets))
        expected = reformer.attend(*args, case.size, SCALE, case.limit)
        assert close(y[row, head], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", range(24))
def test_cutting(seed):
    """Calls of any length, one token at a time or many at once, equal the masked attention over everything."""
    case = Case(seed)
    expected = case.plain()
    assert close(case.whole(), expected)
    table, start, out = case.table(), 0, []
    while start < case.t:
        stop = min(start + case.draw(1, 60), case.t)
        out.append(case.call(table, start, stop, one_by_one=case.draw(0, 2) == 0))
        start = stop
    assert close(torch.cat(out, 2), expected)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_change_no_bit(dtype):
    for seed in range(12):
        case = Case(seed, t=200)
        case.q, case.v, case.rotations = (part.to(dtype) for part in (case.q, case.v, case.rotations))
        start, i = case.draw(0, 60), case.draw(61, 198)
        table, other = case.table(), case.table()
        if start:
            case.call(table, 0, start)
            case.call(other, 0, start)
        before = case.call(table, start, 200)
        for part in (case.q, case.v):
            part[:, :, i + 1 :] = case.normal(ROWS, HEADS, 199 - i, WIDTH).to(dtype) * 3
        after = case.call(other, start, 200)
        assert torch.equal(before[:, :, : i + 1 - start], after[:, :, : i + 1 - start])
        assert not torch.equal(before, after)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("norm", [30.0, 300.0])
def test_large_scores(norm):
    """Queries whose scores have no exponential beside ordinary ones, which do not change by a bit."""
    for seed in range(8):
        case = Case(seed, t=200)
        expected = case.whole()
        case.q[:, :, 150:] *= norm
        assert close(case.whole(), case.plain())
        assert torch.equal(case.whole()[:, :, :150], expected[:, :, :150])
        case.q[:, :, :150] *= norm
        table = case.table()
        assert close(torch.cat([case.call(table, 0, 90), case.call(table, 90, 200)], 2), case.plain())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("large", [0, 2**60])
@pytest.mark.parametrize("seed", range(8))
def test_gradients(seed, large, monkeypatch):
    """Those of the definition, whether scores are kept or computed again, in groups of any size."""
    monkeypatch.setattr(lsh, "CHECKPOINT_SCORES", large)
    monkeypatch.setattr(lsh, "MAX_SCORES", 500)
    case = Case(seed, longest=100)
    leaves = case.q.requires_grad_(), case.v.requires_grad_()
    weight = case.normal(*case.v.shape)
    expected = torch.autograd.grad((case.plain() * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad((case.whole() * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_after_earlier_tokens(form, seed):
    """Those of the definition, in which earlier tokens have none; the table is read again and stays as it is."""
    case = Case(seed, t=90, factors=[(2,), (16,)][seed % 2])
    table = case.table()
    case.call(table, 0, 50)
    q, v = (part[:, :, 50:].requires_grad_() for part in (case.q, case.v))
    weight = case.normal(*v.shape)

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), (q, v), allow_unused=True, materialize_grads=True)

    buckets = case.buckets
    case.q, case.v = torch.cat((case.q[:, :, :50], q), 2), torch.cat((case.v[:, :, :50], v), 2)
    expected = gradients(case.plain()[:, :, 50:])
    line = rank_in_buckets(buckets[..., 50:], table.counts)
    y = attend_hashed(
        SCALE * q, F.normalize(q, dim=-1), v, Lookup(line, table, KeyWindow(50, 0, case.limit), case.size)
    )
    for a, b in zip(gradients(y), expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("t", [32, 33])
def test_calls_with_few_tokens_for_each_bucket_are_gathered(t, monkeypatch):
    """The form depends on the sizes alone, and both give the same."""
    case, calls = Case(9, t=t, factors=(16,)), []
    gather = lsh.attend_gathered
    monkeypatch.setattr(lsh, "attend_gathered", lambda *args, **settings: calls.append(1) or gather(*args, **settings))
    assert close(case.whole(), case.plain())
    assert len(calls) == (t == 32)


@pytest.mark.parametrize("seed", range(4))
def test_heads_that_are_computed_in_parts(seed, monkeypatch):
    monkeypatch.setattr(lsh, "GATHERED_TOKENS", 0)
    monkeypatch.setattr(lsh, "MAX_FLOATS", 1)
    case = Case(seed, t=90)
    table = case.table()
    assert close(case.whole(), case.plain())
    assert close(torch.cat([case.call(table, 0, 50), case.call(table, 50, 90)], 2), case.plain())


@pytest.mark.usefixtures("form")
def test_one_large_bucket_is_full_attention():
    case = Case(3, t=37, rounds=1, factors=(), size=40, limit=None)
    visible = torch.ones(37, 37, dtype=torch.bool).tril(-1)
    visible[0, 0] = True
    assert close(case.whole(), attend_plain(case.q, case.k, case.v, visible=VisibleKeys(visible), scale=SCALE))


@pytest.mark.usefixtures("form")
def test_a_token_alone_sees_itself():
    case = Case(4, t=30, rounds=2, factors=(64,), limit=1)
    alone = reformer.attended_mask(case.buckets, bucket_size=case.size, limit=1).diagonal(dim1=-2, dim2=-1)
    assert alone.any()
    assert torch.equal(case.whole()[alone], case.v[alone])


def test_a_rare_bucket_keeps_what_is_far_back():
    """A key leaves only when it is displaced, and the table is no larger for it."""
    case = Case(5, t=5000, rounds=1, factors=(4,), size=3, limit=None)
    case.q[..., 1:, :] = case.q[..., 1:2, :]
    case.q[..., [0, -1], :] = -case.q[..., 1:2, :]
    table = case.table()
    case.call(table, 0, 4999)
    assert close(case.one(table, 4999), case.v[:, :, :1])


@pytest.mark.usefixtures("form")
def test_tickets_of_long_streams_are_exact():
    """After many more arrivals at every bucket the same tokens see the same."""
    case = Case(6, t=240, rounds=4, factors=(4,), size=5, limit=None)
    expected, table = case.plain()[:, :, 200:], case.table()
    case.call(table, 0, 200)
    assert table.counts.min() >= 5
    more = 5 * 2**33
    late = [table._replace(global_ranks=table.global_ranks + more, counts=table.counts + more) for _ in range(2)]
    copy = Table(*(part.clone() for part in late[0]))
    assert close(case.call(copy, 200, 240), expected)
    assert close(case.call(late[1], 200, 240, one_by_one=True), expected)


@pytest.mark.usefixtures("form")
def test_dropped_weights():
    """Each weight is dropped or divided by what is left, after the softmax over the union."""
    case = Case(7, t=WIDTH, rounds=4, factors=(2,), size=3, limit=None)
    case.v = torch.eye(WIDTH, dtype=torch.float64).expand(ROWS, HEADS, WIDTH, WIDTH)
    kept, weights = set(), case.whole()
    torch.manual_seed(0)
    for _ in range(20):
        ratio = (case.whole(dropout=0.5) / weights)[:, :, 2:]
        kept |= set(ratio[ratio.isfinite()].round(decimals=9).tolist())
    assert {0.0, 2.0} <= kept <= {0.0, 1.0, 2.0}


@pytest.mark.parametrize("seed", range(4))
def test_tickets_tell_who_meets(seed):
    case = Case(seed, t=50)
    global_ranks = rank_in_buckets(case.buckets, case.table().counts).global_ranks
    seen = reformer.attended_mask(case.buckets, bucket_size=case.size)
    others = ~torch.eye(50, dtype=torch.bool)
    difference = global_ranks[..., 20:, None] - global_ranks[..., None, :]
    meets = ((difference >= 1) & (difference <= case.size)).any(2)
    assert torch.equal(meets & others[20:], seen[:, :, 20:] & others[20:])
