"""Reversible stack (Kitaev et al. 2020, section 3): activation memory in training is independent of depth.

Both streams start as the embedding. In each block the attention branch of the second stream is added to the first, then
the feed-forward branch of the first to the second; both steps can be inverted. The output is the mean of the streams,
which is as large as one stream, so with ReZero the stack starts as the identity.

Token vectors of a layer, and encodings with placement `layers`, are added to the input of attention, not to the stream.

y1 = x1 + F(x2)    y2 = x2 + G(y1)         and inverted         x2 = y2 - G(y1)    x1 = y1 - F(x2)

Only the last y1 and y2 are kept, for any depth: the backward pass recomputes the inputs of each branch, layer by layer,
and calls the branch again with the same random numbers and number types (Gomez et al. 2017, section 3).

Streams and their gradients are float64 and are rounded before they enter a branch. The recomputed input of a branch is
then equal to the original to the bit. With float32 streams it would differ in the last bits, a branch that multiplies
in bfloat16 or hashes could return something else, and errors would grow from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from xlcli.memory import Memory
from xlcli.model.stack import Block, Stack, StackOutput
from xlcli.ops.context import AttentionContext


class Layer(NamedTuple):
    """Branches F and G, from (b t d) to (b t d), and the parameters that each uses. F returns a further value.

    A branch is called again in the backward pass, so it must not modify its inputs or the state that it reads.
    """

    f: Callable[[Tensor], tuple[Tensor, Any]]
    g: Callable[[Tensor], Tensor]
    f_parameters: Sequence[Tensor]
    g_parameters: Sequence[Tensor]


def reversible_forward(x1: Tensor, x2: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, Tensor, list[Any]]:
    """Both streams (b t d) after all layers, and the further value of each F. Activations are not kept.

    Gradients flow to the streams and to the listed parameters only. Without gradients, streams keep their own type.
    """
    values: list[Any] = []
    if not torch.is_grad_enabled():
        for layer in layers:
            y, value = layer.f(x2)
            values.append(value)
            x1 = x1 + y
            x2 = x2 + layer.g(x1)
        return x1, x2, values
    call = _Call(x1, len(layers))
    y1, y2 = x1.double(), x2.double()
    for place, layer in enumerate(layers, start=1):
        # Autograd passes gradients to parameters that are arguments, each once even if both branches use it.
        used = {id(p): p for p in (*layer.f_parameters, *layer.g_parameters) if p.requires_grad}
        y1, y2 = _Recomputed.apply(y1, y2, layer, values, call, place, *used.values())  # type: ignore[no-untyped-call]
    return y1.to(x1.dtype), y2.to(x2.dtype), values


class _Recomputed(torch.autograd.Function):
    """Layer number `place`, from 1. The last layer saves its outputs; other layers get recomputed ones from `call`."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, layer: Layer, values: list[Any], call: _Call, place: int, *used: Tensor
    ) -> tuple[Tensor, Tensor]:
        def f(x: Tensor) -> Tensor:
            y, value = layer.f(x)
            values.append(value)
            return y

        before_f = _random_state(x1)
        y1 = x1 + call.branch(f, x2)[1].detach()
        before_g = _random_state(x1)
        y2 = x2 + call.branch(layer.g, y1)[1].detach()
        ctx.layer, ctx.call, ctx.place, ctx.used = layer, call, place, used
        ctx.random_states = before_f, before_g
        # Parameters are saved so that autograd detects changes before the backward pass.
        is_last = place == call.n_layers
        ctx.save_for_backward(*used, *((y1, y2) if is_last else ()))
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and of the parameters; leaves the inputs in `call`, for the layer before."""
        call: _Call = ctx.call
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # raises an error if a parameter has changed
        # The last layer has saved its outputs behind the parameters; those of another one are recomputed by the next.
        is_last = ctx.place == call.n_layers
        y1, y2 = saved[-2:] if is_last else call.recomputed
        gradients: dict[int, Tensor] = {}

        def differentiate(
            branch: Callable[[Tensor], Tensor], x: Tensor, d: Tensor, parameters: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor]:
            """Recomputed output of a branch, and the gradient of its input; collects gradients of parameters."""
            x, y = call.branch(branch, x)
            learned = [p for p in parameters if p.requires_grad]
            d_x, *of_learned = torch.autograd.grad(y, (x, *learned), d.to(y.dtype), allow_unused=True)
            for parameter, gradient in zip(learned, of_learned, strict=True):
                if gradient is None:  # the branch does not use it in this call
                    continue
                before = gradients.get(id(parameter))
                gradients[id(parameter)] = gradient if before is None else before + gradient
            return y.detach(), d_x

        # The steps of `forward` in reverse order, each with the random numbers that it had:
        # y2 = x2 + g(y1), then y1 = x1 + f(x2).
        before_f, before_g = ctx.random_states
        devices = [call.device] if call.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            _restore(*before_g)
            g, d_of_g = differentiate(ctx.layer.g, y1, d2, ctx.layer.g_parameters)
            x2, d1 = y2 - g, d1 + d_of_g
            _restore(*before_f)
            f, d_of_f = differentiate(lambda x: ctx.layer.f(x)[0], x2, d1, ctx.layer.f_parameters)
            x1, d2 = y1 - f, d2 + d_of_f
        call.recomputed = (x1, x2) if ctx.place > 1 else ()
        return d1, d2, None, None, None, None, *(gradients.get(id(p)) for p in ctx.used)


class _Call:
    """Values shared by the layers of one call: settings for calling branches, and the inputs recomputed last.

    In the backward pass a layer leaves its inputs in `recomputed`: they are the outputs of the layer before.
    """

    def __init__(self, x: Tensor, n_layers: int) -> None:
        self.n_layers = n_layers
        self.device = x.device
        self.dtype = x.dtype
        self.autocast = torch.get_autocast_dtype(x.device.type)
        self.enabled = torch.is_autocast_enabled(x.device.type)
        self.recomputed: tuple[Tensor, ...] = ()

    def branch(self, branch: Callable[[Tensor], Tensor], stream: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output of a branch, with the graph between them.

        The forward pass builds the graph too, because kernels may differ without a graph. Autocast must not cache
        16-bit copies of weights, which would belong to a graph that has been freed.
        """
        with (
            torch.enable_grad(),
            torch.autocast(self.device.type, dtype=self.autocast, enabled=self.enabled, cache_enabled=False),
        ):
            x = stream.detach().to(self.dtype).requires_grad_()
            return x, branch(x)


def _random_state(x: Tensor) -> tuple[Any, ...]:
    """States of the random-number generators of the CPU and of the device of x."""
    return torch.get_rng_state(), *get_device_states(x)


def _restore(cpu: Tensor, devices: list[int], states: list[Tensor]) -> None:
    torch.set_rng_state(cpu)
    set_device_states(devices, states)


class ReversibleStack(Stack):
    """Blocks whose activations are recomputed in the backward pass. No gradient flows into memory of any kind."""

    couple = staticmethod(reversible_forward)

    def forward(self, x: Tensor, memories: tuple[Memory, ...], context: AttentionContext) -> StackOutput:
        y1, y2, after = self.couple(x, x, self.coupled_layers(memories, context))
        return StackOutput((y1 + y2) / 2, tuple(after))

    def coupled_layers(self, memories: tuple[Memory, ...], context: AttentionContext) -> list[Layer]:
        return [_layer(block, memory, context) for block, memory in zip(self.blocks, memories, strict=True)]


def _layer(block: Block, memory: Memory, context: AttentionContext) -> Layer:
    def attend(x: Tensor) -> tuple[Tensor, Memory]:
        x = block.embed(x, context)
        y, after = block.attention(block.attention_residual.pre(x), memory, context)
        # Each branch has its own graph, so cached values computed from parameters cannot be shared by layers.
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
