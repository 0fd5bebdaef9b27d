"""Reversible coupling of two streams (Gomez et al. 2017, section 3; Kitaev et al. 2020, section 3).

y1 = x1 + F(x2)    y2 = x2 + G(y1)         and back         x2 = y2 - G(y1)    x1 = y1 - F(x2)

Whatever the depth, only the last y1 and y2 are kept: the backward pass rebuilds what each branch was given, layer by
layer, and calls it with the same random numbers and number types as the first time.

Streams and their gradients are float64, and branches are given them rounded. Sums of numbers of 24 bits are then as
good as exact, and branches are given the same again, to the bit. From streams of 32 bits, branches that multiply in
bfloat16, or hash, would be given nearly the same and return something else, and errors would grow from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T")


class Layer(NamedTuple, Generic[T]):
    """Branches F and G, (b t d) to (b t d), and the parameters that each of them uses; F has something to tell besides.

    A branch is called again in the backward pass, so it may change nothing that it reads.
    """

    f: Callable[[Tensor], tuple[Tensor, T]]
    g: Callable[[Tensor], Tensor]
    f_parameters: Sequence[Tensor]
    g_parameters: Sequence[Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reversible_forward(x1: Tensor, x2: Tensor, layers: Sequence[Layer[T]]) -> tuple[Tensor, Tensor, list[T]]:
    """Both streams (b t d) after all layers, and what each F told; what branches were given is rebuilt.

    Gradients go to the streams and to the parameters, to nothing else that branches look at.
    """
    call = _Call(x1, len(layers))
    told: list[T] = []
    y1, y2 = x1.double(), x2.double()
    for i, layer in enumerate(layers, start=1):
        used = {id(p): p for p in (*layer.f_parameters, *layer.g_parameters) if p.requires_grad}
        y1, y2 = _Rebuilt.apply(y1, y2, layer, told, call, i, *used.values())  # type: ignore[no-untyped-call]
    return y1.to(x1.dtype), y2.to(x2.dtype), told


def reversible_forward_plain(x1: Tensor, x2: Tensor, layers: Sequence[Layer[T]]) -> tuple[Tensor, Tensor, list[T]]:
    """The same by its definition; autograd keeps every activation.

    Without gradients nothing will be rebuilt, and streams stay in their own type.
    """
    dtype, told = x1.dtype, []
    if torch.is_grad_enabled():
        x1, x2 = x1.double(), x2.double()
    for layer in layers:
        y, more = layer.f(x2.to(dtype))
        told.append(more)
        x1 = x1 + y
        x2 = x2 + layer.g(x1.to(dtype))
    return x1.to(dtype), x2.to(dtype), told


class _Rebuilt(torch.autograd.Function):
    """The `place`-th layer. The last one keeps both streams; others find in `call` what the layer above was given."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, layer: Layer[T], told: list[T], call: _Call, place: int, *used: Tensor
    ) -> tuple[Tensor, Tensor]:
        def f(x: Tensor) -> Tensor:
            y, more = layer.f(x)
            told.append(more)
            return y

        before_f = _Chance.now(call.device)
        y1 = x1 + call.branch(f, x2)[1].detach()
        before_g = _Chance.now(call.device)
        y2 = x2 + call.branch(layer.g, y1)[1].detach()
        ctx.layer, ctx.call, ctx.place, ctx.used, ctx.chances = layer, call, place, used, (before_f, before_g)
        # With the parameters, so that autograd refuses to go on when they have changed since.
        ctx.save_for_backward(*used, *((y1, y2) if place == call.n_layers else ()))
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        kept: tuple[Tensor, ...] = ctx.saved_tensors
        *_, y1, y2 = *kept, *(() if ctx.place == call.n_layers else call.given)
        gradients: dict[int, Tensor] = {}

        def take(
            branch: Callable[[Tensor], Tensor], x: Tensor, d: Tensor, parameters: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor]:
            """The branch's output, and the gradient of its input given that of its output."""
            x, y = call.branch(branch, x)
            learned = [p for p in parameters if p.requires_grad]
            d_x, *found = torch.autograd.grad(y, (x, *learned), d.to(y.dtype), allow_unused=True)
            for parameter, gradient in zip(learned, found, strict=True):
                if gradient is not None:
                    before = gradients.get(id(parameter))
                    gradients[id(parameter)] = gradient if before is None else before + gradient
            return y.detach(), d_x

        before_f, before_g = ctx.chances
        with torch.random.fork_rng([call.device] if call.device.type == "cuda" else []):
            before_g.again(call.device)
            y, d = take(ctx.layer.g, y1, d2, ctx.layer.g_parameters)
            x2, d1 = y2 - y, d1 + d
            before_f.again(call.device)
            y, d = take(lambda x: ctx.layer.f(x)[0], x2, d1, ctx.layer.f_parameters)
            x1, d2 = y1 - y, d2 + d
        call.given = (x1, x2) if ctx.place > 1 else ()
        return d1, d2, None, None, None, None, *(gradients.get(id(p)) for p in ctx.used)


class _Call:
    """What the layers of one call share: how branches are called, and what the one that was rebuilt last was given."""

    def __init__(self, x: Tensor, n_layers: int) -> None:
        self.n_layers = n_layers
        self.device = x.device
        self.dtype = x.dtype
        self.autocast = torch.get_autocast_dtype(x.device.type)
        self.enabled = torch.is_autocast_enabled(x.device.type)
        self.given: tuple[Tensor, ...] = ()

    def branch(self, branch: Callable[[Tensor], Tensor], stream: Tensor) -> tuple[Tensor, Tensor]:
        """What a branch is given of a stream, and what it returns, with the graph between them.

        The first time as well, when nobody needs the graph: kernels may differ where there is none. Autocast keeps no
        16-bit copies of weights, for those would belong to a graph that is no more.
        """
        with (
            torch.enable_grad(),
            torch.autocast(self.device.type, dtype=self.autocast, enabled=self.enabled, cache_enabled=False),
        ):
            x = stream.detach().to(self.dtype).requires_grad_()
            return x, branch(x)


class _Chance(NamedTuple):
    """Where the random numbers of the CPU, and of the device, stood."""

    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def now(device: torch.device) -> _Chance:
        return _Chance(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def again(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
