"""Stacks: the arithmetic that joins the two branches of every block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from xlcli.ops.span import Frame
from xlcli.state import Memory


class Block(nn.Module):
    """An attention branch and a feed-forward branch with their norms."""

    def __init__(
        self,
        *,
        attention: nn.Module,
        feedforward: nn.Module,
        attention_norm: nn.Module,
        feedforward_norm: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feedforward = feedforward
        self.attention_norm = attention_norm
        self.feedforward_norm = feedforward_norm
        self.dropout = nn.Dropout(dropout)


class Stack(nn.Module):
    """Blocks in order; a subclass says how their branches are joined. Memory holds what each branch is given."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, memories: tuple[Memory, ...], frame: Frame) -> tuple[Tensor, tuple[Memory, ...]]:
        """(b t d) through all blocks, and every layer's memory after it."""
        raise NotImplementedError

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block


class PreNormStack(Stack):
    """x + branch(norm(x)), and one norm at the end (Xiong et al. 2020)."""

    def __init__(self, blocks: list[Block], final_norm: nn.Module) -> None:
        super().__init__(blocks)
        self.final_norm = final_norm

    def forward(self, x: Tensor, memories: tuple[Memory, ...], frame: Frame) -> tuple[Tensor, tuple[Memory, ...]]:
        """(b t d) through all blocks, and every layer's memory after it."""
        after = []
        for block, before in zip(self._blocks(), memories, strict=True):
            y, memory = block.attention(block.attention_norm(x), before, frame)
            x = x + block.dropout(y)
            x = x + block.dropout(block.feedforward(block.feedforward_norm(x)))
            after.append(memory)
        return self.final_norm(x), tuple(after)


class PostNormStack(Stack):
    """norm(x + branch(x)), as in Vaswani et al. 2017 and the published Transformer-XL."""

    def __init__(self, blocks: list[Block], dropout: float) -> None:
        super().__init__(blocks)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memories: tuple[Memory, ...], frame: Frame) -> tuple[Tensor, tuple[Memory, ...]]:
        """(b t d) through all blocks, and every layer's memory after it."""
        after = []
        for block, before in zip(self._blocks(), memories, strict=True):
            y, memory = block.attention(x, before, frame)
            x = block.attention_norm(x + block.dropout(y))
            x = block.feedforward_norm(x + block.dropout(block.feedforward(x)))
            after.append(memory)
        return self.dropout(x), tuple(after)
