"""Functions of each token alone: linear layers, norms, dropout, chunks of tokens, and rounding to int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.ops.stored import StoredMatrix

SMALLEST = 2**16  # smallest number of weights that are worth more than one thread (measured)


def has_bfloat16_units(device: torch.device) -> bool:
    """True if the device has native bfloat16 matrix products, which are faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Linear(nn.Linear):
    """`nn.Linear` with the product of `linear`; `gradient_dtype` as there."""

    gradient_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.gradient_dtype)


class _RoundedGradients(torch.autograd.Function):
    """x Wᵀ + b whose gradients are products of factors in another number type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if for_bias:
            d_bias = reduce(grad, "... o -> o", "sum").to(weight.dtype)
        grad = grad.to(ctx.dtype)
        if for_x:
            d_x = (grad @ weight.to(ctx.dtype)).to(x.dtype)
        if for_weight:
            rows = rearrange(x, "... i -> (...) i").to(ctx.dtype)
            d_weight = (rearrange(grad, "... o -> o (...)") @ rows).to(weight.dtype)
        return d_x, d_weight, d_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gradient_dtype: torch.dtype | None = None) -> Tensor:
    """x Wᵀ + b for inputs (... i) and weights (o i).

    At inference on a CPU a single row is multiplied by a batch of equal parts of the matrix, one per thread.
    Gradients are products in the number type `gradient_dtype`; None: that of the arguments.
    """
    if gradient_dtype is not None and torch.is_grad_enabled():
        return _RoundedGradients.apply(x, weight, bias, gradient_dtype)  # type: ignore[no-any-return, no-untyped-call]
    if not _gets_parts(x, weight):
        return F.linear(x, weight, bias)
    n_parts = torch.get_num_threads()
    rows = x.reshape(1, 1, -1).expand(n_parts, 1, -1)
    out = torch.bmm(rows, weight.view(n_parts, -1, weight.shape[1]).mT).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _gets_parts(x: Tensor, weight: Tensor) -> bool:
    """True if x is a single row, and its product with equal parts of the matrix is faster: PyTorch uses one thread."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() != weight.shape[1]:
        return False
    if isinstance(weight, StoredMatrix):  # it has a product of its own
        return False
    if not torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    n_threads = torch.get_num_threads()
    has_equal_parts = weight.is_contiguous() and weight.shape[0] % n_threads == 0
    return n_threads > 1 and weight.numel() >= SMALLEST and has_equal_parts


def cast_for_products(x: Tensor) -> Tensor:
    """Input of several matrix products in their type, so that they share one cast; unchanged without autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # The kernel of LayerNorm, with a mean of zero. It subtracts the mean of grad · weight, which is added again.
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, ctx.needs_input_grad[1], False]
        )
        return d_x.add_(scale * (grad @ weight)[..., None] / len(weight)), d_weight, None


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis (Ba et al. 2016). 16-bit parameters are widened: a rank may have such ones."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(wide), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + epsilon) · weight over the last axis (Zhang and Sennrich 2019).

    On a CPU the backward pass takes few operators; PyTorch takes ten. A weight of 16 bits is widened: a rank may
    have gathered it so.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        trains = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == weight.dtype
        if trains and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
        return F.rms_norm(x, weight.shape, weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm of queries or keys (... e), computed in float32 or wider: under autocast the input is 16-bit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(self.weight.dtype, torch.float32))).to(x.dtype)


LEVELS = 2**16  # number of values of 16 bits: on a CPU, rates are rounded to multiples of 1 / `LEVELS`
NUMBERS_IN_WORD = 4  # random numbers of 16 bits in one of 64 bits
DISCARDED = 2**14  # random words of 64 bits drawn at once for rows that x does not have: they stay in the cache


class Share(NamedTuple):
    """Part number `part` of `parts` equal parts of the rows of a batch."""

    part: int = 0
    parts: int = 1


ALL_ROWS = Share()


def dropout(x: Tensor, rate: float, share: Share = ALL_ROWS) -> Tensor:
    """x (b ...) with every element set to zero with probability `rate`, and divided by 1 - `rate` otherwise.

    If x is a part of the rows of a batch, its mask is that part of the mask of all rows, which is drawn: the time is
    proportional to the number of parts.
    """
    n_dropped = round(rate * LEVELS)
    is_possible = 0 < n_dropped < LEVELS  # as a comparison of numbers of 16 bits
    if is_possible and x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Dropout.apply(x, n_dropped, share)  # type: ignore[no-any-return, no-untyped-call]
    if share.parts == 1:
        return F.dropout(x, rate)
    mask = F.dropout(x.new_ones(share.parts, *x.shape), rate)[share.part]
    return x * mask.clone()  # a view would keep the mask of all rows until the backward pass


class _Dropout(torch.autograd.Function):
    """Dropout on a CPU, of elements whose random number of 16 bits is one of the `n_dropped` lowest.

    A word of 64 random bits gives four such numbers, because PyTorch would draw one word for each element. All rows of
    the batch take their numbers in order. If x has 6 elements and is part 1 of 3, they are 6 to 11 of 18, whose numbers
    are in words 1 and 2 of 0 to 4; the other words are drawn and discarded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, n_dropped: int, share: Share) -> Tensor:
        n, first = x.numel(), share.part * x.numel()
        first_word = first // NUMBERS_IN_WORD
        end_word = math.ceil((first + n) / NUMBERS_IN_WORD)
        n_words = math.ceil(n * share.parts / NUMBERS_IN_WORD)
        _discard(first_word)
        words = torch.empty(end_word - first_word, dtype=torch.int64).random_(-(2**63), None)
        _discard(n_words - end_word)
        n_before = first - NUMBERS_IN_WORD * first_word  # numbers of the first word that x does not have
        numbers = words.view(torch.int16)[n_before : n_before + n].view(x.shape)
        lowest_kept = n_dropped - LEVELS // 2  # numbers begin at -`LEVELS` / 2
        is_kept = torch.empty(x.shape, dtype=torch.uint8)  # comparisons with a Boolean result are slow
        torch.ge(numbers, lowest_kept, out=is_kept)
        ctx.save_for_backward(is_kept)
        ctx.scale = LEVELS / (LEVELS - n_dropped)
        return is_kept.to(x.dtype).mul_(x).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (is_kept,) = ctx.saved_tensors
        return is_kept.to(grad.dtype).mul_(grad).mul_(ctx.scale), None, None


def _discard(n_words: int) -> None:
    """Draws so many random words that nobody needs, some at a time."""
    words = torch.empty(min(n_words, DISCARDED), dtype=torch.int64)
    for i in range(0, n_words, DISCARDED):
        words[: n_words - i].random_(-(2**63), None)


class Dropout(nn.Dropout):
    """Dropout of inputs of any shape in training; `share` is this rank's part of the rows of the batch."""

    share = ALL_ROWS

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return dropout(x, self.p, self.share)


MAX_INT = 127  # maximum magnitude of an int8 value; -128 is not used
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**121  # for `quantize`: normal, and `MAX_INT * MAX_SCALE` is finite in float32


def quantize(x: Tensor, scale_type: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows `... n` as int8 values `... n` from -127 to 127 and scales `...`, rounded to nearest.

    The scale is the largest magnitude of the row divided by 127, at least 2^-126. A row depends on no other row.

    A bfloat16 number has 8 significant bits, so its product with an int8 value is exact in float32, and quantizing
    dequantized rows with bfloat16 scales gives the same values and scales.
    """
    x = x.float()
    # CUDA multiplies by the inverse of a number, and divides by a tensor.
    scale = (x.abs().amax(-1) / x.new_full((), MAX_INT)).clamp(MIN_SCALE, MAX_SCALE).to(scale_type)
    values = (x / scale.float().unsqueeze(-1)).round().clamp(-MAX_INT, MAX_INT)
    return values.to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Rows `... n` in float32 of int8 values `... n` and scales `...`."""
    return values.float() * scale.float().unsqueeze(-1)


def map_chunks(function: Callable[..., Tensor], parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Concatenation (b t ...) of the results (b c ...) of `function` for each part.

    Only the parts are saved for the backward pass, which recomputes each result with the same dropout.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts], dim=1)
    # With its cache, autocast would share one 16-bit copy of a weight among parts and sum its gradients in 16 bits.
    kind = device.type
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], dim=1)
