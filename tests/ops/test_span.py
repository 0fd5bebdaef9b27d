import pytest
import torch

from xlcli.ops.span import Frame, Span


def visible(span, m, t):
    frame = Frame(span, n_memory=m, n_new=t, keep=0, device=torch.device("cpu"))
    return torch.ones(t, m + t, dtype=torch.bool) if frame.visible is None else frame.visible


@pytest.mark.parametrize("mem_len", [1, 3, 50])
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_uniform_sees_itself_and_mem_len_before(mem_len, m, t):
    m = min(m, mem_len)
    mask = visible(Span.of("uniform", mem_len=mem_len, segment_len=4), m, t)
    for i in range(t):
        for j in range(m + t):
            assert mask[i, j] == (0 <= i + m - j <= mem_len)


def test_growing_sees_all_that_is_before():
    mask = visible(Span.of("growing", mem_len=3, segment_len=4), 3, 4)
    assert mask.tolist() == [[j <= i + 3 for j in range(7)] for i in range(4)]


def test_no_memory_means_segments():
    span = Span.of("uniform", mem_len=0, segment_len=5)
    assert span.kind == "segment"
    assert [span.keep(seen) for seen in (1, 4, 5, 6, 10)] == [1, 4, 0, 1, 0]
    assert [span.room(seen) for seen in (0, 3, 5)] == [5, 2, 5]


def test_memory_keeps_what_there_is_up_to_its_length():
    span = Span.of("uniform", mem_len=7, segment_len=5)
    assert [span.keep(seen) for seen in (1, 7, 8)] == [1, 7, 7]
    assert span.room(3) is None
