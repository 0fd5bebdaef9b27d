"""The language model: a function (tokens, state) -> (prediction, state'). It answers two questions and keeps nothing.

tokens b t ─▶ embedding ─▶ stack ─▶ x b t d ─▶ head ─▶ nll b t      how surprised was I
                                                    └▶ logits b v   what comes next
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from xlcli.config import ModelConfig
from xlcli.model.head import Head
from xlcli.model.position import Position
from xlcli.model.stack import Ponder, Stack
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span
from xlcli.state import State


class ScoreOutput(NamedTuple):
    """Nats (b t) of each target in token order, the state after them, and what adaptive computation cost."""

    nll: Tensor
    state: State
    ponder: Ponder | None


class LanguageModel(nn.Module):
    """Embedding, stack and head."""

    def __init__(
        self, *, config: ModelConfig, embedding: nn.Module, position: Position, stack: Stack, head: Head
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.position = position
        self.stack = stack
        self.head = head

    @property
    def n_parameters(self) -> int:
        """Numbers to learn, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def receptive_field(self, mem_len: int) -> int | None:
        """Number of earlier tokens that a prediction may depend on, the current token excluded; None if unbounded."""
        steps = [block.attention.receptive_field(mem_len) for block in self.stack.unrolled()]
        known = [step for step in steps if step is not None]
        return sum(known) if len(known) == len(steps) else None

    def init_state(
        self,
        batch: int,
        *,
        mem_len: int,
        segment_len: int,
        span: Literal["uniform", "growing"] = "uniform",
        memory: Literal["keyvalue", "hidden"] = "keyvalue",
        offsets: Sequence[int] | None = None,
    ) -> State:
        """The state of `batch` rows that have read nothing.

        Args:
            batch: Rows.
            mem_len: Tokens of memory each layer sees; 0 makes segments independent.
            segment_len: Their length.
            span: What a token sees.
            memory: What softmax attention keeps: projected keys and values, or inputs, for training.
            offsets: Where in its text each row begins, for absolute positions; None is at the beginning.
        """
        layers = tuple(block.attention.init_memory(batch, memory) for block in self.stack.unrolled())
        places = torch.as_tensor([0] * batch if offsets is None else offsets, dtype=torch.int64)
        device = next(self.parameters()).device
        return State(layers, 0, Span.make(span, mem_len=mem_len, segment_len=segment_len), places.to(device))

    def reset(self, state: State) -> State:
        """The state of the same rows, by the same rule, that have read nothing; offsets are at the beginning again."""
        empty = self.reset_layers(state, range(self.config.n_layers))
        return replace(empty, seen=0, offsets=torch.zeros_like(state.offsets))

    def reset_layers(self, state: State, layers: Collection[int]) -> State:
        """The state whose `layers`, named by number, have an empty memory.

        Only linear and hashed attention can have one when tokens have been read.
        """
        memories = tuple(
            memory.empty() if i % self.config.n_layers in layers else memory for i, memory in enumerate(state.layers)
        )
        return replace(state, layers=memories)

    def is_compatible(self, state: State) -> bool:
        """Whether a state from elsewhere has the layers, shapes and lengths of this model's."""
        n_kept = state.span.n_kept(state.seen)
        return self.stack.accepts_depth(len(state.layers)) and all(
            block.attention.accepts(memory, n_kept)
            for block, memory in zip(itertools.cycle(self.stack.layers()), state.layers, strict=False)
        )

    def inference_settings(self, state: State) -> dict[str, int]:
        """Settings fixed by the state, which may differ from the model's: `n_steps`, `n_hashes`."""
        settings = {"n_steps": len(state.layers) // self.config.n_layers}
        for memory in state.layers:
            settings |= memory.settings
        return settings

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Last hidden states (b t d) of tokens (b t), and the state after them."""
        x, state, _ = self._read(tokens, state)
        return x, state

    def score(self, tokens: Tensor, targets: Tensor, state: State) -> ScoreOutput:
        """Nats (b t) of each target after its token, in token order, and the state after `tokens`."""
        x, state, ponder = self._read(tokens, state)
        return ScoreOutput(self.head.nll(x, targets), state, ponder)

    def nll(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """`score` without the cost of adaptive computation."""
        return self.score(tokens, targets, state)[:2]

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of what follows the last token, and the state after `tokens`."""
        x, state = self(tokens, state)
        return self.head.logits(x[:, -1]), state

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Ponder | None]:
        hidden, ponders = [], []
        for piece in self._pieces(tokens, state):
            n_new = piece.shape[1]
            seen = state.seen + n_new
            context = AttentionContext(
                state.span,
                n_memory=state.span.n_kept(state.seen),
                n_new=n_new,
                keep=state.span.n_kept(seen),
                device=tokens.device,
                start=state.seen,
                offsets=state.offsets,
            )
            x, layers, ponder = self.stack(self.position.embed(self.embedding(piece), context), state.layers, context)
            state = State(layers, seen, state.span, state.offsets)
            hidden.append(x)
            ponders.append(ponder)
        if len(hidden) == 1:
            return hidden[0], state, ponders[0]
        return torch.cat(hidden, dim=1), state, _joined(ponders)

    @staticmethod
    def _pieces(tokens: Tensor, state: State) -> list[Tensor]:
        """The call cut where memory must be dropped, which happens only when segments are independent."""
        room = state.span.n_until_reset(state.seen)
        if room is None or tokens.shape[1] <= room:
            return [tokens]
        return [tokens[:, :room], *torch.split(tokens[:, room:], state.span.segment_len, dim=1)]


def _joined(ponders: Sequence[Ponder | None]) -> Ponder | None:
    """The costs of successive pieces as one."""
    there = [ponder for ponder in ponders if ponder is not None]
    return Ponder(*(torch.cat(parts, dim=1) for parts in zip(*there, strict=True))) if there else None
