"""Cost of rounded weights and memory in bits per byte."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xlcli.evaluation.lengths import Lengths
from xlcli.evaluation.passes import score_text
from xlcli.events import ROUNDING_TOKENS, Notice, Progress
from xlcli.metrics import bits_per
from xlcli.online import Reader
from xlcli.runtime import Runtime
from xlcli.tokenized import TokenizedText

if TYPE_CHECKING:
    from xlcli.store.loaded import LoadedModel


def rounding_cost(
    unrounded: LoadedModel,
    reader: Reader,
    runtime: Runtime,
    text: TokenizedText,
    lengths: Lengths,
    nats: NDArray[Any],
    stop: Callable[[], bool],
) -> Generator[Notice | Progress, None, float | None]:
    """Bits per byte of the first `ROUNDING_TOKENS` tokens minus those without rounding; None if stopped.

    Args:
        unrounded: The model with its weights as stored.
        reader: Reader of that model.
        runtime: Device and number type.
        text: The text.
        lengths: Lengths of the rounded evaluation.
        nats: Surprisal (t) of each token with rounded weights and memory.
        stop: Called between calls of the model.
    """
    n = min(ROUNDING_TOKENS, len(text.tokens))
    part = replace(text, tokens=text.tokens.first(n))
    exact = replace(lengths, memory_dtype="float32")
    totals = yield from score_text(unrounded, reader, runtime, part, exact, None, None, stop)
    if totals.tokens < n:
        return None
    return bits_per(float(nats[:n].sum(dtype=np.float64)) - totals.nats, totals.bytes)
