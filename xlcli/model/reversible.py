"""Reversible stack (Kitaev et al. 2020, section 3): activation memory in training is independent of depth.

Both streams start as the embedding. In each block the attention branch of the second stream is added to the first, then
the feed-forward branch of the first to the second; both steps can be inverted. The output is the mean of the streams,
which is as large as one stream, so with ReZero the stack starts as the identity.

Token vectors of a layer, and encodings with placement `layers`, are added to the input of the attention branch, not to
the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xlcli.memory import Memory
from xlcli.model.stack import Block, Stack, StackOutput
from xlcli.ops.context import AttentionContext
from xlcli.ops.reversible import Layer, reversible_forward


class ReversibleStack(Stack):
    """Blocks whose activations are recomputed in the backward pass. No gradient flows into memory of any kind."""

    couple = staticmethod(reversible_forward)

    def prepare_compiling(self) -> None:
        """Leaves the blocks out: the compiler cannot trace their backward pass."""
        self.couple = torch.compiler.disable(reversible_forward)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        memories: tuple[Memory, ...],
        context: AttentionContext,
        last: AttentionContext | None = None,
    ) -> StackOutput:
        """Output for input (b t d), and the new memories."""
        y1, y2, after = self.couple(x, x, self.coupled_layers(memories, context))
        return StackOutput((y1 + y2) / 2, tuple(after))

    def coupled_layers(self, memories: tuple[Memory, ...], context: AttentionContext) -> list[Layer[Memory]]:
        """Branches of all blocks; F also returns the new memory."""
        return [_layer(block, memory, context) for block, memory in zip(self.layers(), memories, strict=True)]


def _layer(block: Block, memory: Memory, context: AttentionContext) -> Layer[Memory]:
    def attend(x: Tensor) -> tuple[Tensor, Memory]:
        x = block.embed(x, context)
        y, after = block.attention(block.attention_residual.pre(x), memory, context)
        # Each branch has a graph of its own, so cached values computed from parameters cannot be shared by layers.
        context.clear_learned()
        if torch.is_grad_enabled():
            after = after.map(Tensor.detach)
        return block.attention_residual.post(y), after

    def feed(x: Tensor) -> Tensor:
        return block.feedforward_residual.post(block.feedforward(block.feedforward_residual.pre(x)))

    vectors = [] if block.vectors is None else [block.vectors.weight]
    return Layer(
        attend,
        feed,
        [*vectors, *block.attention.parameters(), *block.attention_residual.parameters()],
        [*block.feedforward.parameters(), *block.feedforward_residual.parameters()],
    )
