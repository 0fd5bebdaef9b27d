"""The language model: a function (tokens, state) -> (prediction, state'). It answers two questions and keeps nothing.

tokens b t ─▶ embedding ─▶ stack ─▶ x b t d ─▶ head ─▶ nll b t      how surprised was I
                                                    └▶ logits b v   what comes next
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from xlcli.config import ModelConfig
from xlcli.model.head import SoftmaxHead
from xlcli.model.stack import Stack
from xlcli.ops.span import Frame, Span
from xlcli.state import Hidden, KeyValue, Memory, State


class LanguageModel(nn.Module):
    """Embedding, stack and head."""

    def __init__(self, *, config: ModelConfig, embedding: nn.Module, stack: Stack, head: SoftmaxHead) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.stack = stack
        self.head = head

    @property
    def n_layers(self) -> int:
        """Depth; a token's prediction depends on at most n_layers * mem_len tokens before it."""
        return self.config.n_layers

    @property
    def parameter_count(self) -> int:
        """Numbers to learn, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def start(
        self,
        batch: int,
        *,
        mem_len: int,
        segment_len: int,
        span: Literal["uniform", "growing"] = "uniform",
        memory: Literal["keyvalue", "hidden"] = "keyvalue",
    ) -> State:
        """The state of `batch` rows that have read nothing. A `mem_len` of 0 makes segments independent."""
        like = self.head.weight
        config = self.config
        make: Memory
        if memory == "hidden":
            make = Hidden(like.new_empty(batch, 0, config.dim))
        else:
            empty = like.new_empty(batch, config.attention.n_heads, 0, config.head_dim)
            make = KeyValue(empty, empty, 0, 0)
        return State((make,) * config.n_layers, 0, Span.of(span, mem_len=mem_len, segment_len=segment_len))

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Last hidden states (b t d) of tokens (b t), and the state after them."""
        hidden = []
        for piece in self._pieces(tokens, state):
            x, state = self._read(piece, state)
            hidden.append(x)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1), state

    def nll(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """Nats (b t) of each target after its token, in token order, and the state after `tokens`."""
        x, state = self(tokens, state)
        return self.head.nll(x, targets), state

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of what follows the last token, and the state after `tokens`."""
        x, state = self(tokens, state)
        return self.head.logits(x[:, -1]), state

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        n_new = tokens.shape[1]
        seen = state.seen + n_new
        frame = Frame(state.span, n_memory=state.length, n_new=n_new, keep=state.span.keep(seen), device=tokens.device)
        x, layers = self.stack(self.embedding(tokens), state.layers, frame)
        return x, State(layers, seen, state.span)

    @staticmethod
    def _pieces(tokens: Tensor, state: State) -> list[Tensor]:
        """The call cut where memory must be dropped, which happens only when segments are independent."""
        room = state.span.room(state.seen)
        if room is None or tokens.shape[1] <= room:
            return [tokens]
        return [tokens[:, :room], *torch.split(tokens[:, room:], state.span.segment_len, dim=1)]
