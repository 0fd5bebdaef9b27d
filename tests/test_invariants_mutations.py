"""Mutations: each defect, introduced on purpose, is caught by the test of the invariant that it violates."""

import copy
import inspect
from pathlib import Path

import pytest
import test_invariants as invariants
import torch
from variants import COMBINATIONS, IN_TURN, pairs

from xlcli.memory import Hidden, Sums
from xlcli.model.attention import linear, local
from xlcli.model.position.absolute import AddedPosition, AxialPosition, SinusoidalPosition
from xlcli.model.position.distance import (
    AlibiPosition,
    Contextual1Position,
    Contextual2Position,
    ShawPosition,
    T5Position,
)
from xlcli.model.position.rope import RopeEmbedding, RopePosition
from xlcli.model.stack import Residual
from xlcli.ops import attend, attend_blocks
from xlcli.ops.attend_blocks import Band
from xlcli.ops.context import AttentionContext, Mask
from xlcli.ops.positions import Positions
from xlcli.ops.scoring import FarPart
from xlcli.ops.span import Span
from xlcli.state import State

EXACT = ("full", "local", "linear")
ABSOLUTE = ("sinusoidal", "learned", "axial")
TABLES = ("t5", "shaw", "contextual-1", "contextual-2")
BIASES = ("alibi", "t5", "contextual-1", "contextual-2")


def names(attention=("full", "local"), *, position=None, around="", **settings):
    """Combinations of `IN_TURN` with these kinds; `settings` are those of the position."""
    return [
        name
        for name in IN_TURN
        if around in name
        and COMBINATIONS[name]["attention"]["kind"] in attention
        and (position is None or COMBINATIONS[name]["position"]["kind"] in position)
        and all(COMBINATIONS[name]["position"].get(key) == value for key, value in settings.items())
    ]


def recorded(found):
    """Combinations without a reversible stack, which detaches every memory."""
    return [name for name in found if COMBINATIONS[name].get("stack", {}).get("kind") != "reversible"]


WITH_BIAS = (AlibiPosition, T5Position, ShawPosition, Contextual1Position, Contextual2Position)
WITH_EMBEDDING = (SinusoidalPosition, AxialPosition, RopeEmbedding)
ON_HEADS = (AddedPosition,)


def altered(context, **facts):
    """Context with other positions and the same mask."""
    other = copy.copy(context)
    other.positions = altered_positions(context.positions, **facts)
    other._constants, other._learned = {}, {}
    return other


def altered_positions(positions, **facts):
    other = copy.copy(positions)
    for computed in ("distance", "absolute", "keys"):
        other.__dict__.pop(computed, None)
    other.__dict__.update(facts)
    return other


def alter(monkeypatch, encodings, hook, facts):
    """Calls this hook of these encodings with `facts(positions)` changed; masks stay correct."""
    for encoding in encodings:
        right = getattr(encoding, hook)

        def wrong(self, *args, right=right):
            return right(
                self, *(altered(a, **facts(a.positions)) if isinstance(a, AttentionContext) else a for a in args)
            )

        monkeypatch.setattr(encoding, hook, wrong)


def alter_absolute(monkeypatch, facts):
    """`alter` of every absolute encoding."""
    alter(monkeypatch, WITH_EMBEDDING, "embed", facts)
    alter(monkeypatch, ON_HEADS, "place", facts)


def distances_off_by_one(monkeypatch, by=1):
    right = Positions.distance.func
    monkeypatch.setattr(Positions, "distance", property(lambda self: right(self) + by))
    monkeypatch.setattr(attend, "_attend_in_blocks", lambda *given: None)


def distances_too_short(monkeypatch):
    distances_off_by_one(monkeypatch, by=-1)


def distances_without_memory(monkeypatch):
    alter(monkeypatch, WITH_BIAS, "bias", lambda p: {"distance": (p.distance - p.n_memory).clamp(min=0)})


def distances_of_values_without_memory(monkeypatch):
    alter(monkeypatch, [ShawPosition], "value_bias", lambda p: {"distance": p.distance - p.n_memory})


def distances_all_alike(monkeypatch):
    alter(monkeypatch, WITH_BIAS, "bias", lambda p: {"distance": torch.zeros_like(p.distance)})


def angles_without_memory(monkeypatch):
    right = Positions.angles

    def wrong(self, n_features, dtype):
        """Positions of new tokens count from the call, positions of all keys from the oldest one."""
        keys = right(altered_positions(self, n_memory=0, n_new=self.n_memory + self.n_new), n_features, dtype)
        queries = right(altered_positions(self, n_memory=0), n_features, dtype)
        return tuple(torch.cat((k[: self.n_memory], q)) for k, q in zip(keys, queries, strict=True))

    monkeypatch.setattr(Positions, "angles", wrong)


def some_distances_are_not_clamped(monkeypatch):
    monkeypatch.setattr(attend_blocks, "FarPart", lambda first: FarPart(first // 2))


def positions_begin_again_at_every_call(monkeypatch):
    alter_absolute(monkeypatch, lambda p: {"first": 0})


def positions_begin_where_the_text_does(monkeypatch):
    alter_absolute(monkeypatch, lambda p: {"offsets": None})


def keys_turned_without_start(monkeypatch):
    alter(monkeypatch, [RopePosition], "place", lambda p: {"first": 0})


def segments_go_on_counting(monkeypatch):
    monkeypatch.setattr(Span, "next_position", lambda self, seen: seen)


def rows_all_begin_where_the_first_does(monkeypatch):
    alter_absolute(monkeypatch, lambda p: {"offsets": p.offsets[:1]})


def a_future_token_is_visible(monkeypatch):
    right = Mask.visible.func

    def wrong(self):
        return right(Mask(altered_positions(self.positions, distance=self.positions.distance + 1), self.max_distance))

    monkeypatch.setattr(Mask, "visible", property(wrong))
    monkeypatch.setattr(attend, "_attend_in_blocks", lambda *given: None)


def a_future_token_is_in_the_band(monkeypatch):
    right = Band.edges

    def wrong(self, query, like):
        last, first = right(self, query, like)
        return last.triu(2), first

    monkeypatch.setattr(Band, "edges", wrong)


def a_token_too_far_is_in_the_band(monkeypatch):
    right = Mask.band.fget

    def wrong(self):
        band = right(self)
        return band if band.max_distance is None else band._replace(max_distance=band.max_distance + 1)

    monkeypatch.setattr(Mask, "band", property(wrong))


def a_future_token_is_summed(monkeypatch):
    right = linear.attend_linear

    def wrong(q, k, v, s, z):
        return right(q, k.roll(-1, 2), v.roll(-1, 2), s, z)

    monkeypatch.setattr(linear, "attend_linear", wrong)


def blocks_with_window(monkeypatch, change):
    right = AttentionContext.block

    def wrong(self, window):
        block = copy.copy(right(self, window))
        block.mask = Mask(block.positions, self.span.max_distance(window + change))
        return block

    monkeypatch.setattr(AttentionContext, "block", wrong)


def band_too_wide(monkeypatch):
    blocks_with_window(monkeypatch, 1)


def band_too_narrow(monkeypatch):
    blocks_with_window(monkeypatch, -1)


def padding_before_memory_is_visible(monkeypatch):
    right = local.block_mask
    monkeypatch.setattr(local, "block_mask", lambda block, n_blocks, n_memory: right(block, n_blocks, block.n_memory))


def sums_not_carried(monkeypatch):
    monkeypatch.setattr(linear, "sums_to_keep", lambda s, z, context: Sums(torch.zeros_like(s), torch.zeros_like(z)))


def sums_not_forgotten(monkeypatch):
    monkeypatch.setattr(linear, "sums_to_keep", lambda s, z, context: Sums(s.detach(), z.detach()))


def sums_with_gradient(monkeypatch):
    monkeypatch.setattr(linear, "sums_to_keep", lambda s, z, context: Sums(s, z))


def memory_with_gradient(monkeypatch):
    def extend(self, x, project, keep):
        both = torch.cat((self.h, x), dim=1)
        return *project(both), Hidden(both[:, both.shape[1] - keep :])

    monkeypatch.setattr(Hidden, "extend", extend)


def memory_too_short(monkeypatch):
    right = Span.n_kept
    monkeypatch.setattr(Span, "n_kept", lambda self, seen: min(right(self, seen), max(self.mem_len - 1, 0)))


def a_fork_shares(monkeypatch):
    monkeypatch.setattr(State, "fork", lambda self: self)


def offsets_not_saved(monkeypatch):
    right = State.tensors
    monkeypatch.setattr(State, "tensors", lambda self: right(self) | {"offsets": torch.zeros_like(self.offsets)})


def a_parameter_forgotten(monkeypatch):
    monkeypatch.setattr(Residual, "post", lambda self, y: self.last_norm(y))


BROKEN = [
    (distances_off_by_one, invariants.test_prefix, names()[::3]),
    (distances_too_short, invariants.test_span, names(["full"])),
    (distances_without_memory, invariants.test_cutting, names(position=TABLES)),
    (distances_of_values_without_memory, invariants.test_cutting, names(position=["shaw"])),
    (distances_all_alike, invariants.test_positions_matter, [n for n in names(position=BIASES) if not pairs(n)]),
    (angles_without_memory, invariants.test_cutting, names(position=["xl"], clamp_len=None)),
    (some_distances_are_not_clamped, invariants.test_cutting, names(["full"], position=["xl", "rope"], clamp_len=9)),
    (positions_begin_again_at_every_call, invariants.test_cutting, names(position=ABSOLUTE)),
    (positions_begin_where_the_text_does, invariants.test_receptive_field, names(position=ABSOLUTE)),
    (rows_all_begin_where_the_first_does, invariants.test_rows, names(position=ABSOLUTE)),
    (segments_go_on_counting, invariants.test_segments_are_independent, names(EXACT, position=ABSOLUTE)),
    (segments_go_on_counting, invariants.test_segments_are_independent, names(["linear"], position=["rope"])),
    (offsets_not_saved, invariants.test_continue, names(position=ABSOLUTE)),
    (keys_turned_without_start, invariants.test_cutting, names(EXACT, position=["rope"], placement=None)),
    (a_future_token_is_visible, invariants.test_prefix, names()[::3]),
    (a_future_token_is_in_the_band, invariants.test_prefix, names(["full"], position=["none", "xl"], clamp_len=None)),
    (a_token_too_far_is_in_the_band, invariants.test_span, names(["full"], position=["none", "xl"], clamp_len=None)),
    (a_future_token_is_summed, invariants.test_prefix, names(["linear"])),
    (band_too_wide, invariants.test_span, names(["local"])),
    (band_too_narrow, invariants.test_span, names(["local"])),
    (padding_before_memory_is_visible, invariants.test_cutting, names(["local"])),
    (sums_not_carried, invariants.test_cutting, names(["linear"])),
    (sums_not_forgotten, invariants.test_span, names(["linear"])),
    (sums_with_gradient, invariants.test_training_memory_has_no_gradient, recorded(names(["linear"]))),
    (memory_with_gradient, invariants.test_training_memory_has_no_gradient, recorded(names()[::3])),
    (memory_too_short, invariants.test_cutting, names(["full"])),
    (a_fork_shares, invariants.test_a_fork_is_not_touched, names()[::3]),
    (a_parameter_forgotten, invariants.test_gradients_reach_every_parameter, names(around="rezero")),
]  # fmt: skip
"""Mutation, test of the invariant that it violates, and affected combinations."""


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("breaking", "invariant", "affected"), BROKEN, ids=[breaking.__name__ for breaking, *_ in BROKEN]
)
def test_broken_on_purpose(breaking, invariant, affected, most, monkeypatch, tmp_path):
    assert affected
    breaking(monkeypatch)
    wanted = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(invariant).parameters else {}
    for name in affected[:most]:
        with pytest.raises(AssertionError) as caught:
            invariant(name, **wanted)
        assert Path(caught.traceback[-1].path).name == "test_invariants.py", name
