"""Weights of a network as the records of `ops/decode_records.py`: blocks, matrices and norms."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.model.attention import Attention
from xlcli.model.attention.full import FullAttention
from xlcli.model.feedforward import FeedForward
from xlcli.model.lm import LanguageModel
from xlcli.model.norm import EPSILON
from xlcli.model.position.rope import RopePosition
from xlcli.model.position.xl import XLPosition
from xlcli.model.residual import PostNorm, PreNorm, Residual, ReZero, Sandwich
from xlcli.model.stack import Block
from xlcli.ops.decode_records import ACTIVATIONS, LAYER, NONE, RMS, ROPE_LAYOUTS
from xlcli.ops.quantize import quantize

Packed = tuple[Any, ...]
"""Fields of a record of `ops/decode_records.py`; those of arrays are addresses."""


class Packer:
    """Packs weights of a network.

    Attributes:
        kept: Tensors whose addresses are packed.
        n_weights: Number of weights in packed matrices.
    """

    def __init__(self, network: LanguageModel, weight_type: torch.dtype) -> None:
        self.network = network
        self.weight_type = weight_type
        self.kept: list[Tensor] = []
        self.n_weights = 0

    def block(self, i: int, block: Block) -> Packed:
        """Fields of `BLOCK`."""
        stack = self.network.stack
        scales = (stack.stream_scale[i].item(), stack.input_scale[i].item()) if stack.input_residual else (1.0, 0.0)
        return (
            self._attention(block.attention),
            self._residual(block.attention_residual),
            *self._feed_forward(block.feedforward),
            self._residual(block.feedforward_residual),
            block.feedforward.down.weight.shape[1],
            self._address(None if block.vectors is None else block.vectors.weight),
            *scales,
        )

    def _attention(self, attention: Attention) -> Packed:
        """Fields of `ATTENTION`."""
        assert isinstance(attention, FullAttention)
        position, h = attention.position, attention.n_heads
        e = attention.output.weight.shape[1] // h
        n_features, content, bias, relative = 0, None, None, None
        if isinstance(position, XLPosition):
            content, bias = position.biases.content, position.biases.position
            n_features = min(position.n_features, e)
            if position.n_features <= e:
                relative = rearrange(position.relative.weight, "(h e) f -> h f e", e=e)
        norms = [
            self.norm(None if isinstance(norm, nn.Identity) else norm)
            for norm in (attention.query_norm, attention.key_norm)
        ]
        return (
            self.matrix(torch.cat([part.weight for part in (attention.query, attention.key, attention.value)])),
            self.matrix(attention.output.weight),
            *norms,
            h,
            e,
            n_features,
            *map(self._address, (content, bias, relative)),
            ROPE_LAYOUTS[position.layout] if isinstance(position, RopePosition) else 0,
            attention.scale,
        )

    def _feed_forward(self, network: FeedForward) -> Packed:
        """Both matrices, as `MATRIX`."""
        weight: Tensor = network.up.weight
        bias: Tensor | None = network.up.bias
        if network.gate is not None:
            weight = torch.cat([weight, network.gate.weight])
            bias = None if bias is None else torch.cat([bias, network.gate.bias])
        activation = ACTIVATIONS[self.network.config.feedforward.kind]
        up = self.matrix(weight, bias, activation, is_gated=network.gate is not None)
        return up, self.matrix(network.down.weight, network.down.bias)

    def _residual(self, residual: Residual) -> Packed:
        """Fields of `RESIDUAL`."""
        before = residual.norm if isinstance(residual, PreNorm) else None
        after = residual.last_norm if isinstance(residual, Sandwich) else None
        stream = residual.norm if isinstance(residual, PostNorm) else None
        alpha = float(residual.alpha) if isinstance(residual, ReZero) else 1.0
        return *map(self.norm, (before, after, stream)), alpha

    def norm(self, norm: nn.Module | None) -> Packed:
        """Fields of `NORM`."""
        if isinstance(norm, nn.RMSNorm):
            return RMS, self._address(norm.weight), 0, EPSILON
        if isinstance(norm, nn.LayerNorm):
            return LAYER, self._address(norm.weight), self._address(norm.bias), EPSILON
        return NONE, 0, 0, 0.0

    def matrix(
        self, weight: Tensor, bias: Tensor | None = None, activation: int = 0, *, is_gated: bool = False
    ) -> Packed:
        """Fields of `MATRIX`: weights in their encoding, exact because they are rounded already."""
        scale = None
        self.n_weights += weight.numel()
        if self.weight_type == torch.int8:
            weight, scale = quantize(weight)
            scale = scale.float()
        return *map(self._address, (weight.to(self.weight_type), scale, bias)), activation, is_gated

    def _address(self, t: Tensor | None) -> int:
        """Address of a contiguous tensor, or of a copy; 0 for None."""
        if t is None:
            return 0
        self.kept.append(t.detach().contiguous())
        return self.kept[-1].data_ptr()
