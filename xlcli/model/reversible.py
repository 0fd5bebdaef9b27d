"""The reversible stack (Kitaev et al. 2020, section 3): training memory of activations that does not grow with depth.

Two streams begin as the embedding. In each block the attention branch of the second is added to the first, then the
feed-forward branch of the first to the second, whence either can be taken off again. The output is the mean of both:
it is as large as one stream, so that with ReZero, too, the stack begins as the identity.

Positions that every layer marks are marked on what the attention branch is given, not on the stream itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xlcli.memory import Memory
from xlcli.model.stack import Block, Stack, StackOutput
from xlcli.ops.reversible import Layer, reversible_forward, reversible_forward_plain
from xlcli.ops.span import AttentionContext


class ReversibleStack(Stack):
    """Blocks whose activations the backward pass rebuilds; without `rebuild` they are kept: the same by its definition.

    Rebuilt branches read the memory they read before, and no gradient reaches memory of any kind.
    """

    def __init__(self, blocks: Sequence[Block], final: nn.Module, *, rebuild: bool = True) -> None:
        super().__init__(blocks, final)
        self.rebuild = rebuild

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        """(b t d) through all blocks, and every memory after it, which holds what the attention branch is given."""
        pairs = zip(self.layers(), memories, strict=True)
        layers = [_layer(block, memory, context) for block, memory in pairs]
        through = reversible_forward if self.rebuild and torch.is_grad_enabled() else reversible_forward_plain
        y1, y2, after = through(x, x, layers)
        return StackOutput(self.final((y1 + y2) / 2), tuple(after))


def _layer(block: Block, memory: Memory, context: AttentionContext) -> Layer[Memory]:
    def attend(x: Tensor) -> tuple[Tensor, Memory]:
        x = block.attention.position.embed(x, context)
        y, after = block.attention(block.attention_residual.pre(x), memory, context)
        # What is made of parameters, such as a shared table of biases, has a gradient in its own computation only.
        context.clear_learned()
        if torch.is_grad_enabled():
            after = after.map(Tensor.detach)
        return block.attention_residual.post(y), after

    def feed(x: Tensor) -> Tensor:
        return block.feedforward_residual.post(block.feedforward(block.feedforward_residual.pre(x)))

    return Layer(
        attend,
        feed,
        [*block.attention.parameters(), *block.attention_residual.parameters()],
        [*block.feedforward.parameters(), *block.feedforward_residual.parameters()],
    )
