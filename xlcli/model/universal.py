"""The Universal Transformer (Dehghani et al. 2019): the same blocks applied step after step, one memory a step.

With adaptive computation time (Graves 2016, section 2; appendix C of the former) each position halts when its halting
probabilities exceed 1 - epsilon, or at the last step, and the remainder takes the place of the last one; its output is
the sum of its states weighted by them. From then on its state is copied, so that later tokens still find it at every
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from xlcli.memory import Memory
from xlcli.model.position.sinusoidal import sinusoids
from xlcli.model.stack import Block, Ponder, Stack, StackOutput
from xlcli.ops.context import AttentionContext


class UniversalStack(Stack):
    """All blocks, `n_steps` times. How often is decided by the number of memories, so it may differ from training.

    `time_signal` multiplies what marks the step; 1 is the paper's, whose embeddings are as large as that, 0 is none.
    """

    def __init__(self, blocks: Sequence[Block], final: nn.Module, *, n_steps: int, time_signal: float) -> None:
        super().__init__(blocks, final)
        self.n_steps = n_steps
        self.time_signal = time_signal

    def unrolled(self) -> Iterator[Block]:
        """Blocks in the order of use, `n_steps` times."""
        for _ in range(self.n_steps):
            yield from self.layers()

    def accepts_depth(self, depth: int) -> bool:
        """Any positive number of steps."""
        return depth > 0 and depth % len(self.blocks) == 0

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        """(b t d) through all steps, and every memory after it."""
        after: tuple[Memory, ...] = ()
        for step, before in enumerate(self._by_step(memories), start=1):
            x, new = self._pass(self._signal(x, step), before, context)
            after += new
        return StackOutput(self.final(x), after)

    def _by_step(self, memories: tuple[Memory, ...]) -> list[tuple[Memory, ...]]:
        n = len(self.blocks)
        return [memories[i : i + n] for i in range(0, len(memories), n)]

    def _signal(self, x: Tensor, step: int) -> Tensor:
        """x with the step, counted from 1, marked: a sinusoid, as for positions (section 2.1, equations 4 and 5)."""
        if not self.time_signal:
            return x
        signal = sinusoids(torch.full((), step, device=x.device), x.shape[-1])
        return x + (self.time_signal * signal).to(x.dtype)


class AdaptiveStack(UniversalStack):
    """Each position halts by itself, at the last step at the latest.

    Halting reads the state as the head would, which means normalized unless blocks already do that at their end: the
    stream of a pre-norm network grows from step to step, and the probabilities would saturate.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        final: nn.Module,
        *,
        dim: int,
        n_steps: int,
        time_signal: float,
        epsilon: float,
        halt_bias: float,
    ) -> None:
        super().__init__(blocks, final, n_steps=n_steps, time_signal=time_signal)
        self.epsilon = epsilon
        self.halt = nn.Linear(dim, 1)
        self.initial_constants = {"halt.bias": halt_bias}

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        """(b t d) through as many steps as each position asks for, every memory after it, and what that cost."""
        steps = self._by_step(memories)
        running = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        total = x.new_zeros(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        taken, remainder = torch.zeros_like(total), torch.zeros_like(total)
        out = torch.zeros_like(x)
        after: tuple[Memory, ...] = ()
        for step, before in enumerate(steps, start=1):
            signalled = self._signal(x, step)
            if not (torch.is_grad_enabled() or running.any()):
                # Nobody's state changes any more, but later tokens will look for it here.
                after += self._remember(signalled, before, context)
                continue
            new, memory = self._pass(signalled, before, context)
            after += memory
            p = self.halt(self.final(new)).squeeze(-1).to(total.dtype).sigmoid()
            halts = running & ((total + p > 1 - self.epsilon) | (step == len(steps)))
            left = 1 - total
            weight = torch.where(halts, left, torch.where(running, p, 0.0))
            out = out + (weight[..., None] * new).to(out.dtype)
            remainder = torch.where(halts, left, remainder)
            taken = taken + running
            x = torch.where(running[..., None], new.to(x.dtype), x)
            running = running & ~halts
            total = total + p
        return StackOutput(self.final(out), after, Ponder(taken + remainder, taken))

    def _remember(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> tuple[Memory, ...]:
        """Every memory after a step whose output nobody asks for: all of the last block but its memory is left out."""
        *first, last = self.layers()
        after = []
        for block, before in zip(first, memories[:-1], strict=True):
            x, memory = block(x, before, context)
            after.append(memory)
        return *after, last.update_memory(x, memories[-1], context)
