import math

import pytest
import torch

from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span


def visible(span, m, t):
    context = AttentionContext(span, n_memory=m, n_new=t, keep=0, device=torch.device("cpu"))
    return torch.ones(t, m + t, dtype=torch.bool) if context.mask.visible is None else context.mask.visible


@pytest.mark.parametrize("mem_len", [1, 3, 50])
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_uniform_sees_itself_and_mem_len_before(mem_len, m, t):
    m = min(m, mem_len)
    mask = visible(Span("uniform", mem_len=mem_len, segment_len=4), m, t)
    for i in range(t):
        for j in range(m + t):
            assert mask[i, j] == (0 <= i + m - j <= mem_len)


def test_growing_sees_all_that_is_before():
    mask = visible(Span("growing", mem_len=3, segment_len=4), 3, 4)
    assert mask.tolist() == [[j <= i + 3 for j in range(7)] for i in range(4)]


def test_no_memory_means_segments():
    span = Span("uniform", mem_len=0, segment_len=5)
    assert span.kind == "segment"
    assert [span.n_kept(seen) for seen in (1, 4, 5, 6, 10)] == [1, 4, 0, 1, 0]
    assert [span.n_until_reset(seen) for seen in (0, 3, 5)] == [5, 2, 5]


def test_memory_keeps_what_there_is_up_to_its_length():
    span = Span("uniform", mem_len=7, segment_len=5)
    assert [span.n_kept(seen) for seen in (1, 7, 8)] == [1, 7, 7]
    assert span.n_until_reset(3) is None


def context(span, m, t, **rest):
    return AttentionContext(span, n_memory=m, n_new=t, keep=min(m + t, 7), device=torch.device("cpu"), **rest)


UNIFORM = Span("uniform", mem_len=7, segment_len=5)
GROWING = Span("growing", mem_len=7, segment_len=5)
SEGMENT = Span("uniform", mem_len=0, segment_len=5)


@pytest.mark.parametrize("span", [UNIFORM, GROWING])
@pytest.mark.parametrize(("m", "t"), [(0, 1), (0, 9), (4, 1), (7, 3)])
def test_distances_count_from_query_to_key(span, m, t):
    """The oldest remembered token is `m` before the first new one."""
    assert context(span, m, t).positions.distance.tolist() == [[i - j for j in range(-m, t)] for i in range(t)]


@pytest.mark.parametrize("window", [1, 3, 6, 50])
@pytest.mark.parametrize("span", [UNIFORM, GROWING, SEGMENT])
@pytest.mark.parametrize(("m", "t"), [(0, 1), (0, 9), (4, 1), (7, 1), (7, 8)])
def test_a_narrow_frame_sees_and_remembers_a_window(span, m, t, window):
    wide = context(span, m, t, start=11, offsets=torch.tensor([3]))
    narrow = wide.narrow(window)
    assert (narrow.n_memory, narrow.n_new, narrow.keep) == (min(m, window), t, min(wide.keep, window))
    assert narrow.start == 11
    assert narrow.positions.absolute.tolist() == wide.positions.absolute.tolist()
    limit = min(window, 7) if span is UNIFORM else window
    seen = torch.ones(t, narrow.n_memory + t, dtype=torch.bool) if narrow.mask.visible is None else narrow.mask.visible
    for i in range(t):
        for j in range(-narrow.n_memory, t):
            assert seen[i, j + narrow.n_memory] == (0 <= i - j <= limit)


def test_a_single_token_that_sees_everything_needs_no_mask():
    assert context(UNIFORM, 7, 1).mask.visible is None
    assert context(GROWING, 7, 1).mask.visible is None
    assert context(UNIFORM, 7, 1).narrow(7).mask.visible is None
    assert context(UNIFORM, 7, 1, window=6).mask.visible is not None
    assert context(GROWING, 7, 2).mask.visible is not None


def test_positions_count_from_the_beginning_of_each_rows_text():
    assert context(UNIFORM, 4, 3).positions.absolute.tolist() == [[0, 1, 2]]
    assert context(UNIFORM, 4, 3, start=4).positions.absolute.tolist() == [[4, 5, 6]]
    offsets = torch.tensor([0, 2**40, 9])
    assert context(GROWING, 4, 2, start=4, offsets=offsets).positions.absolute.tolist() == [
        [4, 5], [2**40 + 4, 2**40 + 5], [13, 14]
    ]  # fmt: skip
    assert context(GROWING, 4, 2, start=4, offsets=offsets).narrow(3).positions.absolute[2].tolist() == [13, 14]


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 3])])
def test_positions_count_from_the_beginning_of_an_independent_segment(offsets):
    assert context(SEGMENT, 0, 3, start=10, offsets=offsets).positions.absolute.tolist() == [[0, 1, 2]]
    assert context(SEGMENT, 2, 3, start=12, offsets=offsets).positions.absolute.tolist() == [[2, 3, 4]]


def test_what_layers_share_is_made_once():
    made = []
    shared = context(UNIFORM, 4, 3)
    for _ in range(2):
        assert shared.constant("a", lambda: made.append("a") or len(made)) == 1
        assert shared.constant(("a", 1), lambda: made.append("b") or len(made)) == 2
        assert shared.constant("nothing", lambda: made.append("c")) is None
        assert shared.learned("a", lambda: made.append("d") or len(made)) == 4
    assert made == ["a", "b", "c", "d"]
    assert shared.narrow(3) is shared.narrow(3)
    assert shared.narrow(3) is not shared.narrow(2)
    assert shared.block(3) is shared.block(3)
    assert context(UNIFORM, 4, 3).constant("a", lambda: "another") == "another"


def test_learned_values_can_be_cleared_in_all_contexts_of_a_call():
    shared = context(UNIFORM, 4, 3)
    contexts = [shared, shared.narrow(3), shared.narrow(3).block(2)]
    for made in contexts:
        made.constant("a", lambda: "constant")
        made.learned("a", lambda: "old")
    shared.clear_learned()
    for made in contexts:
        assert made.constant("a", lambda: "new") == "constant"
        assert made.learned("a", lambda: "new") == "new"


@pytest.mark.parametrize(("m", "t"), [(0, 4), (3, 4)])
def test_angles_count_from_the_first_new_token(m, t):
    """However long the stream: distances are what matters, and small numbers are exact."""
    sin, cos = context(UNIFORM, m, t, start=2**40).positions.angles(6, torch.float64)
    for row, position in enumerate(range(-m, t)):
        for f in range(3):
            angle = position * 10000 ** (-2 * f / 6)
            assert sin[row, f] == pytest.approx(math.sin(angle), abs=1e-15)
            assert cos[row, f] == pytest.approx(math.cos(angle), abs=1e-15)
