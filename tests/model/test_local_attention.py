"""Attention in blocks of a window against the same attention in one piece with a band for a mask."""

import itertools

import pytest
import torch
import variants
from variants import thinned

from xlcli import config
from xlcli.memory import Hidden
from xlcli.model.attention import local
from xlcli.model.build import build_model
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span

WINDOWS = (1, 3, 5, 8)
LOCAL = [name for name in variants.COMBINATIONS if name.startswith("local-")]
POSITIONS = [name for name in LOCAL if name.endswith("-pre-0")]
"""Every encoding and setting, once."""
UNIFORM = Span("uniform", mem_len=99, segment_len=13)


def as_full(name):
    """A model of full attention with the weights of the local one."""
    tree = variants.COMBINATIONS[name]
    same = {key: value for key, value in tree["attention"].items() if key != "window"}
    position = dict(tree["position"])
    if base := position.pop("local_base", None):  # full layers would have another one, and the scaling
        position = {key: value for key, value in position.items() if key != "scaling"} | {"base": base}
    tree = tree | {"attention": same | {"kind": "full"}, "position": position}
    twin = build_model(config.make({"model": {"n_layers": 2} | tree}).model).double().eval()
    twin.load_state_dict(variants.make(name).state_dict())
    return twin


def blocks(name, window):
    """The first block of a local model and its full twin."""
    own, twin = variants.make(name).stack.blocks[0], as_full(name).stack.blocks[0]
    own.attention.window = window
    return own, twin


def inputs(t, m, *, gradient=False):
    generator = torch.Generator().manual_seed(t * 100 + m)
    new, older = (torch.randn(2, n, 12, generator=generator, dtype=torch.float64) for n in (t, m))
    return new.requires_grad_(gradient), older.requires_grad_(gradient)


def read(block, x, older, span, window=None):
    """Output of a block; `window` makes `span` a band, for full attention."""
    m, t = older.shape[1], x.shape[1]
    limit = Span("uniform", window, 13) if window is not None else span
    tokens = variants.tokens(len(x), t)
    context = AttentionContext(
        limit, n_memory=m, n_new=t, keep=min(m + t, span.mem_len), device=x.device, start=m, tokens=tokens
    )
    return block(x, Hidden(older), context)


def seen_back(span, window):
    return min(window, span.mem_len) if span.kind == "uniform" else window


BANDS = [*itertools.product(POSITIONS, WINDOWS)]


@pytest.mark.parametrize("case", thinned(BANDS, BANDS[::6]), ids=lambda case: "-".join(map(str, case)))
def test_blocks_equal_a_band_at_every_length(case):
    name, window = case
    own, twin = blocks(name, window)
    with torch.inference_mode():
        for t in range(1, 41):
            x, older = inputs(t, t % (window + 1))
            out, memory = read(own, x, older, UNIFORM)
            expected, _ = read(twin, x, older, UNIFORM, window)
            assert torch.allclose(out, expected, rtol=0, atol=1e-12), t
            assert memory.length == min(window, older.shape[1] + t)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["local-none-0-pre-0", "local-t5-0-pre-0", "local-xl-0-pre-0"])
def test_blocks_equal_a_band_with_every_memory(name, window):
    own, twin = blocks(name, window)
    with torch.inference_mode():
        for m in range(window + 1):
            for t in range(2 * window, 3 * window + 3):
                x, older = inputs(t, m)
                expected, _ = read(twin, x, older, UNIFORM, window)
                assert torch.allclose(read(own, x, older, UNIFORM)[0], expected, rtol=0, atol=1e-12), (t, m)


@pytest.mark.parametrize(
    "span", [Span("uniform", 2, 13), Span("growing", 2, 13), Span("growing", 9, 13), Span("segment", 0, 99)]
)
@pytest.mark.parametrize("name", POSITIONS)
def test_blocks_equal_a_band_by_every_rule(name, span):
    window = 5
    own, twin = blocks(name, window)
    with torch.inference_mode():
        for t in (3, 11, 15, 23):
            x, older = inputs(t, min(span.mem_len, window) if span.mem_len else 4)
            expected, _ = read(twin, x, older, span, seen_back(span, window))
            assert torch.allclose(read(own, x, older, span)[0], expected, rtol=0, atol=1e-12), t


@pytest.mark.parametrize("name", [name for name in variants.IN_TURN if name in LOCAL])
@pytest.mark.parametrize(("mem_len", "cuts"), [(200, [70]), (200, [3, 40]), (2, [70]), (2, [1, 17])])
def test_a_local_model_is_a_full_one_whose_memory_is_the_window(name, mem_len, cuts):
    text = variants.tokens(2, 71)
    with torch.inference_mode():
        own, _ = variants.read(variants.make(name), text, cuts, mem_len=mem_len)
        full, _ = variants.read(as_full(name), text, cuts, mem_len=min(mem_len, 5))
    assert torch.allclose(own, full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", POSITIONS)
def test_gradients_equal_those_of_a_band(name, window):
    own, twin = blocks(name, window)
    for t, m in ((2 * window + 1, window), (3 * window, 0), (5 * window + 1, window - 1)):
        found = []
        for block, band in ((own, None), (twin, window)):
            x, older = inputs(t, m, gradient=True)
            out, _ = read(block, x, older, UNIFORM, band)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
            found.append(torch.autograd.grad((out * weights).sum(), (x, older, *block.parameters()), allow_unused=True))
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_long_calls_are_read_in_blocks(window, monkeypatch):
    own, _ = blocks("local-none-0-pre-0", window)
    shapes = []
    attend = local.FullAttention.attend
    monkeypatch.setattr(
        local.FullAttention,
        "attend",
        lambda self, q, k, *rest: (shapes.append((len(q), q.shape[2], k.shape[2])), attend(self, q, k, *rest))[1],
    )
    for t, expected in (
        (2 * window, (2, 2 * window, 2 * window + 1)),
        (2 * window + 1, (2 * 3, window, 2 * window)),
        (7 * window, (2 * 7, window, 2 * window)),
    ):
        read(own, *inputs(t, 1), UNIFORM)
        assert shapes.pop() == expected


def largest_saved(model, t):
    """Numbers of the largest tensor that one call of an attention branch keeps for its backward pass."""
    x = torch.randn(1, t, 12, dtype=torch.float64)
    sizes = []

    def note(saved):
        # Views cost nothing, however large they look.
        sizes.append(saved.untyped_storage().nbytes() // saved.element_size())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        read(model.attention, x, x.new_zeros(1, 0, 12), UNIFORM, None if hasattr(model.attention, "window") else 5)
    return max(sizes)


@pytest.mark.parametrize("name", POSITIONS)
def test_cost_is_linear_in_the_length(name):
    own, twin = blocks(name, 5)
    limit = 2 * 800 * 2 * 5 * 6
    assert largest_saved(own, 800) <= 4.1 * largest_saved(own, 200)
    assert largest_saved(own, 800) <= limit
    assert largest_saved(twin, 800) > 4 * limit  # blocks of queries, each over all keys that one of them sees
