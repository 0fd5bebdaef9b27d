"""Universal Transformer (Dehghani et al. 2019): blocks applied in several steps, with a memory for each step.

With adaptive computation time (Graves 2016, section 2; Dehghani et al., appendix C) a position halts when the sum of
its halting probabilities exceeds 1 - epsilon, or at the last step. The last probability is replaced by the remainder,
and the output is the sum of the states weighted by the probabilities. The state of a halted position is copied to the
following steps, where later tokens attend to it. The last block of a step computes only keys and values of halted
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xlcli.memory import Memory
from xlcli.model.position.absolute import sinusoids
from xlcli.model.stack import Block, Ponder, Stack, StackOutput
from xlcli.ops.context import AttentionContext, Rows


class UniversalStack(Stack):
    """All blocks applied `n_steps` times. `forward` takes the number of steps from the memories of the state.

    `time_signal` is the amplitude of the sinusoid of the step; 0 disables it. In the paper it is 1, the scale of the
    embeddings.
    """

    def __init__(self, blocks: Sequence[Block], final: nn.Module, *, n_steps: int, time_signal: float) -> None:
        super().__init__(blocks, final)
        self.n_steps = n_steps
        self.time_signal = time_signal

    def accepts_depth(self, depth: int) -> bool:
        """Any positive number of steps."""
        return depth > 0 and depth % len(self.blocks) == 0

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        """Output for input (b t d), and the new memories."""
        after: tuple[Memory, ...] = ()
        for step, before in enumerate(self._by_step(memories), start=1):
            x, new, _ = Stack.forward(self, self._signal(x, step), before, context)
            after += new
        return StackOutput(x, after)

    def _by_step(self, memories: tuple[Memory, ...]) -> list[tuple[Memory, ...]]:
        n = len(self.blocks)
        return [memories[i : i + n] for i in range(0, len(memories), n)]

    def _signal(self, x: Tensor, step: int) -> Tensor:
        """Input plus the sinusoid of the step, counted from 1 (section 2.1, equations 4 and 5)."""
        if not self.time_signal:
            return x
        signal = sinusoids(torch.full((), step, device=x.device), x.shape[-1])
        return x + (self.time_signal * signal).to(x.dtype)


class AdaptiveStack(UniversalStack):
    """Universal stack with adaptive computation time: each position halts independently, or at the last step.

    Halting probabilities are computed from the state after the last norm, as logits are: the stream of a pre-norm
    network grows from step to step, and probabilities computed from it would saturate.
    """

    def __init__(
        self, blocks: Sequence[Block], final: nn.Module, *, dim: int, epsilon: float, halt_bias: float, **steps: Any
    ) -> None:
        super().__init__(blocks, final, **steps)
        self.epsilon = epsilon
        self.halt = nn.Linear(dim, 1)
        self.initial_constants = {"halt.bias": halt_bias}

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        """Output for input (b t d), the new memories, and the ponder cost."""
        steps = self._by_step(memories)
        running = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        total = x.new_zeros(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        taken, remainder = torch.zeros_like(total), torch.zeros_like(total)
        out = torch.zeros_like(x)
        after: tuple[Memory, ...] = ()
        for step, before in enumerate(steps, start=1):
            signalled = self._signal(x, step)
            rows = _rows(running) if step > 1 else None
            own = context.for_rows(rows)
            new, memory, _ = Stack.forward(self, signalled, before, own)
            after += memory
            if not own.needs_output:  # all positions have halted; later tokens need their memory of this step
                continue
            new = torch.where(running[..., None], new.to(x.dtype), x)
            p = self.halt(self.final(new)).squeeze(-1).to(total.dtype).sigmoid()
            halts = running & ((total + p > 1 - self.epsilon) | (step == len(steps)))
            left = 1 - total
            weight = torch.where(halts, left, torch.where(running, p, 0.0))
            out = out + (weight[..., None] * new).to(out.dtype)
            remainder = torch.where(halts, left, remainder)
            taken = taken + running
            x = new
            running = running & ~halts
            total = total + p
        return StackOutput(out, after, Ponder(taken + remainder, taken))


def _rows(running: Tensor) -> Rows | None:
    """The positions that have not halted; None (all) where reading them would wait for the device or break a graph."""
    waits = torch.is_grad_enabled() and running.device.type != "cpu"
    return None if waits or torch.compiler.is_compiling() else Rows(running)
