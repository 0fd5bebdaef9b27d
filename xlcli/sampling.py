"""Sampling: logits to tokens by pure functions and an explicit generator; streaming detokenizer.

The functions are, in order, repetition penalty (Keskar et al. 2019), temperature, top-k (Fan et al. 2018), top-p or
nucleus sampling (Holtzman et al. 2020), min-p (Nguyen et al. 2024), and inversion of the cumulative distribution. Each
sample has its own generator, so its text does not depend on the other samples of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from xlcli.config import Sampling
from xlcli.errors import CheckpointError
from xlcli.text.pretokenize import whole_characters

REPETITION_WINDOW = 256  # latest tokens, prompt included, of the repetition penalty; bounds the size of a state file

_EXCLUDED = float("-inf")  # logit of a token with probability zero


def apply_repetition_penalty(logits: Tensor, recent: Sequence[Iterable[int]], penalty: float) -> Tensor:
    """Logits (b v); at the `recent` tokens of each row divided by `penalty` if positive, else multiplied by it."""
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
    """Logits (b v) with all but the `k` most likely tokens excluded; 0 keeps all."""
    if not 0 < k < logits.shape[-1]:
        return logits
    values, ids = logits.topk(k, dim=-1)
    return logits.new_full(logits.shape, _EXCLUDED).scatter(-1, ids, values)


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (b v) of the smallest set of most likely tokens with a total probability of at least `p`; 1 keeps all."""
    if p >= 1.0:
        return logits
    return torch.stack([_nucleus(row, p) for row in logits])


def _nucleus(logits: Tensor, p: float) -> Tensor:
    """`filter_top_p` of logits (v)."""
    weights = logits.softmax(-1)
    # Only these are sorted: all lighter tokens together weigh less than 1 - p.
    n_heavy = int((weights * len(weights) > 1 - p).sum().clamp(min=1))
    heavy_logits, heavy_ids = logits.topk(n_heavy)
    heavy_weights = weights[heavy_ids]
    weight_before = heavy_weights.cumsum(-1) - heavy_weights
    nucleus = heavy_logits.masked_fill(weight_before >= p, _EXCLUDED)
    return torch.full_like(logits, _EXCLUDED).scatter(-1, heavy_ids, nucleus)


def filter_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Logits (b v) of the tokens at least `min_p` times as likely as the most likely one; 0 keeps all."""
    if min_p <= 0.0:
        return logits
    weights = logits.softmax(-1)
    return logits.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), _EXCLUDED)


def invert_cdf(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (b) by inverting the cumulative distribution of each row of logits (b v) at `uniforms` (b) in [0, 1)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    levels = uniforms[:, None].to(cumulative) * cumulative[:, -1:]
    return (cumulative <= levels).sum(-1).clamp(max=logits.shape[-1] - 1)


class SampleRNG:
    """Random-number generator of one sample, its seed, and the latest tokens of the text for the repetition penalty."""

    def __init__(self, seed: int, recent: Iterable[int] = ()) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers on every device
        self.recent = deque(recent, REPETITION_WINDOW)


def sample_tokens(logits: Tensor, rngs: Sequence[SampleRNG], sampling: Sampling) -> list[int]:
    """The next token of each row of logits (b v), sampled with the generator of that row and appended to its `recent`.

    `CheckpointError` if the logits are NaN.
    """
    logits = logits.float()
    if bool(logits.amax(-1).isnan().any()):
        raise CheckpointError("the model's predictions are not numbers (NaN).", "Its weights are damaged: use another.")
    logits = apply_repetition_penalty(logits, [rng.recent for rng in rngs], sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1).tolist()
    else:
        logits = apply_temperature(logits, sampling.temperature)
        logits = filter_top_k(logits, sampling.top_k)
        logits = filter_top_p(logits, sampling.top_p)
        logits = filter_min_p(logits, sampling.min_p)
        uniforms = [torch.rand((), generator=rng.generator, dtype=torch.float64) for rng in rngs]
        tokens = invert_cdf(logits, torch.stack(uniforms).to(logits.device)).tolist()
    for rng, token in zip(rngs, tokens, strict=True):
        rng.recent.append(token)
    return [int(token) for token in tokens]


def log_probabilities(logits: Tensor, token: int, n_best: int) -> tuple[float, list[tuple[int, float]]]:
    """Log probability in nats of a token by logits (v), and the `n_best` most probable tokens with theirs."""
    scores = logits.double().log_softmax(-1)
    values, ids = scores.topk(min(n_best, len(scores)))
    return float(scores[token]), list(zip(ids.tolist(), values.tolist(), strict=True))


class StreamingDetokenizer:
    """Bytes of tokens to text: holds back unfinished UTF-8 characters and possible beginnings of a stop text.

    `stopped`: a stop text has been completed.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stopped = False
        self._stops = [stop.encode() for stop in stops if stop]
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The text that can be shown after `data`. A stop text and everything after it are dropped."""
        text = self._held + data
        matches = []  # end and start of each stop text
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start))
        if matches:
            self.stopped = True
            self._held = b""
            _, start = min(matches)  # the one that is completed first
            return text[:start]
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        n_shown = len(text) - n_held
        if n_held == 0:
            n_shown = whole_characters(text)
        self._held = text[n_shown:]
        return text[:n_shown]

    def finish(self) -> bytes:
        """The text still held back, at the end of the input."""
        held, self._held = self._held, b""
        return held


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
