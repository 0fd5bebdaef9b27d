"""Context of one call of the model, shared by all layers: positions, mask and values that several layers need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from xlcli.ops.attend_blocks import Band
from xlcli.ops.positions import DocumentPositions, Positions
from xlcli.ops.scoring import FarBias
from xlcli.ops.span import Span

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

T = TypeVar("T")


class VisibleKeys:
    """Boolean mask, true where a query may attend to a key. Every query sees a key, itself at least."""

    def __init__(self, visible: Tensor | None) -> None:
        self.visible = visible  # (t s), or with further axes before them; None if all keys are visible
        self._additions: dict[torch.dtype, Tensor] = {}

    def addition(self, dtype: torch.dtype) -> Tensor | None:
        """Addition to scores: 0, or -inf where hidden. None if all keys are visible. Made once for all layers."""
        # An addition is free in the backward pass; `masked_fill` of the scores would read them once more.
        if self.visible is None:
            return None
        if dtype not in self._additions:
            nothing = torch.zeros_like(self.visible, dtype=dtype)
            self._additions[dtype] = nothing.masked_fill(~self.visible, float("-inf"))
        return self._additions[dtype]


class Mask(VisibleKeys):
    """Keys that the queries of a call may attend to: earlier keys, at most `max_distance` back (None: any distance).

    `reach` (b t) is the number of tokens before each query in its document; None if no key is of an earlier document.
    """

    def __init__(self, positions: Positions, max_distance: int | None, reach: Tensor | None = None) -> None:
        self.positions = positions
        self.max_distance = max_distance
        self.reach = reach
        self._additions = {}

    @property
    def band(self) -> Band:
        """The visible keys as a band, in which keys of earlier documents are hidden."""
        return Band(self.positions.n_memory, self.max_distance, self._hidden)

    @property
    def sees_all_earlier(self) -> bool:
        """True if each query sees all keys up to itself."""
        longest = self.positions.farthest(None)
        return self.reach is None and self.positions.farthest(self.max_distance) == longest

    @cached_property
    def causal_bias(self) -> CausalBias:
        """This mask if `sees_all_earlier`, as PyTorch's kernels take it without a tensor."""
        from torch.nn.attention.bias import causal_lower_right  # it brings the compiler: 75 MB, and seconds

        n_new = self.positions.n_new
        return causal_lower_right(n_new, self.positions.n_memory + n_new)

    @cached_property
    def _hidden(self) -> Tensor | None:
        if self.reach is None:
            return None
        return self.positions.distance > self.reach[:, :, None]

    @cached_property
    def visible(self) -> Tensor | None:  # type: ignore[override]
        """Mask (t s), or (b 1 t s) with documents, true where a query sees a key; None if all are visible."""
        if self.positions.n_new == 1 and self.sees_all_earlier:
            return None
        distance = self.positions.distance
        seen = distance >= 0
        if self.max_distance is not None:
            seen = seen & (distance <= self.max_distance)
        if self._hidden is not None:
            seen = seen & ~self._hidden[:, None]
        return seen


GROUP = 128  # largest number of positions in one call of a function


class Rows:
    """Positions of a call where the boolean mask `needed` (b t) is true.

    They are packed into groups of equal size in the order of time, the last one padded, and each group is one call. The
    arithmetic of a position depends on no later position, so results before a change keep every bit.
    """

    def __init__(self, needed: Tensor) -> None:
        self.needed = needed
        self.batch, self.length = needed.shape
        self.index = rearrange(needed, "b t -> (t b)").nonzero().squeeze(-1)

    def apply(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Computes function(*inputs) (b t d) of inputs (b t ...) at the needed positions, each alone; elsewhere 0."""
        group_size, n_needed = min(GROUP, self.batch * self.length), len(self.index)
        n_padding = -n_needed % group_size  # up to a multiple of the size
        groups_of_inputs = []
        for x in inputs:
            needed = rearrange(x, "b t d -> (t b) d")[self.index]
            padded = F.pad(needed, (0, 0, 0, n_padding))
            groups_of_inputs.append(torch.split(padded[None], group_size, dim=1))
        results = [function(*group) for group in zip(*groups_of_inputs, strict=True)]
        out = torch.cat(results, dim=1)[0, :n_needed]
        full = out.new_zeros(self.length * self.batch, out.shape[-1]).index_copy(0, self.index, out)
        return rearrange(full, "(t b) d -> b t d", b=self.batch)


@dataclass(eq=False)
class AttentionContext:
    """Context of a call with `n_memory` remembered tokens followed by `n_new` new tokens."""

    span: Span
    _: KW_ONLY
    n_memory: int
    n_new: int
    keep: int  # number of tokens to remember after the call
    device: torch.device
    start: int = 0  # number of tokens read before the call
    offsets: Tensor | None = None  # position (b) in its text of the first token read; None: 0
    tokens: Tensor | None = None  # new tokens (b t), or None if no layer reads them
    window: int | None = None  # largest distance of a visible key in local attention; None: as the span says
    documents: DocumentPositions | None = None  # of the new tokens; None: the text is one document
    rows: Rows | None = None  # where the last block needs an output, but keys and values everywhere; None: everywhere

    def __post_init__(self) -> None:
        in_documents = reach = None
        if self.documents is not None:
            in_documents = self.documents.positions
            if self.documents.masked:
                reach = in_documents
        self.positions = Positions(
            n_memory=self.n_memory,
            n_new=self.n_new,
            first=self.span.next_position(self.start),
            offsets=None if self.span.kind == "segment" else self.offsets,
            device=self.device,
            documents=in_documents,
        )
        self.mask = Mask(self.positions, self.span.max_distance(self.window), reach)
        self._constants: dict[Hashable, Any] = {}
        self._learned: dict[Hashable, Any] = {}
        self._derived: dict[Hashable, AttentionContext] = {}

    def constant(self, key: Hashable, make: Callable[[], T]) -> T:
        """Value that several layers need, from `make` at first use; it depends on no parameter."""
        return _get(self._constants, key, make)

    def learned(self, key: Hashable, make: Callable[[], T]) -> T:
        """Value that several layers need, computed from parameters, so it carries gradients."""
        return _get(self._learned, key, make)

    @property
    def clamp_len(self) -> int | None:
        """Largest distance of position encodings that clamp distances; None if no visible key is further back."""
        return self._if_exceeded(self.span.clamp_len)

    @property
    def far_bias(self) -> FarBias | None:
        """Addition to the scores of far keys; None if no visible key is far."""
        full_len = self._if_exceeded(self.span.full_len)
        if full_len is None:
            return None
        return FarBias(self.span.far_bias, full_len, self.positions)

    def _if_exceeded(self, distance: int | None) -> int | None:
        """A distance, or None if no visible key is further back."""
        if distance is None or self.positions.farthest(self.mask.max_distance) <= distance:
            return None
        return distance

    def visible_sinks(self, n: int) -> Tensor | None:
        """Boolean mask (b 1 t n), true where one of the first n tokens of the text is too far back to be seen as a key.

        None if none is. A sequence of a joined state that began later has a negative offset.
        """
        limit = self.mask.max_distance
        if not n or limit is None or self.start + self.n_new - 1 <= limit:
            return None

        def make() -> Tensor:
            queries = torch.arange(self.start, self.start + self.n_new, device=self.device)[None]
            if self.offsets is not None:
                queries = self.offsets.clamp(max=0)[:, None] + queries
            sinks = torch.arange(n, device=self.device)
            return (queries[:, None, :, None] - sinks) > limit

        return self.constant(("sinks", n), make)

    @property
    def needs_output(self) -> bool:
        """True if the output of any position is needed; if not, a layer only updates its memory."""
        return self.rows is None or len(self.rows.index) > 0

    def for_rows(self, rows: Rows | None) -> AttentionContext:
        """This context with output at `rows` only; None: everywhere."""
        if rows is self.rows:
            return self
        context = copy.copy(self)
        context.rows = rows
        return context

    def apply(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs) at the positions whose output is needed; the function computes each one independently."""
        if self.rows is None:
            return function(*inputs)
        return self.rows.apply(function, *inputs)

    def narrow(self, window: int) -> AttentionContext:
        """Context of a layer that attends to, and remembers, at most `window` earlier tokens."""
        n_memory, keep = min(self.n_memory, window), min(self.keep, window)
        changes: dict[str, Any] = {"n_memory": n_memory, "keep": keep, "window": window, "rows": None}
        made = _get(self._derived, ("narrow", window), lambda: replace(self, **changes))
        return made.for_rows(self.rows)

    def block(self, window: int) -> AttentionContext:
        """Context of any block of local attention: `window` remembered tokens and `window` new ones."""
        sizes: dict[str, Any] = {"n_memory": window, "n_new": window, "keep": 0, "window": window}
        return _get(self._derived, ("block", window), lambda: AttentionContext(self.span, device=self.device, **sizes))

    def clear_learned(self) -> None:
        """Removes the values computed from parameters, and with them their graph, here and in derived contexts."""
        self._learned.clear()
        for context in self._derived.values():
            context.clear_learned()


def _get(values: dict[Hashable, Any], key: Hashable, make: Callable[[], T]) -> T:
    if key not in values:
        values[key] = make()
    value: T = values[key]
    return value
