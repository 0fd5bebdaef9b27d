"""Feed-forward branches, residual connections, blocks, and stacks of blocks.

Universal Transformer (Dehghani et al. 2019): blocks applied in several steps, with a memory for each step.

With adaptive computation time (Graves 2016, section 2; Dehghani et al., appendix C) a position halts when the sum of
its halting probabilities exceeds 1 - epsilon, or at the last step. The last probability is replaced by the remainder,
and the output is the sum of the states weighted by the probabilities. The state of a halted position is copied to the
following steps, where later tokens attend to it. The last block of a step computes only their keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.config.model import GATED
from xlcli.memory import Memory
from xlcli.model.attention import Attention
from xlcli.model.position.absolute import sinusoids
from xlcli.ops.context import AttentionContext, Rows
from xlcli.ops.layers import Dropout, Linear, cast_for_products, map_chunks

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by feed-forward kind; may overwrite their input
    "relu": F.relu_,
    "relu2": lambda x: F.relu_(x).square(),
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """down(act(up(x))) (Vaswani et al. 2017), or down(act(gate(x)) * up(x)) if gated (Shazeer 2020).

    `chunk_len` is the number of tokens of each sequence that are computed at once and recomputed in the backward pass
    (Kitaev et al. 2020, section 3): activations take (b c f) instead of (b t f). None computes all at once.
    """

    def __init__(
        self, *, kind: str, dim: int, ffn_dim: int, bias: bool, dropout: float, chunk_len: int | None = None
    ) -> None:
        super().__init__()
        self.chunk_len = chunk_len
        self.activation = ACTIVATIONS[kind]
        self.gate = Linear(dim, ffn_dim, bias=bias) if kind in GATED else None
        self.up = Linear(dim, ffn_dim, bias=bias)
        self.down = Linear(ffn_dim, dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.chunk_len is None:
            return self._branch(x)
        return map_chunks(self._branch, ((part,) for part in torch.split(x, self.chunk_len, dim=1)), x.device)

    def _branch(self, x: Tensor) -> Tensor:
        x = cast_for_products(x)
        inner: Tensor = self.up(x)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.gate(x)) * inner
        return self.down(self.dropout(inner))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A branch joined to the stream x, by the formula of its placement.

    pre        x + branch(norm(x))              Xiong et al. 2020
    post       norm(x + branch(x))              Vaswani et al. 2017, and the published Transformer-XL
    sandwich   x + norm(branch(norm(x)))        Ding et al. 2021
    rezero     x + alpha branch(x)              Bachlechner et al. 2021; alpha is learned and starts at 0
    parallel   x + attention(norm(x)) + feedforward(norm(x)), with a norm for each (Black et al. 2022, GPT-NeoX)
    """

    def __init__(self, placement: str, make_norm: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.placement = placement
        self.dropout = Dropout(dropout)
        self.norm = make_norm()
        self.last_norm: nn.Module = nn.Identity()
        self.alpha: nn.Parameter | None = None
        if placement == "sandwich":
            self.last_norm = make_norm()
        elif placement == "rezero":
            self.norm, self.alpha = nn.Identity(), nn.Parameter(torch.empty(()))
            self.initial_constants = {"alpha": 0.0}

    def pre(self, x: Tensor) -> Tensor:
        """Input of the branch (b t d)."""
        if self.placement == "post":
            return x
        return self.norm(x)  # type: ignore[no-any-return]

    def post(self, y: Tensor) -> Tensor:
        """Addition to the stream (b t d), from the output of the branch."""
        y = self.last_norm(y)
        if self.alpha is not None:
            y = self.alpha * y
        return self.dropout(y)  # type: ignore[no-any-return]

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.post(y)
        if self.placement == "post":
            x = self.norm(x)
        return x


class Ponder(NamedTuple):
    """Adaptive computation: ponder cost (b t), which the loss includes with a weight, and number of steps (b t)."""

    cost: Tensor
    steps: Tensor

    @staticmethod
    def join(parts: Iterable[Ponder | None]) -> Ponder | None:
        """Values of successive calls as those of one; None if the stack has none."""
        ponders = [part for part in parts if part is not None]
        if not ponders:
            return None
        return Ponder(joined([part.cost for part in ponders]), joined([part.steps for part in ponders]))


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


class StackOutput(NamedTuple):
    """Output x (b t d) of the blocks of a stack, new memories, and the ponder cost of adaptive computation, if any."""

    x: Tensor
    memories: tuple[Memory, ...]
    ponder: Ponder | None = None


class Block(nn.Module):
    """An attention branch and a feed-forward branch, each joined to the stream by its residual.

    `vectors`, if any, is a table of token vectors that are added to the input of the block. With placement `parallel`
    of the residuals both branches read that input; else the second one reads the sum with the first.
    """

    def __init__(
        self,
        *,
        vectors: nn.Embedding | None,
        attention: Attention,
        feedforward: FeedForward,
        attention_residual: Residual,
        feedforward_residual: Residual,
    ) -> None:
        super().__init__()
        self.vectors = vectors
        if vectors is not None:
            self.initial_constants = {"vectors.weight": 0.0}
        self.attention = attention
        self.feedforward = feedforward
        self.attention_residual = attention_residual
        self.feedforward_residual = feedforward_residual

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Output for input (b t d), and the new memory, whose kind the attention chooses."""
        x = self.embed(x, context)
        y, memory = self.attention(self.attention_residual.pre(x), memory, context)
        if context.needs_output:
            y = context.apply(self.after_attention, x, y)
        return y, memory

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        """Output of the block from its input x and the output y of attention."""
        stream = self.attention_residual.merge(x, y)
        is_parallel = self.feedforward_residual.placement == "parallel"
        y = self.feedforward(self.feedforward_residual.pre(x if is_parallel else stream))
        return self.feedforward_residual.merge(stream, y)

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Input x (b t d) with the token vectors and absolute positions of this layer added."""
        if self.vectors is not None:
            x = x + self.vectors(context.tokens)
        return self.attention.position.embed(x, context)


class Stack(nn.Module):
    """Blocks in sequence. The model applies the last layer `final`, usually a norm, to their output.

    With `input_residual` the input of block i is stream_scale[i] x + input_scale[i] x0, where x0 is that of the stack.

    With `recompute_activations` only the input of each block is kept for the backward pass, which computes the block
    again with the same dropout (Chen et al. 2016). A reversible stack keeps less and ignores it.
    """

    n_steps = 1  # number of times that all blocks are applied

    def __init__(self, blocks: Sequence[Block], final: nn.Module, *, input_residual: bool = False) -> None:
        super().__init__()
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.final = final
        self.input_residual = input_residual
        self.recompute_activations = False
        if input_residual:
            self.stream_scale = nn.Parameter(torch.empty(len(blocks)))
            self.input_scale = nn.Parameter(torch.empty(len(blocks)))
            self.initial_constants = {"stream_scale": 1.0, "input_scale": 0.0}

    def redraw(self, layers: Collection[int], generator: torch.Generator | None = None) -> None:
        """Draws new random features in these layers. Their memories become invalid."""
        for i, block in enumerate(self.blocks):
            if i in layers:
                block.attention.redraw(generator)

    def unrolled(self) -> Iterator[Block]:
        """Blocks in the order of use."""
        for _ in range(self.n_steps):
            yield from self.blocks

    @contextmanager
    def watched(self, outputs: list[Tensor]) -> Iterator[None]:
        """Appends the output (b t d) of each block to `outputs` whenever it is called. A reversible stack has none."""

        def append(block: nn.Module, inputs: Any, output: tuple[Tensor, Memory]) -> None:
            outputs.append(output[0])

        hooks = [block.register_forward_hook(append) for block in self.blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def accepts_depth(self, depth: int) -> bool:
        """True if the stack can run with a state of `depth` memories."""
        return depth == len(self.blocks)

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        after = []
        x0, last = x, len(self.blocks) - 1
        # Rows that are not needed are left out of the last block only: later tokens need the memories of all blocks.
        all_rows = context.for_rows(None)
        for i, (block, before) in enumerate(zip(self.blocks, memories, strict=True)):
            x = self.block_input(i, x, x0)
            block_context = context if i == last else all_rows
            if self.recompute_activations and torch.is_grad_enabled():
                x, memory = _recomputed(block, x, before, block_context)
            else:
                x, memory = block(x, before, block_context)
            after.append(memory)
        return StackOutput(x, tuple(after))

    def block_input(self, i: int, x: Tensor, x0: Tensor) -> Tensor:
        """Input of block i, from the output x of the block before it and the input x0 of the stack."""
        if not self.input_residual:
            return x
        return self.stream_scale[i] * x + self.input_scale[i] * x0


def _recomputed(block: Block, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
    """Output of a block of which only the input is kept for the backward pass, and the new memory."""

    def apply(x: Tensor) -> tuple[Tensor, Memory]:
        # Cached values computed from parameters belong to the graph of one block.
        context.clear_learned()
        out: tuple[Tensor, Memory] = block(x, memory, context)
        return out

    return checkpoint(apply, x, use_reentrant=False)  # type: ignore[no-any-return]


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
        return depth > 0 and depth % len(self.blocks) == 0  # any number of steps

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
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
        """Applies the blocks to each position until it halts (Graves 2016); returns a mean (b t d) of its states.

        The weight of a state is the probability p of halting in its step; the last step gets what is left of 1. Example
        with epsilon 0.01: with p = 0.5, 0.3 and 0.4 a position halts in the third step, with the remainder 0.2 as its
        weight there. The ponder cost is 3 steps plus 0.2.
        """
        steps = self._by_step(memories)
        after: tuple[Memory, ...] = ()
        out = torch.zeros_like(x)
        # Of each position (b t): whether it has not halted, the sum of its p, its number of steps and its remainder.
        running = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        total = x.new_zeros(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
        taken, remainder = torch.zeros_like(total), torch.zeros_like(total)
        for step, step_memories in enumerate(steps, start=1):
            rows = _rows(running) if step > 1 else None  # in the first step none has halted
            step_context = context.for_rows(rows)
            new, new_memories, _ = Stack.forward(self, self._signal(x, step), step_memories, step_context)
            after += new_memories
            if not step_context.needs_output:  # all positions have halted; later tokens need their memory of this step
                continue
            # Positions that have halted keep their state. The others halt when their p add up to nearly 1.
            x = torch.where(running[..., None], new.to(x.dtype), x)
            p = self.halt(self.final(x)).squeeze(-1).to(total.dtype).sigmoid()
            is_last_step = step == len(steps)
            halts = running & ((total + p > 1 - self.epsilon) | is_last_step)
            left = 1 - total
            weight_of_running = torch.where(running, p, 0.0)
            weight = torch.where(halts, left, weight_of_running)
            out = out + (weight[..., None] * x).to(out.dtype)
            remainder = torch.where(halts, left, remainder)
            taken = taken + running
            total = total + p
            running = running & ~halts
        return StackOutput(out, after, Ponder(taken + remainder, taken))


def _rows(running: Tensor) -> Rows | None:
    """The positions that have not halted; None (all) where reading them would wait for the device or break a graph."""
    would_wait = torch.is_grad_enabled() and running.device.type != "cpu"
    if would_wait or torch.compiler.is_compiling():
        return None
    return Rows(running)
