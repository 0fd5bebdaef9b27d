"""Fast decoding on the CPU: predictions after one new token of each sequence, by the kernels of `kernels/decode.py`.

A `Decoder` computes `LanguageModel.logits` for calls of one token, with the same states. It packs the weights once: an
int8 weight takes a byte here, where the network holds its value in float32. Blocks without a kernel (linear and LSH
attention, for example) run as modules.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.config import BaseConfig, ModelConfig
from xlcli.config.attention import FullAttentionConfig, LocalAttentionConfig
from xlcli.config.model import EmbeddingConfig, FeedForwardConfig, NormConfig, StandardStackConfig
from xlcli.config.position import AlibiPositionConfig, RopePositionConfig, T5PositionConfig, XLPositionConfig
from xlcli.errors import ConfigError
from xlcli.kernels.records import ACTIVATIONS, BLOCK, CACHE, LAYER, NONE, RMS, ROPE_LAYOUTS, Array
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
from xlcli.model.stack import Block, FeedForward, Residual, Stack
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import quantize
from xlcli.ops.span import Span

if TYPE_CHECKING:
    from xlcli.state import State

TYPES: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.int8: np.empty(0, np.int8),
}
"""Number type of weights or memories to an array of its type in the kernel."""
ENCODINGS = {"bfloat16": torch.bfloat16, "int8": torch.int8}
"""Types of packed weights other than float32, whose matrices are not copied unless several are joined."""
Packed = tuple[Any, ...]
"""Fields of a record of `kernels/records.py`; arrays are given by their addresses."""
NO_HEAD = (0,) * 4, (0,) * 5, 0
"""Fields of a head of size 0."""
ABSENT = torch.empty(0, 0)
"""In place of an array that a kernel does not read; its address is 0."""


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
    is_float = (parameter.device.type, parameter.dtype) == ("cpu", torch.float32)
    return is_float and any(has_kernel(network, i) for i in range(network.config.n_layers))


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
    """True if there is a kernel for the block of this number."""
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
        dtypes = {part.memory_type(state) for part in self.parts}
        types = [(TYPES[weight_type], TYPES[dtype]) for dtype in dtypes if dtype is not None]
        return [each for each in types if not self.kernels.is_compiled(*each)]

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
                run = self._run_modules if part.memory_type(state) is None else self._run_kernel
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

        The kernel gets addresses only. What they point to is held by `packed`, `inputs`, `kept` and `extended`.
        """
        caches, extended, kept = self._caches(part, memories, context)
        packed = np.array(caches, CACHE)
        assert context.tokens is not None
        reach = ABSENT if context.mask.reach is None else context.mask.reach[:, 0].contiguous()
        inputs = [context.tokens.long()[:, 0].contiguous(), x[:, 0].contiguous(), stack_input[:, 0].contiguous(), reach]
        addresses = part.packed.ctypes.data, packed.ctypes.data, *map(Tensor.data_ptr, inputs)
        call = part.head or NO_HEAD, len(caches), *addresses, len(x), x.shape[2]
        types = TYPES[self.weight_type], TYPES[extended[0].buffers[0].dtype]
        out = self.kernels.decode(call, torch.get_num_threads(), *types)
        del kept
        return torch.from_numpy(out)[:, None], [*extended]

    def _caches(
        self, part: Part, memories: Sequence[Memory], context: AttentionContext
    ) -> tuple[list[Packed], list[TokenBuffers], list[Tensor]]:
        """`CACHE` of each block of a part, the new memories, and arrays to be kept during the call.

        What else `Shared` depends on is the same for all layers of a call.
        """
        caches, extended = [], []
        kept: list[Tensor] = []
        shared: dict[Hashable, Shared] = {}
        for block, kind, memory in zip(part.blocks, part.kinds, memories, strict=True):
            assert isinstance(memory, TokenBuffers)
            attention = block.attention
            layer_context = context.narrow(attention.window) if isinstance(attention, LocalAttention) else context
            memory = memory.reserve(1, layer_context.keep)
            key = kind, memory.length, memory.n_sinks
            if key not in shared:
                shared[key] = self._tables.share(attention, memory, layer_context)
                kept += shared[key].arrays
            sinks = [ABSENT, ABSENT]
            if shared[key].sees_sinks:
                sinks = [sink.float().contiguous() for sink in memory.sinks]
            kept += sinks
            # Keys, values and, of int8, their scales: four in all.
            buffers = [*memory.buffers, ABSENT, ABSENT][:4]
            keys = memory.buffers[0]
            caches.append(
                (
                    *map(Tensor.data_ptr, (*buffers, *sinks)),
                    *(keys.shape[2], keys.stride(2), memory.start, memory.stop),
                    *shared[key].fields,
                )
            )
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
        """Memories of the blocks."""
        return state.layers[self.first : self.first + len(self.blocks)]

    def memory_type(self, state: State) -> torch.dtype | None:
        """Number type of all keys and values; None if there is no kernel for the blocks or for their memories."""
        types = {memory.dtype for memory in self.memories(state)}
        return types.pop() if self.packed.size and len(types) == 1 and types <= TYPES.keys() else None


class Packer:
    """Packs weights of a network.

    Attributes:
        kept: Tensors whose addresses are packed.
    """

    def __init__(self, network: LanguageModel, weight_type: torch.dtype) -> None:
        self.network = network
        self.weight_type = weight_type
        self.kept: list[Tensor] = []
        self._kinds: dict[Hashable, int] = {}

    def part(self, blocks: Sequence[tuple[int, Block]], *, with_kernel: bool) -> Part:
        """Numbered successive blocks."""
        packed = [self._block(i, block) for i, block in blocks if with_kernel]
        kinds = [self._kind(block.attention) for _, block in blocks if with_kernel]
        return Part(blocks[0][0], [block for _, block in blocks], np.array(packed, BLOCK), kinds)

    def _kind(self, attention: Attention) -> int:
        """Number of the kind of a layer; layers of one kind share the arrays by distance."""
        assert isinstance(attention, FullAttention)
        window = attention.window if isinstance(attention, LocalAttention) else None
        return self._kinds.setdefault((table_key(attention), window), len(self._kinds))

    def head(self, head: SoftmaxHead) -> Packed:
        """Fields of `HEAD`."""
        return self._norm(self.network.stack.final), self._matrix(head.weight, head.bias), len(head.weight)

    def _block(self, i: int, block: Block) -> Packed:
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
            block.feedforward_residual.placement == "parallel",
            *scales,
        )

    def _attention(self, attention: Attention) -> Packed:
        """Fields of `ATTENTION`."""
        assert isinstance(attention, FullAttention)
        position, h, e = attention.position, attention.n_heads, attention.head_dim
        layout, rotary_dim = 0, 0
        if isinstance(position, RopePosition):
            layout, rotary_dim = ROPE_LAYOUTS[position.layout], position.rotary_dim or e
        n_features, of_content, of_position, relative = 0, None, None, None
        if isinstance(position, XLPosition):
            of_content, of_position = position.biases.content, position.biases.position
            n_features = min(position.n_features, e)
            if _has_shared_keys(position):
                relative = rearrange(position.relative.weight, "(h e) f -> h f e", e=e)
        joined = attention.query, attention.key, attention.value
        bias = None if attention.query.bias is None else torch.cat([part.bias for part in joined])
        return (
            self._matrix(torch.cat([part.weight for part in joined]), bias),
            self._matrix(attention.output.weight, attention.output.bias),
            *map(self._norm, (attention.query_norm, attention.key_norm)),
            h,
            attention.n_kv_heads,
            e,
            n_features,
            *map(self._address, (of_content, of_position, relative)),
            layout,
            rotary_dim,
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
        up = self._matrix(weight, bias, activation, is_gated=network.gate is not None)
        return up, self._matrix(network.down.weight, network.down.bias)

    def _residual(self, residual: Residual) -> Packed:
        """Fields of `RESIDUAL`."""
        before, stream = (None, residual.norm) if residual.placement == "post" else (residual.norm, None)
        alpha = 1.0 if residual.alpha is None else float(residual.alpha)
        return *map(self._norm, (before, residual.last_norm, stream)), alpha

    def _norm(self, norm: nn.Module | None) -> Packed:
        """Fields of `NORM`."""
        if isinstance(norm, nn.RMSNorm):
            return RMS, self._address(norm.weight), 0, norm.eps
        if isinstance(norm, nn.LayerNorm):
            return LAYER, self._address(norm.weight), self._address(norm.bias), norm.eps
        return NONE, 0, 0, 0.0

    def _matrix(
        self, weight: Tensor, bias: Tensor | None = None, activation: int = 0, *, is_gated: bool = False
    ) -> Packed:
        """Fields of `MATRIX`: weights in their encoding, exact because they are rounded already."""
        scale = None
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


def _has_shared_keys(position: XLPosition) -> bool:
    """True if all heads use the same position keys, which are not longer than a head is wide."""
    return position.n_features <= position.biases.content.shape[1]


def table_key(attention: FullAttention) -> Hashable:
    """What the arrays by distance of a layer depend on, beside its memory and window; parameters by identity."""
    position = attention.position
    if isinstance(position, XLPosition):
        return XLPosition, position.n_features if _has_shared_keys(position) else position.relative
    if isinstance(position, RopePosition):
        return RopePosition, attention.head_dim, position.series
    return type(position), *position.parameters(), attention.n_heads


@dataclass(frozen=True)
class Shared:
    """Fields of `CACHE` from `n_distances` on, which layers share, and the arrays whose addresses they hold."""

    fields: Packed
    arrays: Sequence[Tensor]
    sees_sinks: bool


class DistanceTables:
    """Tables that grow with the memory; layers with the same encoding share them."""

    def __init__(self) -> None:
        self.tables: dict[Hashable, Tensor] = {}

    def share(self, attention: Attention, memory: TokenBuffers, context: AttentionContext) -> Shared:
        """The fields for a memory that has a row for the new token."""
        assert isinstance(attention, FullAttention)
        tables = self._of(attention, memory.length, context)
        sinks = sink_arrays(attention, memory, context)
        span, n_distances = context.span, max(table.shape[1] for table in tables[:2])
        limits = span.clamp_len or memory.length, span.full_len or memory.length
        n_sinks = memory.n_sinks if sinks else 0
        of_tables, of_sinks = (tuple(map(Tensor.data_ptr, part)) for part in (tables, sinks or [ABSENT] * 3))
        fields = n_distances, *limits, *of_tables, n_sinks, *of_sinks, span.far_bias
        return Shared(fields, [*tables, *sinks], bool(sinks))

    def _of(self, attention: FullAttention, length: int, context: AttentionContext) -> tuple[Tensor, ...]:
        """Position keys, additions, sine, cosine and turns of `CACHE` for `length` keys, the new one included."""
        position, e = attention.position, attention.head_dim
        farthest = context.mask.max_distance
        longest = context.span.segment_len if farthest is None else 1 + farthest
        keys = bias = sin = cos = turns = ABSENT
        if isinstance(position, XLPosition):
            length, longest = (min(n, (context.span.clamp_len or n) + 1) for n in (length, longest))
            keys = self._table(table_key(attention), length, longest, lambda n: _position_keys(position, n, e))
        elif isinstance(position, (AlibiPosition, T5Position)):
            bias = self._table(table_key(attention), length, longest, lambda n: _bias(attention, n, e))
        elif isinstance(position, RopePosition):
            assert context.tokens is not None
            positions = context.positions.latest(1).expand_as(context.tokens)[:, 0]
            sin, cos = (part.float().contiguous() for part in position.angles(positions, e))
            if (clamp_len := context.span.clamp_len) is not None and length > clamp_len + 1:

                def rotations(n: int) -> Tensor:
                    """Sines, then cosines (n r), of the rotations by 0 to n - 1 positions."""
                    return torch.cat(position.angles(torch.arange(n), e), dim=-1).float()

                turns = self._table(table_key(attention), length - clamp_len, longest, rotations, axis=0)
        return keys, bias, sin, cos, turns

    def _table(self, key: Hashable, length: int, longest: int, make: Callable[[int], Tensor], axis: int = 1) -> Tensor:
        """Table with at least `length` columns, or rows with axis 0; grows by doubling, up to `longest`.

        The last column belongs to the query itself.
        """
        table = self.tables.get(key)
        if table is None or table.shape[axis] < length:
            self.tables.pop(key, None)
            table = make(max(length, min(max(2 * length, 256), longest))).contiguous()
            self.tables[key] = table
        return table


def sink_arrays(attention: FullAttention, memory: Memory, context: AttentionContext) -> list[Tensor]:
    """Numbers of sinks that the sequences see, and sines and cosines of their angles; empty if no token sees any."""
    seen, position = context.visible_sinks(memory.n_sinks), attention.position
    if seen is None or not isinstance(position, RopePosition):
        return []
    angles = position.clamp_angles(attention.head_dim, context)
    rows = seen.sum(-1)[:, 0], *(part[:, 0, 0].float() for part in angles)
    return [row.expand(len(memory.sinks[0]), -1).contiguous() for row in rows]


def _context(n: int) -> AttentionContext:
    """Context of a call of one token after n - 1 others."""
    return AttentionContext(Span("uniform", n, n), n_memory=n - 1, n_new=1, keep=0, device=torch.device("cpu"))


def _position_keys(position: XLPosition, n: int, head_dim: int) -> Tensor:
    """Position keys (f n) of distances n - 1 to 0, or, if they are wider than a head, projected by W_R: (h e n)."""
    _, term = position.term(torch.zeros(1, position.n_heads, 1, head_dim), _context(n))
    assert term is not None
    if _has_shared_keys(position):
        return term.keys.T
    cos, sin = term.keys.T.chunk(2)
    return position.relative.weight @ torch.cat([-sin, cos])


def _bias(attention: FullAttention, n: int, head_dim: int) -> Tensor:
    """Additions (h n) to the scores of keys at distances n - 1 to 0."""
    q = torch.zeros(1, attention.n_heads, 1, head_dim)
    bias = attention.position.bias(q, q, _context(n), ScoreRule(attention.scale, lambda x: (x, x)))
    assert bias is not None
    return bias[:, 0]


def weight_bytes(network: LanguageModel, encoding: str) -> int:
    """Size in bytes of the copies of the matrices of blocks; 0 if there is no decoder."""
    n_weights = 0
    for attention, feed_forward in _decoded(network):
        matrices = {part for part in (*attention.children(), *feed_forward.children()) if isinstance(part, nn.Linear)}
        if encoding not in ENCODINGS:  # only those that are joined
            matrices -= {attention.output, feed_forward.down}
            matrices -= {feed_forward.up} if feed_forward.gate is None else set()
        n_weights += sum(part.weight.numel() for part in matrices)
    return ENCODINGS.get(encoding, torch.float32).itemsize * n_weights


def table_bytes(network: LanguageModel, n_memory: int) -> int:
    """Size in bytes of the tables by distance with `n_memory` tokens in memory; 0 if there is no decoder."""
    tables: dict[Hashable, int] = {}
    for attention, _ in _decoded(network):
        position, h, width = attention.position, attention.n_heads, attention.output.weight.shape[1]
        n = 1 + (attention.receptive_field(n_memory) or 0)
        if isinstance(position, XLPosition):
            rows = position.n_features if _has_shared_keys(position) else width
        elif isinstance(position, (AlibiPosition, T5Position)):
            rows = h
        else:
            continue
        key = table_key(attention)
        tables[key] = max(tables.get(key, 0), 4 * rows * n)
    return sum(tables.values())


def _decoded(network: LanguageModel) -> Iterator[tuple[FullAttention, FeedForward]]:
    """Branches of the blocks with a kernel, if there is a decoder."""
    if not may_decode(network):
        return
    for i, block in enumerate(network.stack.blocks):
        if has_kernel(network, i):
            assert isinstance(block.attention, FullAttention)
            yield block.attention, block.feedforward
