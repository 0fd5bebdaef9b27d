"""Fast decoding on the CPU: predictions after one new token of each sequence, by the kernels of `kernels/decode.py`.

A `Decoder` computes `LanguageModel.logits` for calls of one token, with the same states. It packs the weights once;
stored matrices (`ops/stored.py`) are not copied but joined. Blocks without a kernel (linear, LSH) run as modules.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.errors import ConfigError
from xlcli.kernels import records
from xlcli.kernels.records import Array, pack
from xlcli.machine import return_memory
from xlcli.memory import Memory, TokenBuffers
from xlcli.model.attention import Attention
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.distance_tables import ABSENT, DistanceTables, Shared, growing_tables
from xlcli.model.head import SoftmaxHead
from xlcli.model.lm import LanguageModel
from xlcli.model.position import Position
from xlcli.model.position.distance import AlibiPosition, T5Position
from xlcli.model.position.rope import RopePosition
from xlcli.model.position.xl import XLPosition
from xlcli.model.position.xl_tables import n_shared_features
from xlcli.model.stack import Block, FeedForward, Residual, Stack
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import quantize
from xlcli.ops.stored import StoredMatrix, widened

if TYPE_CHECKING:
    from xlcli.state import State

TYPES: dict[torch.dtype, Array] = {  # number type of weights or memories to an array of its type in the kernel
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
}
ENCODINGS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""Types of packed weights other than float32, whose matrices are not copied unless several are joined."""
Packed = tuple[Any, ...]  # fields of a record of `kernels/records.py`; arrays are given by their addresses
NO_HEAD: Packed = np.zeros((), records.HEAD).item()  # fields of a head of size 0
ATTENTIONS = FullAttention, LocalAttention  # what kernels compute, with all settings (tests/model/test_decoder.py)
POSITIONS = Position, RopePosition, AlibiPosition, T5Position, XLPosition
"""Position encodings of a layer that the kernels compute. The first one adds nothing: it is that of the embedding."""


def make_decoder(network: LanguageModel, encoding: str) -> Decoder | None:
    """Decoder of a network in evaluation mode whose weights `encoding` represents exactly.

    None if the network is not in float32 on a CPU, no block has a kernel, or Numba cannot keep kernels. `ConfigError`
    if others can write the folder of compiled kernels.
    """
    if not may_decode(network):
        return None
    n_threads = torch.get_num_threads()
    try:
        from xlcli.kernels import decode

        decode.use_threads(1)
    except ConfigError:
        raise
    except Exception:  # no folder for kernels can be written, or NUMBA_* has values that Numba does not take
        return None
    finally:
        torch.set_num_threads(n_threads)  # Numba starts its threads by OpenMP and sets the number that PyTorch uses
    return Decoder(network, encoding, decode)


def may_decode(network: LanguageModel) -> bool:
    """True if there is a decoder wherever compiled kernels can be kept."""
    if type(network) is not LanguageModel or type(network.stack) is not Stack:
        return False
    parameter = next(network.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        return False
    return any(map(has_kernel, network.stack.blocks))


def has_kernel(block: Block) -> bool:
    """True if the kernels compute a block of a plain stack; else it runs as a module."""
    return type(block.attention) in ATTENTIONS and type(block.attention.position) in POSITIONS


class Decoder:
    """Packed weights of a network, and tables by distance, which grow with the memory.

    The blocks form parts: successive blocks that have a kernel, which reads all of them in one call, or modules.
    """

    def __init__(self, network: LanguageModel, encoding: str, kernels: ModuleType) -> None:
        self.network = network
        self.kernels = kernels
        self.weight_type = ENCODINGS.get(encoding, torch.float32)
        self._packer = Packer(network, self.weight_type)
        self._tables = DistanceTables()
        self.parts: list[Part] = []
        first = 0
        with torch.inference_mode():
            for with_kernel, blocks in itertools.groupby(network.stack.blocks, has_kernel):
                part = self._packer.part(first, list(blocks), with_kernel=with_kernel)
                self.parts.append(part)
                first += len(part.blocks)
            head, last_part = network.head, self.parts[-1]
            if type(head) is SoftmaxHead and head.projection is None and last_part.packed.size:
                self.parts[-1] = replace(last_part, head=self._packer.head(head))

    def uncompiled(self, state: State, weight_type: torch.dtype) -> list[tuple[Array, Array]]:
        """The kernels that `logits` would compile before it predicts from this state, each in some seconds.

        There is one kernel for each pair of number types, of weights and of remembered keys and values. A pair is
        returned as two empty arrays of these types, the first arguments of `kernels.compile_kernel`.
        """
        is_forked = os.getpid() != self.kernels.PROCESS
        if is_forked:  # threads of kernels do not survive a fork, so `logits` uses none
            return []
        uncompiled = []
        for memory_type in {part.memory_type(state) for part in self.parts}:
            if memory_type is None:  # these blocks run as modules of PyTorch
                continue
            types = TYPES[weight_type], TYPES[memory_type]
            if not self.kernels.is_compiled(*types):
                uncompiled.append(types)
        return uncompiled

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b 1), and the new state, which consumes the old one."""
        network = self.network
        is_forked = os.getpid() != self.kernels.PROCESS  # threads of kernels do not survive a fork
        if is_forked or state.seen < network.config.n_sinks:
            return network.logits(tokens, state)
        with torch.inference_mode():
            x, context = network.embed(tokens, state)
            stack_input = x
            memories: list[Memory] = []
            are_logits = False
            for part in self.parts:
                uses_kernel = part.memory_type(state) is not None
                run = self._run_kernel if uses_kernel else self._run_modules
                x, extended = run(part, x, stack_input, part.memories(state), context)
                memories += extended
                are_logits = uses_kernel and part.head is not None  # which only the last part has
            if are_logits:
                logits = network.head.limit(x[:, -1])
            else:
                logits = network.head.logits(network.stack.final(x[:, -1]))
            return logits, network.advance(state, tokens, tuple(memories))

    def _run_modules(
        self, part: Part, x: Tensor, stack_input: Tensor, memories: Sequence[Memory], context: AttentionContext
    ) -> tuple[Tensor, list[Memory]]:
        """Output (b 1 d) of the blocks of a part, and the new memories."""
        extended = []
        for i, (block, memory) in enumerate(zip(part.blocks, memories, strict=True), start=part.first):
            block_input = self.network.stack.block_input(i, x, stack_input)
            x, new_memory = block(block_input, memory, context)
            extended.append(new_memory)
        return x, extended

    def _run_kernel(
        self, part: Part, x: Tensor, stack_input: Tensor, memories: Sequence[Memory], context: AttentionContext
    ) -> tuple[Tensor, list[Memory]]:
        """Runs the kernel on a part of the stack: output (b 1 d), or logits (b 1 v) if it has a head, and new memories.

        The kernel gets addresses only. What they point to lives as long as the local variables here, `kept` among them,
        and, for weights, as long as the packer, which owns them.
        """
        caches, extended, kept = self._caches(part, memories, context)
        cache_records = np.array(caches, records.CACHE)
        assert context.tokens is not None
        tokens = context.tokens[:, 0].long().contiguous()
        x, stack_input = x[:, 0].contiguous(), stack_input[:, 0].contiguous()
        reach = ABSENT
        if context.mask.reach is not None:
            reach = context.mask.reach[:, 0].contiguous()
        call = {
            "head": NO_HEAD if part.head is None else part.head,
            "n_blocks": len(caches),
            "blocks": part.packed.ctypes.data,
            "caches": cache_records.ctypes.data,
            "tokens": tokens.data_ptr(),
            "x": x.data_ptr(),
            "x0": stack_input.data_ptr(),
            "reach": reach.data_ptr(),
            "batch": x.shape[0],
            "dim": x.shape[1],
        }
        types = TYPES[self.weight_type], TYPES[extended[0].buffers[0].dtype]
        out = self.kernels.decode(call, torch.get_num_threads(), *types)
        del kept  # not before the call is over
        return torch.from_numpy(out)[:, None], [*extended]

    def _caches(
        self, part: Part, memories: Sequence[Memory], context: AttentionContext
    ) -> tuple[list[Packed], list[TokenBuffers], list[Tensor]]:
        """Describes the memory of each block of a part for the kernel, which writes the new token into it.

        Returns records `CACHE`, the new memories, in which a row is reserved for the token, and the arrays that the
        addresses in the records point to: the caller must keep them until the kernel has returned.
        """
        caches, extended = [], []
        kept: list[Tensor] = []
        shared_by_layers: dict[Hashable, Shared] = {}
        for block, kind, memory in zip(part.blocks, part.kinds, memories, strict=True):
            attention, layer_context = block.attention, context
            assert isinstance(memory, TokenBuffers)
            assert isinstance(attention, FullAttention)
            if isinstance(attention, LocalAttention):
                layer_context = context.narrow(attention.window)
            memory = memory.reserve(1, layer_context.keep)
            # Layers of one kind and length share tables; all else that these depend on is equal in a call.
            key = kind, memory.length, memory.n_sinks
            if key not in shared_by_layers:
                shared_by_layers[key] = self._tables.share(attention, memory, layer_context)
                kept += shared_by_layers[key].arrays
            shared = shared_by_layers[key]
            sinks = [ABSENT, ABSENT]
            if shared.sees_sinks:
                sinks = [sink.float().contiguous() for sink in memory.sinks]
            kept += sinks
            # Keys, values and, of int8, their scales: four in all.
            buffers = [*memory.buffers, ABSENT, ABSENT][:4]
            addresses = [t.data_ptr() for t in (*buffers, *sinks)]
            keys = memory.buffers[0]
            capacity, row_size = keys.shape[2], keys.stride(2)
            # The fields of `CACHE` in their order; names would cost a short call more than its arithmetic.
            caches.append((*addresses, capacity, row_size, memory.start, memory.stop, *shared.fields))
            extended.append(memory.keep(layer_context.keep))
        return caches, extended, kept


@dataclass(frozen=True)
class Part:
    """Successive blocks, from number `first` on, that are computed together."""

    first: int
    blocks: Sequence[Block]
    packed: Array  # `BLOCK` of each block; empty: there is no kernel
    kinds: Sequence[int]  # by `Packer._kind`; layers of the same one and memories of one length share a `Shared`
    head: Packed | None = None  # fields of `HEAD`, if logits follow

    def memories(self, state: State) -> Sequence[Memory]:
        return state.layers[self.first : self.first + len(self.blocks)]

    def memory_type(self, state: State) -> torch.dtype | None:
        """Number type of all keys and values; None if there is no kernel for the blocks or for their memories."""
        has_kernel = self.packed.size > 0
        types = {memory.dtype for memory in self.memories(state)}
        if not has_kernel or len(types) > 1:
            return None
        [memory_type] = types
        if memory_type not in TYPES or memory_type == torch.float16:  # kernels read weights of this type only
            return None
        return memory_type


class Packer:
    """Packs weights of a network: records with their addresses, which are valid as long as the packer lives."""

    def __init__(self, network: LanguageModel, weight_type: torch.dtype) -> None:
        self.network = network
        self.weight_type = weight_type
        self.kept: list[Tensor] = []  # tensors whose addresses are packed
        self._kinds: dict[Hashable, int] = {}

    def part(self, first: int, blocks: Sequence[Block], *, with_kernel: bool) -> Part:
        """Successive blocks, from number `first` on."""
        packed, kinds = [], []
        if with_kernel:
            for number, block in enumerate(blocks, start=first):
                packed.append(self._block(number, block))
                kinds.append(self._kind(block.attention))
                return_memory()  # of the matrices that were joined
        return Part(first, blocks, np.array(packed, records.BLOCK), kinds)

    def _kind(self, attention: Attention) -> int:
        """Number of the kind of a layer; layers of one kind share the arrays by distance."""
        assert isinstance(attention, FullAttention)
        window = attention.window if isinstance(attention, LocalAttention) else None
        keys = [table.key for table in growing_tables(attention)]
        return self._kinds.setdefault((*keys, window), len(self._kinds))

    def head(self, head: SoftmaxHead) -> Packed:
        matrix = self._matrix(head.weight, head.bias)
        return pack(records.HEAD, norm=self._norm(self.network.stack.final), matrix=matrix, size=len(head.weight))

    def _block(self, i: int, block: Block) -> Packed:
        stack = self.network.stack
        stream_scale, input_scale = 1.0, 0.0
        if stack.input_residual:
            stream_scale, input_scale = stack.stream_scale[i].item(), stack.input_scale[i].item()
        down = block.feedforward.down
        return pack(
            records.BLOCK,
            attention=self._attention(block.attention),
            attention_residual=self._residual(block.attention_residual),
            up=self._up(block.feedforward),
            down=self._matrix(down.weight, down.bias),
            feed_forward_residual=self._residual(block.feedforward_residual),
            width=down.weight.shape[1],
            vectors=0 if block.vectors is None else self._address(block.vectors.weight),
            parallel=block.feedforward_residual.placement == "parallel",
            stream_scale=stream_scale,
            input_scale=input_scale,
        )

    def _attention(self, attention: Attention) -> Packed:
        """Fields of `ATTENTION`; the tensors behind the addresses are in `kept`."""
        assert isinstance(attention, FullAttention)
        # One matrix makes queries, keys and values: fewer steps at which threads wait for each other.
        layers = attention.query, attention.key, attention.value
        weight = joined(layers)
        bias = None if attention.query.bias is None else torch.cat([layer.bias for layer in layers])
        return pack(
            records.ATTENTION,
            qkv=self._matrix(weight, bias),
            output=self._matrix(attention.output.weight, attention.output.bias),
            query_norm=self._norm(attention.query_norm),
            key_norm=self._norm(attention.key_norm),
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            **self._position(attention.position, attention.head_dim),
        )

    def _position(self, position: Position, head_dim: int) -> dict[str, int]:
        """Fields of `ATTENTION` that a position encoding sets; all are 0 for an encoding that needs none."""
        names = "rope", "rotary_dim", "n_features", "n_projected", "content", "position", "relative"
        fields = dict.fromkeys(names, 0)
        if isinstance(position, RopePosition):
            fields["rope"] = records.ROPE_LAYOUTS[position.layout]
            fields["rotary_dim"] = position.rotary_dim or head_dim
        if isinstance(position, XLPosition):
            n_shared = n_shared_features(position)
            # The sine half of the features comes first.
            weight = rearrange(position.relative.weight, "(h e) (half f) -> h half f e", e=head_dim, half=2)
            fields["n_features"] = n_shared
            fields["n_projected"] = head_dim if n_shared < position.n_features else 0
            fields["content"] = self._address(position.biases.content)
            fields["position"] = self._address(position.biases.position)
            fields["relative"] = self._address(weight[:, :, : n_shared // 2])
        return fields

    def _up(self, network: FeedForward) -> Packed:
        """`MATRIX` of the first linear layer of a feed-forward branch, with its gate behind it, if any."""
        weight: Tensor = network.up.weight
        bias: Tensor | None = network.up.bias
        if network.gate is not None:
            weight = joined([network.up, network.gate])
            bias = None if bias is None else torch.cat([bias, network.gate.bias])
        activation = records.ACTIVATIONS[self.network.config.feedforward.kind]
        return self._matrix(weight, bias, activation, is_gated=network.gate is not None)

    def _residual(self, residual: Residual) -> Packed:
        before, stream = self._norm(residual.norm), self._norm(None)
        if residual.placement == "post":  # the norm is one of the stream, not of the input of the branch
            before, stream = stream, before
        alpha = 1.0 if residual.alpha is None else float(residual.alpha)
        return pack(records.RESIDUAL, before=before, after=self._norm(residual.last_norm), stream=stream, alpha=alpha)

    def _norm(self, norm: nn.Module | None) -> Packed:
        """Fields of `NORM`; modules that are no norm change nothing, like None."""
        if isinstance(norm, nn.RMSNorm):
            return pack(records.NORM, kind=records.RMS, weight=self._address(norm.weight), bias=0, epsilon=norm.eps)
        if isinstance(norm, nn.LayerNorm):
            weight, bias = self._address(norm.weight), self._address(norm.bias)
            return pack(records.NORM, kind=records.LAYER, weight=weight, bias=bias, epsilon=norm.eps)
        return pack(records.NORM, kind=records.NONE, weight=0, bias=0, epsilon=0.0)

    def _matrix(
        self, weight: Tensor, bias: Tensor | None = None, activation: int = 0, *, is_gated: bool = False
    ) -> Packed:
        """Makes the record `MATRIX` of a linear layer, with weights in their encoding, to which they are rounded."""
        scale = None
        rows = weight
        if isinstance(weight, StoredMatrix) and weight.rows.dtype == self.weight_type:
            rows = weight.rows
            scale = weight.scale
        elif self.weight_type == torch.int8:
            rows, scale = quantize(weight)
        return pack(
            records.MATRIX,
            weight=self._address(rows.to(self.weight_type)),
            scale=self._address(None if scale is None else scale.float()),
            bias=self._address(bias),
            activation=activation,
            gated=is_gated,
        )

    def _address(self, t: Tensor | None) -> int:
        """Address of a contiguous tensor, or of a copy, which is kept; 0 for None."""
        if t is None:
            return 0
        self.kept.append(widened(t).detach().contiguous())
        return self.kept[-1].data_ptr()


def joined(layers: Sequence[nn.Linear]) -> Tensor:
    """The weights of layers (o i) in one matrix. Layers whose matrices are stored as they are become parts of it."""
    weights = [layer.weight for layer in layers]
    matrices = [weight for weight in weights if isinstance(weight, StoredMatrix)]
    if len(matrices) < len(weights):
        return torch.cat(weights)
    with torch.inference_mode(False):  # the parts outlive this call, in modules that others may train
        stored = StoredMatrix.cat(matrices)
        start = 0
        for layer in layers:
            part = stored.part(start, start + layer.out_features)
            layer.weight = nn.Parameter(part, requires_grad=False)
            start += layer.out_features
    return stored


def weight_bytes(network: LanguageModel, encoding: str) -> int:
    """Size in bytes of the copies of the matrices of blocks; 0 if there is no decoder."""
    n_weights = 0
    for attention, feed_forward in _decoded_branches(network):
        copied: set[nn.Linear] = {attention.query, attention.key, attention.value}  # which are joined
        if feed_forward.gate is not None:
            copied |= {feed_forward.up, feed_forward.gate}  # and so are these
        if encoding in ENCODINGS:  # of float32 no others
            copied |= {attention.output, feed_forward.up, feed_forward.down}
        for layer in copied:
            if not isinstance(layer.weight, StoredMatrix):  # such a matrix becomes part of the joined one
                n_weights += layer.weight.numel()
    return ENCODINGS.get(encoding, torch.float32).itemsize * n_weights


def table_bytes(network: LanguageModel, n_memory: int) -> int:
    """Size in bytes of the tables by distance with `n_memory` tokens in memory; 0 if there is no decoder."""
    sizes: dict[Hashable, int] = {}
    for attention, _ in _decoded_branches(network):
        farthest = attention.receptive_field(n_memory) or 0
        for table in growing_tables(attention):
            # Layers with the same encoding share one table, which is as long as the layer needs that sees most.
            size = table.size(farthest + 1)
            sizes[table.key] = max(size, sizes.get(table.key, 0))
    return torch.float32.itemsize * sum(sizes.values())


def _decoded_branches(network: LanguageModel) -> Iterator[tuple[FullAttention, FeedForward]]:
    """Branches of the blocks with a kernel, if there is a decoder."""
    if not may_decode(network):
        return
    for block in network.stack.blocks:
        if has_kernel(block):
            assert isinstance(block.attention, FullAttention)
            yield block.attention, block.feedforward
