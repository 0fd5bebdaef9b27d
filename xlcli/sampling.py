"""From logits to text: a chain of small pure functions, one draw from an explicit generator, and the outlet for bytes.

The chain is repetition penalty (Keskar et al. 2019), temperature, top-k (Fan et al. 2018), top-p (Holtzman et al.
2020), min-p (Nguyen et al. 2024), draw. Every sample has a generator of its own, so that its neighbors do not matter.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from xlcli.config import GenerateConfig
from xlcli.errors import CheckpointError, StateError
from xlcli.text.pretokenize import whole_characters

REPETITION_WINDOW = 256
"""Tokens back to which the repetition penalty looks, prompt included: bounded, so that a state stays small."""

NEVER = float("-inf")
"""The logit of a token that cannot be drawn."""


def apply_repetition_penalty(logits: Tensor, recent: Sequence[Iterable[int]], penalty: float) -> Tensor:
    """Logits (b v) with those of each row's `recent` tokens divided (where positive) or multiplied by `penalty`."""
    if penalty == 1.0:
        return logits
    logits = logits.clone()
    for row, tokens in zip(logits, recent, strict=True):
        ids = sorted(set(tokens))
        scores = row[ids]
        row[ids] = (scores / penalty).where(scores > 0, scores * penalty)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits (b v) shifted to a maximum of 0 and divided by a positive `temperature`."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits (b v) of exactly the `k` likeliest tokens; 0 keeps all."""
    if not 0 < k < logits.shape[-1]:
        return logits
    values, ids = logits.topk(k, dim=-1)
    return logits.new_full(logits.shape, NEVER).scatter(-1, ids, values)


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (b v) of the fewest likeliest tokens whose probabilities reach `p` together; 1 keeps all."""
    if p >= 1.0:
        return logits
    values, ids = logits.sort(dim=-1, descending=True)
    weights = values.softmax(-1)
    before = weights.cumsum(-1) - weights
    return logits.new_full(logits.shape, NEVER).scatter(-1, ids, values.masked_fill(before >= p, NEVER))


def filter_min_p(logits: Tensor, share: float) -> Tensor:
    """Logits (b v) of tokens at least `share` times as likely as the likeliest; 0 keeps all."""
    if share <= 0.0:
        return logits
    weights = logits.softmax(-1)
    return logits.masked_fill(weights < share * weights.amax(-1, keepdim=True), NEVER)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One token (b) for each row of logits (b v), by inverting its distribution at `uniforms` (b) in [0, 1)."""
    heights = logits.double().softmax(-1).cumsum(-1)
    levels = uniforms[:, None].to(heights) * heights[:, -1:]
    return (heights <= levels).sum(-1).clamp(max=logits.shape[-1] - 1)


@dataclass
class SampleRNG:
    """What one sample draws with: its generator, the seed it started from, and the tokens lately read or written."""

    generator: torch.Generator
    seed: int
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=REPETITION_WINDOW))

    @staticmethod
    def of(seed: int) -> SampleRNG:
        """SampleRNG that fall the same way for the same seed, on every device."""
        return SampleRNG(torch.Generator().manual_seed(seed), seed)

    def twin(self, seed: int) -> SampleRNG:
        """SampleRNG of another seed that remember the same tokens."""
        twin = SampleRNG.of(seed)
        twin.recent.extend(self.recent)
        return twin

    def save(self) -> dict[str, str]:
        """Texts from which `restore` makes dice that fall as these would have."""
        drawn = self.generator.get_state().numpy().tobytes()
        return {
            "seed": str(self.seed),
            "dice": base64.b64encode(drawn).decode("ascii"),
            "recent": json.dumps(list(self.recent)),
        }

    @staticmethod
    def restore(carry: Mapping[str, str], seed: int | None) -> SampleRNG | None:
        """The dice saved in `carry`, thrown anew when a `seed` is given; None when there are none and no seed."""
        try:
            recent = [int(token) for token in json.loads(carry.get("recent", "[]"))][-REPETITION_WINDOW:]
            if seed is not None:
                dice = SampleRNG.of(seed)
            elif "dice" in carry:
                dice = SampleRNG.of(int(carry["seed"]))
                drawn = np.frombuffer(base64.b64decode(carry["dice"], validate=True), dtype=np.uint8)
                dice.generator.set_state(torch.from_numpy(drawn.copy()))
            else:
                return None
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"the state's sampler is damaged: {error}.", "Give a --seed, or start afresh.") from None
        dice.recent.extend(recent)
        return dice


def sample_tokens(logits: Tensor, dice: Sequence[SampleRNG], options: GenerateConfig) -> list[int]:
    """The next token of every row of logits (b v), by the whole chain; each row's dice remember it.

    Raises:
        CheckpointError: The model gives NaN.
    """
    logits = logits.float()
    if bool(logits.amax(-1).isnan().any()):
        raise CheckpointError("the model's predictions are not numbers (NaN).", "Its weights are damaged: use another.")
    logits = apply_repetition_penalty(logits, [d.recent for d in dice], options.repetition_penalty)
    if options.temperature == 0.0:
        tokens = logits.argmax(-1).tolist()
    else:
        logits = apply_temperature(logits, options.temperature)
        logits = filter_min_p(filter_top_p(filter_top_k(logits, options.top_k), options.top_p), options.min_p)
        uniforms = [torch.rand((), generator=d.generator, dtype=torch.float64) for d in dice]
        tokens = draw(logits, torch.stack(uniforms).to(logits.device)).tolist()
    for d, token in zip(dice, tokens, strict=True):
        d.recent.append(token)
    return [int(token) for token in tokens]


class StreamingDetokenizer:
    """Bytes on their way out: held while a character is not whole or while they could still become a stop text."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stopped = False
        self._stops = [stop.encode() for stop in stops if stop]
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown now. Once a stop text is complete, `stopped` is true and nothing from it on is shown."""
        text = self._held + data
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = b""
            return text[: min(ends)[1]]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        hold = hold or len(text) - whole_characters(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> bytes:
        """What is still held, when nothing will follow."""
        held, self._held = self._held, b""
        return held


def _overlap(text: bytes, stop: bytes) -> int:
    """Longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
