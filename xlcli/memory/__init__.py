"""Memory of one layer between calls. `State` holds one memory for each layer.

hidden         layer inputs, for training with softmax attention
keyvalue       keys and values of softmax attention, in 32 or 16 bits; the first tokens of the text, if they are kept
keyvalue-int8  the same in int8, but for the first tokens
sums           running sums of linear attention
buckets        hash buckets of LSH attention
"""

from collections.abc import Mapping

from torch import Tensor

from xlcli.files.tensors import with_prefix
from xlcli.memory.base import Memory as Memory
from xlcli.memory.base import Sums as Sums
from xlcli.memory.buckets import Buckets as Buckets
from xlcli.memory.tokens import Hidden as Hidden
from xlcli.memory.tokens import Int8KeyValue as Int8KeyValue
from xlcli.memory.tokens import KeyValue as KeyValue
from xlcli.memory.tokens import TokenBuffers as TokenBuffers
from xlcli.memory.tokens import TokenMemory as TokenMemory

MEMORIES: dict[str, type[Memory]] = {kind.kind: kind for kind in (Hidden, KeyValue, Int8KeyValue, Sums, Buckets)}


def restored(kinds: str, tensors: Mapping[str, Tensor], batch_size: int) -> tuple[Memory, ...]:
    """Memories of these kinds from tensors whose names begin with `0.`, `1.` and so on.

    `KeyError` if a kind is unknown, `ValueError` if the tensors do not belong to such memories.
    """
    memories = []
    for i, kind in enumerate(kinds.split()):
        layer_tensors = with_prefix(f"{i}.", tensors)
        MEMORIES[kind].check(layer_tensors, batch_size)
        memories.append(MEMORIES[kind].from_tensors(layer_tensors))
    return tuple(memories)
