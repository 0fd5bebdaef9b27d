"""Lengths of an evaluation: what the user gave, and sizes that change the speed and not the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xlcli.config import EvalConfig, MemoryDtype, SpanKind
from xlcli.config.attention import FullAttentionConfig, LocalAttentionConfig
from xlcli.evaluation.text import TokenizedText
from xlcli.runtime import Runtime

if TYPE_CHECKING:
    from xlcli.online import Reader
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

TOKENS_PER_CALL = {"cpu": 2**11, "cuda": 2**14}
"""Maximum of `tokens_per_call` by device: enough tokens to keep it busy."""
CPU_ACTIVATIONS = 2**19
"""Number of activations of a layer in a call above which a CPU is slower (measured for widths of 192 to 512)."""
DEFAULT_SEGMENT_LEN = 512
"""Longest segment chosen by default where hidden scores are computed; most of those of a longer one would be hidden."""
MAX_SEGMENT_LEN = 2**12
"""Longest segment where the length does not change the result; bounds the size of the attention mask."""
STATE_LIMIT = 2**28
"""Maximum bytes of memory tensors for the default batch size."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, maximum number of sequences, span, and number type of memory of an evaluation.

    `tokens_per_call` limits batches of documents, and of windows for the loss by context; None if the batch size was
    given. `stride` is the distance of overlapping windows of `segment_len` tokens, None without them.
    """

    mem_len: int
    segment_len: int
    batch_size: int
    span: SpanKind
    memory_dtype: MemoryDtype
    warmup_len: int = 0
    by_document: bool = False
    tokens_per_call: int | None = None
    stride: int | None = None

    def init_state(self, reader: Reader, starts: NDArray[np.int64]) -> State:
        """Empty memory of sequences that start at these positions (b) of the text."""
        return reader.init_state(
            len(starts),
            mem_len=self.mem_len,
            segment_len=self.segment_len,
            span=self.span,
            offsets=starts.tolist(),
            memory_dtype=self.memory_dtype,
        )


def tokens_per_call(model: LoadedModel, runtime: Runtime) -> int:
    """Default number of tokens per call of the model, over all sequences."""
    kind = runtime.device.type
    largest = TOKENS_PER_CALL.get(kind, TOKENS_PER_CALL["cuda"])
    return min(largest, max(1, CPU_ACTIVATIONS // model.config.model.dim)) if kind == "cpu" else largest


def choose_lengths(model: LoadedModel, runtime: Runtime, options: EvalConfig, text: TokenizedText) -> Lengths:
    """Lengths that the options leave open are as trained, or chosen for speed where they do not change the result."""
    reading = options.reading(model.config.train)
    mem_len, memory_dtype = reading.mem_len, reading.memory_dtype
    by_document = len(text.documents) > 1
    n_tokens = text.longest_document
    exact = mem_len > 0 and options.span == "uniform"
    n_per_call = tokens_per_call(model, runtime)
    n_ranks = runtime.ranks.size
    if options.segment_len is not None:
        segment_len = min(options.segment_len, n_tokens, MAX_SEGMENT_LEN if exact else n_tokens)
    elif exact:
        segment_len = min(DEFAULT_SEGMENT_LEN, max(64, 2 ** (mem_len - 1).bit_length()))
        if _skips_hidden_scores(model, runtime):
            segment_len = max(segment_len, min(n_tokens, n_per_call // (options.batch_size or 1)))
        if options.adapt and options.adapt_block is not None:  # whole blocks are read once
            segment_len = max(1, segment_len // options.adapt_block) * options.adapt_block
    else:
        segment_len = reading.segment_len
    receptive_field = model.network.receptive_field(mem_len if exact else mem_len + segment_len) if mem_len else 0
    warmup_len = n_tokens if receptive_field is None else receptive_field
    state_bytes = model.config.model.memory_bytes(2 * mem_len + segment_len, memory_dtype)
    one_by_one = by_document and options.stride is None
    if one_by_one:
        # The memory of a short document holds no more tokens than the document, unless its size is fixed.
        shape = model.config.model
        shortest = shape.memory_bytes(shape.tokens_in_memory(mem_len, 1) or 1, memory_dtype)
        largest, warmup_len = n_ranks * min(n_per_call, STATE_LIMIT // shortest), 0
    else:
        by_warmup = 1 + n_tokens // (10 * warmup_len) if warmup_len else n_tokens
        largest = min(n_ranks * min(n_per_call // segment_len, STATE_LIMIT // state_bytes), by_warmup)
    is_single = options.learns_by is not None or (receptive_field is None and not one_by_one)
    limit = n_ranks * min(n_per_call, max(1, STATE_LIMIT // state_bytes) * segment_len)
    return Lengths(
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=1 if is_single else options.batch_size or max(1, largest),
        span=options.span,
        memory_dtype=memory_dtype,
        warmup_len=warmup_len,
        by_document=by_document,
        tokens_per_call=None if options.batch_size else limit,
        stride=options.stride,
    )


def _skips_hidden_scores(model: LoadedModel, runtime: Runtime) -> bool:
    """Whether attention reads only visible keys, so that longer segments cost no more (`ops/attend_blocks.py`)."""
    config = model.config.model
    banded = all(isinstance(layer, FullAttentionConfig | LocalAttentionConfig) for layer in config.attentions)
    return banded and runtime.device.type == "cpu" and "bias" not in config.position.needs
