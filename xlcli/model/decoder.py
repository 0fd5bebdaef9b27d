"""Fast decoding on the CPU: predictions after one new token of each sequence, by the kernels of `ops/decode.py`.

A `Decoder` computes `LanguageModel.logits` for calls of one token, with the same states. It packs the weights once: an
int8 weight takes a byte here, where the network holds its value in float32. Blocks without a kernel (linear and LSH
attention, for example) run as modules.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.memory import Int8KeyValue, KeyValue, Memory
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.head import SoftmaxHead
from xlcli.model.lm import LanguageModel
from xlcli.model.position import Position
from xlcli.model.position.alibi import AlibiPosition
from xlcli.model.position.rope import RopePosition, rope_angles
from xlcli.model.position.t5 import T5Position
from xlcli.model.position.xl import XLPosition
from xlcli.model.residual import PostNorm, PreNorm, Residual, ReZero, Sandwich
from xlcli.model.stack import Block, Stack
from xlcli.ops.context import AttentionContext
from xlcli.ops.quantize import quantize
from xlcli.ops.span import Span

if TYPE_CHECKING:
    from xlcli.ops.decode import Array
    from xlcli.state import State

ROPE_LAYOUTS = {"half": 1, "interleaved": 2}
"""Layout of rotary pairs to its number in the kernel."""


def make_decoder(network: LanguageModel, encoding: str) -> Decoder | None:
    """Decoder of a network in evaluation mode whose weights `encoding` represents exactly.

    None if Numba is not installed, the network is not in float32 on a CPU, or no block has a kernel.
    """
    if type(network) is not LanguageModel:
        return None
    parameter = next(network.parameters())
    is_float = (parameter.device.type, parameter.dtype) == ("cpu", torch.float32)
    if not is_float or type(network.stack) is not Stack or importlib.util.find_spec("numba") is None:
        return None
    if not any(_has_kernel(block) for block in network.stack.layers()):
        return None
    try:
        from xlcli.ops import decode
    except RuntimeError:  # compiled kernels cannot be kept in any folder
        return None
    return Decoder(network, encoding, decode)


def _has_kernel(block: Block) -> bool:
    attention = block.attention
    if type(attention) not in (FullAttention, LocalAttention):
        return False
    position = attention.position
    if isinstance(position, XLPosition):
        return position.clamp_len is None
    return type(position) in (Position, RopePosition, AlibiPosition, T5Position)


class Decoder:
    """Packed weights of a network, and tables by distance, which grow with the memory."""

    def __init__(self, network: LanguageModel, encoding: str, kernels: ModuleType) -> None:
        self.network = network
        self.kernels = kernels
        self.encoding = encoding if encoding in ("bfloat16", "int8") else "float32"
        with torch.inference_mode():
            self.blocks = [self._pack_block(block) if _has_kernel(block) else block for block in network.stack.layers()]
            self.final = self._norm(network.stack.final)
            self.head: Any = None
            if isinstance(network.head, SoftmaxHead) and network.head.projection is None:
                self.head = self._matrix(network.head.weight, bias=network.head.bias)
            scales = (network.stack.stream_scale, network.stack.input_scale) if network.stack.input_residual else ()
            self.residual_scales = list(zip(*(scale.tolist() for scale in scales), strict=True))
        self._has_run = False
        self._tables: dict[Hashable, Array] = {}
        self._buffers: dict[PackedBlock, tuple[tuple[Tensor, ...], list[Array]]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether kernels were compiled on this machine before; else the first call takes seconds."""
        return self._has_run or bool(self.kernels.is_compiled())

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b 1), and the new state, which consumes the old one."""
        if os.getpid() != self.kernels.PROCESS:
            return self.network.logits(tokens, state)
        n_parts = self.kernels.use_threads(torch.get_num_threads())
        with torch.inference_mode():
            embedded, context = self.network.embed(tokens, state)
            x = embedded[:, 0].clone().numpy()
            memories: list[Memory] = []
            first = x.copy() if self.residual_scales else x
            for i, (block, memory) in enumerate(zip(self.blocks, state.layers, strict=True)):
                if self.residual_scales:
                    stream_scale, input_scale = self.residual_scales[i]
                    x = stream_scale * x + input_scale * first
                if isinstance(block, PackedBlock) and _is_readable(memory):
                    memories.append(self._step(block, x, memory, context, n_parts))
                else:
                    module = block.module if isinstance(block, PackedBlock) else block
                    y, after = module(torch.from_numpy(x)[:, None], memory, context)
                    x = y[:, 0].contiguous().numpy()
                    memories.append(after)
            self._has_run = True
            return self._predict(x, n_parts), self.network.advance(state, tokens, tuple(memories))

    def _step(
        self, block: PackedBlock, x: Array, memory: KeyValue | Int8KeyValue, context: AttentionContext, n_parts: int
    ) -> Memory:
        """One block: changes x (b d), returns the new memory."""
        if block.vectors is not None:
            x += block.vectors[context.tokens[:, 0].numpy()]  # type: ignore[index]
        own = context if block.window is None else context.narrow(block.window)
        memory = memory.reserve(1, own.keep)
        self.kernels.block_step(
            x,
            block.attention,
            block.attention_residual,
            block.feedforward,
            block.feedforward_residual,
            self.kernels.Cache(*self._arrays(block, memory), memory.start, memory.stop),
            self._distances(block, memory.length, own),
            n_parts,
        )
        return memory.keep(own.keep)

    def _arrays(self, block: PackedBlock, memory: KeyValue | Int8KeyValue) -> list[Array]:
        """Buffers of a memory as arrays. They are kept until the memory gets other buffers."""
        buffers, arrays = self._buffers.get(block, ((), []))
        if len(buffers) != len(memory.buffers) or any(map(operator.is_not, buffers, memory.buffers)):
            arrays = [_as_array(buffer) for buffer in memory.buffers]
            self._buffers[block] = memory.buffers, arrays
        return arrays if len(arrays) == 4 else [*arrays, *[self.kernels.NO_SCALES] * 2]

    def _predict(self, x: Array, n_parts: int) -> Tensor:
        """Logits (b v) of the outputs x (b d) of the last block."""
        head = self.network.head
        if self.head is None:
            return head.logits(self.network.stack.final(torch.from_numpy(x)))
        return head.limit(torch.from_numpy(self.kernels.predict(x, self.final, self.head, n_parts)))

    def _pack_block(self, block: Block) -> PackedBlock:
        attention = block.attention
        assert isinstance(attention, FullAttention)
        k, position, h = self.kernels, attention.position, attention.n_heads
        e = attention.output.weight.shape[1] // h
        content, bias_vectors, relative = k.NO_VECTORS, k.NO_VECTORS, k.NO_RELATIVE
        if isinstance(position, XLPosition):
            content, bias_vectors = (
                part.detach().numpy() for part in (position.biases.content, position.biases.position)
            )
            relative = rearrange(position.relative.weight.detach(), "(h e) f -> h f e", e=e).contiguous().numpy()
        rope = ROPE_LAYOUTS[position.layout] if isinstance(position, RopePosition) else 0
        norms = [k.NO_VECTOR, k.NO_VECTOR]
        if not isinstance(attention.query_norm, nn.Identity):
            norms = [
                norm.get_parameter("weight").detach().numpy() for norm in (attention.query_norm, attention.key_norm)
            ]
        heads = k.Heads(content, bias_vectors, relative, *norms, attention.scale, rope)
        qkv = _joined(part.weight for part in (attention.query, attention.key, attention.value))
        network = block.feedforward
        kind = self.network.config.feedforward.kind
        rows = [network.up] if network.gate is None else [network.up, network.gate]
        bias = None if network.up.bias is None else _joined(part.bias for part in rows)
        up = self._matrix(_joined(part.weight for part in rows), bias)
        down = self._matrix(network.down.weight, network.down.bias)
        vectors = None if block.vectors is None else block.vectors.weight.detach().numpy()
        return PackedBlock(
            module=block,
            vectors=vectors,
            window=attention.window if isinstance(attention, LocalAttention) else None,
            head_dim=e,
            attention=k.Attention(self._matrix(qkv), heads, self._matrix(attention.output.weight)),
            attention_residual=self._residual(block.attention_residual),
            feedforward=k.FeedForward(up, down, k.ACTIVATIONS[kind], network.gate is not None),
            feedforward_residual=self._residual(block.feedforward_residual),
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Linear layer in the encoding of the weights; exact, because they are rounded already."""
        k = self.kernels
        vector = k.NO_VECTOR if bias is None else bias.detach().numpy()
        if self.encoding == "int8":
            values, scale = quantize(weight.detach())
            return k.Matrix(values.numpy(), scale.float().numpy(), vector)
        weight = weight.detach().to(getattr(torch, self.encoding)).contiguous()
        return k.Matrix(_as_array(weight), k.NO_VECTOR, vector)

    def _norm(self, norm: nn.Module | None) -> Any:
        k = self.kernels
        if isinstance(norm, nn.RMSNorm):
            return k.Norm(k.RMS, norm.weight.detach().numpy(), k.NO_VECTOR)
        if isinstance(norm, nn.LayerNorm):
            bias = k.NO_VECTOR if norm.bias is None else norm.bias.detach().numpy()
            return k.Norm(k.LAYER, norm.weight.detach().numpy(), bias)
        return k.Norm(k.NONE, k.NO_VECTOR, k.NO_VECTOR)

    def _residual(self, residual: Residual) -> Any:
        before = residual.norm if isinstance(residual, PreNorm) else None
        after = residual.last_norm if isinstance(residual, Sandwich) else None
        stream = residual.norm if isinstance(residual, PostNorm) else None
        alpha = float(residual.alpha) if isinstance(residual, ReZero) else 1.0
        return self.kernels.Residual(*(self._norm(norm) for norm in (before, after, stream)), alpha)

    def _distances(self, block: PackedBlock, length: int, context: AttentionContext) -> Any:
        """Tables of the position encoding of a block for `length` keys, the new one included."""
        position, k = block.module.attention.position, self.kernels
        keys = bias = sin = cos = k.NO_VECTORS
        if isinstance(position, XLPosition):
            f = position.n_features
            keys = self._table(("xl", f), length, lambda n: _position_keys(position, n, block), axis=0)
        elif isinstance(position, (AlibiPosition, T5Position)):
            source: Hashable = position.table if isinstance(position, T5Position) else "alibi"
            n_heads = block.module.attention.output.weight.shape[1] // block.head_dim
            bias = self._table((source, n_heads), length, lambda n: _bias(position, n, block), axis=1)
        elif isinstance(position, RopePosition):
            e = block.head_dim
            sin, cos = context.cache.constant(
                ("rope step", e, position.base), lambda: _rope_angles(position, context, e)
            )
        return k.Distances(keys, bias, sin, cos)

    def _table(self, key: Hashable, length: int, make: Callable[[int], Tensor], axis: int) -> Array:
        """Table with at least `length` entries, whose last one is that of the query itself; grows by doubling."""
        table = self._tables.get(key)
        if table is None or table.shape[axis] < length:
            table = self._tables[key] = make(max(2 * length, 256)).contiguous().numpy()
        return table


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """Arrays of one block for `ops.decode.block_step`.

    Attributes:
        module: The block, for memories that the kernel does not read.
        vectors: Token vectors (v d), or None.
        window: Window of local attention, or None.
        head_dim: Width of a head.
        attention: `ops.decode.Attention`.
        attention_residual: `ops.decode.Residual`.
        feedforward: `ops.decode.FeedForward`.
        feedforward_residual: `ops.decode.Residual`.
    """

    module: Block
    vectors: Array | None
    window: int | None
    head_dim: int
    attention: Any
    attention_residual: Any
    feedforward: Any
    feedforward_residual: Any


def _is_readable(memory: Memory) -> TypeGuard[KeyValue | Int8KeyValue]:
    """Whether there is a kernel for the number type of the memory."""
    if isinstance(memory, KeyValue):
        return memory.keys.dtype in (torch.float32, torch.bfloat16)
    return isinstance(memory, Int8KeyValue)


def _joined(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([weight.detach() for weight in weights])


def _as_array(t: Tensor) -> Array:
    """Tensor as an array without a copy: bits of bfloat16 as uint16, rows of buffers with their unused columns."""
    if t.ndim == 4:
        t = t.as_strided((*t.shape[:3], t.stride(2)), t.stride())
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def _context(n: int) -> AttentionContext:
    """Context of a call of one token after n - 1 others."""
    return AttentionContext(Span("uniform", n, n), n_memory=n - 1, n_new=1, keep=0, device=torch.device("cpu"))


def _rope_angles(position: RopePosition, context: AttentionContext, width: int) -> tuple[Array, Array]:
    """Sine and cosine (b width/2) of the angles of the new tokens (b 1)."""
    assert context.tokens is not None
    angles = rope_angles(context.positions.latest(1).expand_as(context.tokens)[:, 0], width, position.base)
    sin, cos = (part.float().numpy() for part in angles)
    return sin, cos


def _position_keys(position: XLPosition, n: int, block: PackedBlock) -> Tensor:
    """Position keys (n f) of distances n - 1 to 0."""
    heads = position.n_heads
    _, term = position.term(torch.zeros(1, heads, 1, block.head_dim), _context(n))
    assert term is not None
    return term[1]


def _bias(position: Position, n: int, block: PackedBlock) -> Tensor:
    """Additions (h n) to the scores of keys at distances n - 1 to 0."""
    attention = block.module.attention
    assert isinstance(attention, FullAttention)
    q = torch.zeros(1, attention.n_heads, 1, block.head_dim)
    bias = position.bias(q, q, _context(n), lambda x: (x, x))
    assert bias is not None
    return bias[:, 0]
