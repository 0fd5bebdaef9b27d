"""Fast decoding on the CPU: predictions after one new token of each sequence, by the kernels of `kernels/decode.py`.

A `Decoder` computes `LanguageModel.logits` for calls of one token, with the same states. It packs the weights once;
stored matrices (`ops/stored.py`) are not copied but joined. Blocks without a kernel (linear and LSH attention, for
example) run as modules.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.config import BaseConfig, ModelConfig
from xlcli.config.attention import FullAttentionConfig, LocalAttentionConfig
from xlcli.config.model import EmbeddingConfig, FeedForwardConfig, NormConfig, StandardStackConfig
from xlcli.config.position import AlibiPositionConfig, RopePositionConfig, T5PositionConfig, XLPositionConfig
from xlcli.errors import ConfigError
from xlcli.kernels import records
from xlcli.kernels.records import BLOCK_LEN, RANK, Array, pack
from xlcli.machine import return_memory
from xlcli.memory import Memory, TokenBuffers
from xlcli.model.attention import Attention
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.head import SoftmaxHead
from xlcli.model.lm import LanguageModel
from xlcli.model.position import Position, ScoreRule
from xlcli.model.position.distance import AlibiPosition, T5Position
from xlcli.model.position.rope import RopePosition
from xlcli.model.position.xl import XLPosition
from xlcli.model.position.xl_tables import block_basis, n_shared_features, position_blocks, shared_keys
from xlcli.model.stack import Block, FeedForward, Residual, Stack
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import quantize
from xlcli.ops.span import Span
from xlcli.ops.stored import StoredMatrix, widened

if TYPE_CHECKING:
    from xlcli.state import State

TYPES: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
}
"""Number type of weights or memories to an array of its type in the kernel."""
ENCODINGS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""Types of packed weights other than float32, whose matrices are not copied unless several are joined."""
Packed = tuple[Any, ...]
"""Fields of a record of `kernels/records.py`; arrays are given by their addresses."""
NO_HEAD: Packed = np.zeros((), records.HEAD).item()
"""Fields of a head of size 0."""
ABSENT = torch.empty(0, 0)
"""In place of an array that a kernel does not read; its address is 0."""
SHORTEST_TABLE = 256
"""Length of the first table by distance, unless no more distances can occur."""


def make_decoder(network: LanguageModel, encoding: str) -> Decoder | None:
    """Decoder of a network in evaluation mode whose weights `encoding` represents exactly.

    None if the network is not in float32 on a CPU, no block has a kernel, or Numba cannot keep kernels.

    Raises:
        ConfigError: Others can write the folder of compiled kernels.
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
    return any(has_kernel(network, i) for i in range(network.config.n_layers))


_SOFTMAX = {"kind", "n_heads", "head_dim", "scaled", "qk_norm", "n_kv_heads", "bias"}
COMPUTED: Mapping[type[BaseConfig], set[str]] = {
    FullAttentionConfig: _SOFTMAX,
    LocalAttentionConfig: _SOFTMAX | {"window"},
    AlibiPositionConfig: {"kind"},
    T5PositionConfig: {"kind", "shared", "n_buckets", "max_distance"},
    XLPositionConfig: {"kind", "n_features", "tied", "clamp_len"},
    RopePositionConfig: {
        "kind", "placement", "layout", "rotary_dim", "base", "local_base", "scaling", "clamp_len", "n_sinks",
    },
    StandardStackConfig: {"kind", "input_residual"},
    FeedForwardConfig: {"kind", "ffn_dim", "chunk_len"},
    NormConfig: {"kind", "placement", "epsilon", "final"},
    EmbeddingConfig: {
        "n_bigrams", "per_layer", "tied", "scaled", "norm", "tied_projections", "inner_dim", "cutoffs", "div_val",
    },
    ModelConfig: {
        "vocab_size", "dim", "n_layers", "attention", "position", "stack", "feedforward", "norm", "embedding",
        "dropout", "loss_chunk", "logit_softcap", "zero_init", "bias", "zero_memory", "init_std",
    },
}  # fmt: skip
"""Settings with which a decoder gives the logits of the network. A block with another one, or with another kind of
attention or position, runs as a module, unless that setting has its default."""


def is_computed(section: BaseConfig) -> bool:
    """True if kernels compute a section of the configuration: what they do not know has its default."""
    known = COMPUTED.get(type(section), set())
    for name, field in type(section).model_fields.items():
        if name not in known and getattr(section, name) != field.get_default(call_default_factory=True):
            return False
    return type(section) in COMPUTED


def has_kernel(network: LanguageModel, number: int) -> bool:
    config = network.config
    sections = [config, config.attentions[number], config.stack, config.feedforward, config.norm, config.embedding]
    position = network.stack.blocks[number].attention.position
    if type(position) is not Position:  # any other one is added at the embedding, which is a module
        sections.append(config.position)
    has_hooks = type(position) in (Position, RopePosition, AlibiPosition, T5Position, XLPosition)
    return has_hooks and all(is_computed(section) for section in sections)


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
        with torch.inference_mode():
            blocks = enumerate(network.stack.blocks)
            groups = itertools.groupby(blocks, lambda numbered: has_kernel(network, numbered[0]))
            self.parts = [self._packer.part(list(group), with_kernel=with_kernel) for with_kernel, group in groups]
            if self.parts[-1].packed.size and type(network.head) is SoftmaxHead and network.head.projection is None:
                self.parts[-1] = replace(self.parts[-1], head=self._packer.head(network.head))

    def missing(self, state: State, weight_type: torch.dtype) -> list[tuple[Array, Array]]:
        """Types for `kernels.compile_kernel`, before a call with weights of a type and this memory takes no seconds."""
        if os.getpid() != self.kernels.PROCESS:
            return []
        missing = []
        for memory_type in {part.memory_type(state) for part in self.parts}:
            if memory_type is None:  # these blocks run as modules
                continue
            types = TYPES[weight_type], TYPES[memory_type]
            if not self.kernels.is_compiled(*types):
                missing.append(types)
        return missing

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits (b v) of the next token after tokens (b 1), and the new state, which consumes the old one."""
        is_forked = os.getpid() != self.kernels.PROCESS  # threads of kernels do not survive a fork
        if is_forked or state.seen < self.network.config.n_sinks:
            return self.network.logits(tokens, state)
        with torch.inference_mode():
            x, context = self.network.embed(tokens, state)
            stack_input = x
            memories: list[Memory] = []
            for part in self.parts:
                has_kernel = part.memory_type(state) is not None
                run = self._run_kernel if has_kernel else self._run_modules
                x, extended = run(part, x, stack_input, part.memories(state), context)
                memories += extended
            last_part = self.parts[-1]
            if last_part.head is not None and last_part.memory_type(state) is not None:
                logits = self.network.head.limit(x[:, -1])  # the kernel has computed the logits
            else:
                logits = self.network.head.logits(self.network.stack.final(x[:, -1]))
            return logits, self.network.advance(state, tokens, tuple(memories))

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
        """Output (b 1 d), or logits (b 1 v) if the part has a head, and the new memories.

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
        """`CACHE` of each block of a part, the new memories, and arrays that the caller must keep during the call.

        The kernel writes the new token into the buffers of the memories, in the row that is reserved here.
        """
        caches, extended = [], []
        kept: list[Tensor] = []
        shared_fields: dict[Hashable, Shared] = {}
        for block, kind, memory in zip(part.blocks, part.kinds, memories, strict=True):
            assert isinstance(memory, TokenBuffers)
            attention, layer_context = block.attention, context
            if isinstance(attention, LocalAttention):
                layer_context = context.narrow(attention.window)
            memory = memory.reserve(1, layer_context.keep)
            # What else `Shared` depends on is the same for all layers of a call.
            key = kind, memory.length, memory.n_sinks
            if key not in shared_fields:
                shared_fields[key] = self._tables.share(attention, memory, layer_context)
                kept += shared_fields[key].arrays
            shared = shared_fields[key]
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
    """Successive blocks, from number `first` on, that are computed together.

    Attributes:
        packed: `BLOCK` of each block; empty: there is no kernel.
        kinds: Numbers by `Packer._kind`; layers with the same one and memories of one length have the same `Shared`.
        head: Fields of `HEAD`, if logits follow.
    """

    first: int
    blocks: Sequence[Block]
    packed: Array
    kinds: Sequence[int]
    head: Packed | None = None

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
    """Packs weights of a network: records with their addresses, which are valid as long as the packer lives.

    Attributes:
        kept: Tensors whose addresses are packed.
    """

    def __init__(self, network: LanguageModel, weight_type: torch.dtype) -> None:
        self.network = network
        self.weight_type = weight_type
        self.kept: list[Tensor] = []
        self._kinds: dict[Hashable, int] = {}

    def part(self, numbered_blocks: Sequence[tuple[int, Block]], *, with_kernel: bool) -> Part:
        """Successive blocks with their numbers."""
        packed, kinds, blocks = [], [], []
        for i, block in numbered_blocks:
            blocks.append(block)
            if with_kernel:
                packed.append(self._block(i, block))
                return_memory()  # of the matrices that were joined
                kinds.append(self._kind(block.attention))
        first = numbered_blocks[0][0]
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
        """Fields of `MATRIX`: weights in their encoding, exact because they are rounded already."""
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


class GrowingTable(NamedTuple):
    """A table by distance: `make` gives that of n distances, and `size` how many numbers it has.

    Layers with the same `key` share it; parameters in a key count by identity.
    """

    key: Hashable
    make: Callable[[int], Tensor]
    size: Callable[[int], int]


def growing_tables(attention: FullAttention) -> list[GrowingTable]:
    """The tables by distance that a layer may need, in the order of their fields in `Tables`."""
    position, n_heads, head_dim = attention.position, attention.n_heads, attention.head_dim
    if isinstance(position, XLPosition):
        n_shared = n_shared_features(position)
        key = XLPosition, position.n_features, n_shared
        keys = GrowingTable(key, partial(shared_keys, position), lambda n: n_shared * n)
        if n_shared == position.n_features:
            return [keys]
        block_size = n_heads * head_dim * 2 * RANK
        blocks = partial(position_blocks, position)
        return [keys, GrowingTable(position.relative, blocks, lambda n: block_size * math.ceil(n / BLOCK_LEN))]
    if isinstance(position, (AlibiPosition, T5Position)):
        same = type(position), *position.parameters(), n_heads
        return [GrowingTable(same, partial(_bias, attention), lambda n: n_heads * n)]
    if isinstance(position, RopePosition):

        def rotations(n: int) -> Tensor:
            """Sines, then cosines (n r), of the rotations by 0 to n - 1 positions."""
            return torch.cat(position.angles(torch.arange(n), head_dim), dim=-1).float()

        # Its size is not counted, because it is made only for keys beyond a clamp.
        return [GrowingTable((RopePosition, head_dim, position.series), rotations, lambda n: 0)]
    return []


@dataclass(frozen=True)
class Shared:
    """Fields of `CACHE` from `n_distances` on, which layers share, and the arrays whose addresses they hold."""

    fields: Packed
    arrays: Sequence[Tensor]
    sees_sinks: bool


class Tables(NamedTuple):
    """Arrays of `CACHE` by distance, in the order of its fields."""

    position_keys: Tensor = ABSENT
    position_blocks: Tensor = ABSENT
    basis: Tensor = ABSENT
    bias: Tensor = ABSENT
    sin: Tensor = ABSENT
    cos: Tensor = ABSENT
    turns: Tensor = ABSENT


class DistanceTables:
    """Tables that grow with the memory; layers with the same encoding share them."""

    def __init__(self) -> None:
        self.tables: dict[Hashable, tuple[int, Tensor]] = {}

    def share(self, attention: Attention, memory: TokenBuffers, context: AttentionContext) -> Shared:
        """The fields for a memory that has a row for the new token."""
        assert isinstance(attention, FullAttention)
        tables = self._tables_of(attention, memory.length, context)
        sinks = sink_arrays(attention, memory, context)
        span = context.span
        n_distances = max(tables.position_keys.shape[1], tables.bias.shape[1])
        # No key is further back than the length of the memory.
        clamp_len = memory.length if span.clamp_len is None else span.clamp_len
        full_len = memory.length if span.full_len is None else span.full_len
        n_sinks = memory.n_sinks if sinks else 0
        table_addresses = [t.data_ptr() for t in tables]
        sink_addresses = [t.data_ptr() for t in sinks or (ABSENT, ABSENT, ABSENT)]
        # The fields of `CACHE` in their order.
        n_blocks = tables.position_blocks.shape[1]
        fields = n_distances, n_blocks, clamp_len, full_len, *table_addresses, n_sinks, *sink_addresses, span.far_bias
        return Shared(fields, [*tables, *sinks], sees_sinks=bool(sinks))

    def _tables_of(self, attention: FullAttention, length: int, context: AttentionContext) -> Tables:
        """Tables for `length` keys, the new one included."""
        position = attention.position
        farthest = context.mask.max_distance
        longest = context.span.segment_len if farthest is None else 1 + farthest
        if isinstance(position, XLPosition):
            if context.span.clamp_len is not None:  # all keys further back are at this distance
                n_distances = context.span.clamp_len + 1
                length, longest = min(length, n_distances), min(longest, n_distances)
            found = [self._table(table, length, longest) for table in growing_tables(attention)]
            if len(found) > 1:  # there are blocks, which are products with this basis
                found.append(block_basis(position.n_features))
            return Tables(*found)
        if isinstance(position, RopePosition):
            return self._rotations(attention, position, length, longest, context)
        if isinstance(position, (AlibiPosition, T5Position)):
            [table] = growing_tables(attention)
            return Tables(bias=self._table(table, length, longest))
        return Tables()

    def _rotations(
        self, attention: FullAttention, position: RopePosition, length: int, longest: int, context: AttentionContext
    ) -> Tables:
        """Angles of the query, and where keys are further back than `clamp_len`, the turns that take them there."""
        assert context.tokens is not None
        positions = context.positions.latest(1).expand_as(context.tokens)[:, 0]
        sin, cos = (part.float().contiguous() for part in position.angles(positions, attention.head_dim))
        clamp_len = context.span.clamp_len
        if clamp_len is None or length <= clamp_len + 1:
            return Tables(sin=sin, cos=cos)
        [table] = growing_tables(attention)
        return Tables(sin=sin, cos=cos, turns=self._table(table, length - clamp_len, longest))

    def _table(self, table: GrowingTable, length: int, longest: int) -> Tensor:
        """Table of at least `length` distances; grows by doubling, up to `longest`.

        Its last column, or row, belongs to the query itself.
        """
        known_length, known = self.tables.get(table.key, (0, ABSENT))
        if known_length < length:
            self.tables.pop(table.key, None)
            del known  # before the new one is made, so that only one takes RAM
            known_length = max(length, min(max(2 * length, SHORTEST_TABLE), longest))
            known = table.make(known_length).contiguous()
            self.tables[table.key] = known_length, known
        return known


def sink_arrays(attention: FullAttention, memory: Memory, context: AttentionContext) -> list[Tensor]:
    """Numbers of sinks that the sequences see, and sines and cosines of their angles; empty if no token sees any."""
    seen, position = context.visible_sinks(memory.n_sinks), attention.position
    if seen is None or not isinstance(position, RopePosition):
        return []
    counts = seen.sum(-1)[:, 0]
    sin, cos = (part[:, 0, 0].float() for part in position.clamp_angles(attention.head_dim, context))
    batch = len(memory.sinks[0])
    return [row.expand(batch, -1).contiguous() for row in (counts, sin, cos)]


def _bias(attention: FullAttention, n: int) -> Tensor:
    """Additions (h n) to the scores of keys at distances n - 1 to 0."""
    q = torch.zeros(1, attention.n_heads, 1, attention.head_dim)
    context = AttentionContext(Span("uniform", n, n), n_memory=n - 1, n_new=1, keep=0, device=torch.device("cpu"))
    bias = attention.position.bias(q, q, context, ScoreRule(attention.scale, lambda x: (x, x)))
    assert bias is not None
    return bias[:, 0]


def weight_bytes(network: LanguageModel, encoding: str) -> int:
    """Size in bytes of the copies of the matrices of blocks; 0 if there is no decoder."""
    n_weights = 0
    for attention, feed_forward in _decoded(network):
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
    for attention, _ in _decoded(network):
        n_distances = 1 + (attention.receptive_field(n_memory) or 0)
        for table in growing_tables(attention):
            # Layers with the same encoding share the table of the one that sees most.
            sizes[table.key] = max(sizes.get(table.key, 0), table.size(n_distances))
    return torch.float32.itemsize * sum(sizes.values())


def _decoded(network: LanguageModel) -> Iterator[tuple[FullAttention, FeedForward]]:
    """Branches of the blocks with a kernel, if there is a decoder."""
    if not may_decode(network):
        return
    for i, block in enumerate(network.stack.blocks):
        if has_kernel(network, i):
            assert isinstance(block.attention, FullAttention)
            yield block.attention, block.feedforward
