"""Predictions of a model, corrected by what followed the same contexts before, token by token, compiled by Numba.

The correction is a logistic regression over the vocabulary that is learned online, one step of gradient descent after
each token:

    logit(token) = log p(token) by the model + bias(token) + sum over contexts that it followed of (a + b r(token))

r is the surprisal of the token by the model, so that a context can say "add this much" (a) and "believe the model this
much less" (b). Constant and slope are looked up by the kind of the context, by whether the token followed it last, and
by how often it and how often others did. All tokens that followed no context keep the model's proportions, and the
softmax of all logits is the prediction: a cache in the sense of Grave et al. 2017, with weights as in mixtures of the
PAQ family (Mahoney 2005) and rates by the size of earlier gradients (Duchi et al. 2011).

Contexts are the latest 1 to 12 tokens, and places in similar lines. `tests/oracles/mixture.py` is the slow twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xlcli.errors import ConfigError
from xlcli.kernels.files import KernelFiles
from xlcli.kernels.records import Array
from xlcli.kernels.threads import compiled, inner
from xlcli.memory import context_cache
from xlcli.memory.context_cache import ABOVE, COLUMN, HEAD, LINE, N_KINDS, N_READ, ORDERS, REACH, WINDOW, Index, Learned

RATE, BIAS_RATE = 0.25, 0.02  # of a weight (divided by the root of its summed squared gradients), of a bias
MOST_FOLLOWERS = 64  # number of latest followers of a context that count
LEVELS = np.array([n.bit_length() for n in range(MOST_FOLLOWERS + 1)])  # class of a number of followers
MOST_SURPRISE = 12.0  # surprisal in nats that counts as r = 1; r is between 0 and 1
MOST_RAISED = 30.0  # maximum change of a logit by all contexts
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiplied by it, similar keys become dissimilar
NO_TOKEN = -1


class Found(NamedTuple):
    """What followed the contexts of one token, by token (v), kind of context (k), or candidate (c)."""

    candidates: Array  # tokens (c) that followed a context
    counts: Array  # how often each token followed the context of each kind (v k); all are 0 before `find`
    totals: Array  # number of followers of the context of each kind (k)
    latest: Array  # token that followed it last (k)
    surprises: Array  # r of each token (v) that is a candidate
    probabilities: Array  # prediction of each token (v)


@inner()
def token_at(index: Index, position: int) -> int:
    """Token at one of the latest positions, `NO_TOKEN` before the first."""
    if position < 0:
        return NO_TOKEN
    return index.tokens[position % len(index.tokens)]  # type: ignore[no-any-return]


@inner()
def hashed(key: Any, value: Any) -> Any:
    """Hash of a key and one more number, at least -1."""
    key = (key ^ np.uint64(value + 2)) * HASH_FACTOR + np.uint64(7)
    return key ^ (key >> np.uint64(29))


@inner()
def append(index: Index, token: int, line_ends: Array) -> None:
    """Adds a token to the index: where its line begins, and the key (hash) of each context that ends with it."""
    n, at = len(index.tokens), index.sizes[N_READ]
    place = at % n
    index.sizes[N_READ] = at + 1
    index.tokens[place] = token
    index.followers[place] = NO_TOKEN
    is_line_start = line_ends[token] or at == 0
    index.lines[place] = at if is_line_start else index.lines[(at - 1) % n]
    key, n_hashed = np.uint64(1), 0
    for kind, order in enumerate(ORDERS):  # the hash of a longer context goes on from that of a shorter one
        for distance in range(n_hashed, order):
            key = hashed(key, token_at(index, at - distance))
        index.keys[kind, place] = key
        n_hashed = order
    append_line_keys(index, at, token)


@inner()
def append_line_keys(index: Index, at: int, token: int) -> None:
    """Writes the keys of the contexts that know the place in its line of a token, the one at a position.

    They hash its column, the token above the next one, and the tokens in columns 1 and 2, or `NO_TOKEN`. In column 0 is
    the end mark of the line before. Columns from `LINE` on count as one, and of their tokens nothing else is hashed.
    """
    n = len(index.tokens)
    place = at % n
    start = index.lines[place]
    column = min(at - start, LINE)
    above = first = second = NO_TOKEN
    if column < LINE:
        if column > 0:
            first = token_at(index, start + 1)
        if column > 1:
            second = token_at(index, start + 2)
        start_before = index.lines[(start - 1) % n]
        position_above = start_before + column + 1
        if start > 0 and at - start_before < REACH and position_above <= at:
            above = token_at(index, position_above)
    # Numbers 2 to 4 keep the kinds of contexts apart.
    index.keys[COLUMN, place] = hashed(hashed(np.uint64(2), column), token)
    index.keys[ABOVE, place] = hashed(hashed(np.uint64(3), above), token)
    index.keys[HEAD, place] = hashed(hashed(hashed(np.uint64(4), first), second), column)


@inner()
def head_of(index: Index, kind: int, place: int) -> int:
    """Place in the heads of a context of the token at a place."""
    n_heads = index.heads.shape[1]  # a power of two
    return np.int64(index.keys[kind, place] & np.uint64(n_heads - 1))  # type: ignore[return-value]


@inner()
def store(index: Index, follower: int) -> None:
    """Stores what follows the token that was appended last, so that `find` finds its contexts from now on."""
    at = index.sizes[N_READ] - 1
    place = at % len(index.tokens)
    index.followers[place] = follower
    for kind in range(N_KINDS):
        head = head_of(index, kind, place)
        index.links[kind, place] = index.heads[kind, head]
        index.heads[kind, head] = at


@inner()
def find(index: Index, found: Found) -> Array:
    """Finds what followed the last token's contexts before: returns these tokens, and counts them in `found`."""
    n, n_read = len(index.tokens), index.sizes[N_READ]
    oldest = max(0, n_read - index.sizes[WINDOW])
    place = (n_read - 1) % n
    n_candidates = 0
    found.totals[:] = 0
    for kind in range(N_KINDS):
        position = index.heads[kind, head_of(index, kind, place)]
        while position >= oldest and found.totals[kind] < MOST_FOLLOWERS:
            earlier = position % n
            position = index.links[kind, earlier]
            if index.keys[kind, earlier] != index.keys[kind, place]:  # another context with the same head
                continue
            token = index.followers[earlier]
            if found.totals[kind] == 0:
                found.latest[kind] = token
            if not found.counts[token].any():
                found.candidates[n_candidates] = token
                n_candidates += 1
            found.counts[token, kind] += 1
            found.totals[kind] += 1
    return found.candidates[:n_candidates]


@inner()
def cell_of(found: Found, token: int, kind: int) -> tuple[int, int, int, int]:
    """Index in `Learned.weights` of the constant and slope for a candidate and a kind of context that it followed."""
    is_latest = 1 if found.latest[kind] == token else 0
    n_same = found.counts[token, kind]
    n_other = found.totals[kind] - n_same
    return kind, is_latest, LEVELS[n_same], LEVELS[n_other]


@inner()
def predict(candidates: Array, found: Found, learned: Learned, log_p: Array) -> None:
    """Turns log-probabilities (v) by the model, `log_p`, into those of the mixture, in place.

    `candidates` followed contexts of the present token before, as `found` counts. Each kind of context adds constant +
    slope · surprise to the logit of those that followed it. Writes `found.surprises` and `found.probabilities`.
    """
    logits = log_p  # until they are normalized
    logits += learned.bias
    for token in candidates:
        surprise = min(max(-logits[token] / MOST_SURPRISE, 0.0), 1.0)
        found.surprises[token] = surprise
        by_contexts = 0.0
        for kind in range(N_KINDS):
            if found.counts[token, kind]:  # it followed the context of this kind
                constant, slope = learned.weights[cell_of(found, token, kind)]
                by_contexts += constant + slope * surprise
        logits[token] += min(max(by_contexts, -MOST_RAISED), MOST_RAISED)
    # The softmax of the logits.
    total = 0.0
    for token in range(len(logits)):
        found.probabilities[token] = math.exp(logits[token])
        total += found.probabilities[token]
    found.probabilities[:] *= 1 / total
    log_p -= math.log(total)


@inner()
def learn(candidates: Array, found: Found, target: int, learned: Learned) -> None:
    """Learns from the token that came, `target`, after `predict`: a step of gradient descent on its surprisal.

    Changes `learned` in place: constants and slopes, with rates by their squared gradients (Adagrad), and the biases.
    """
    for token in candidates:
        # The gradient of the surprisal by the logit of a token is its probability, less 1 for the target.
        by_logit = found.probabilities[token] - (1.0 if token == target else 0.0)
        for kind in range(N_KINDS):
            if found.counts[token, kind]:  # it followed the context of this kind
                cell = cell_of(found, token, kind)
                constant_and_slope, squares = learned.weights[cell], learned.squares[cell]
                for i, factor in enumerate((1.0, found.surprises[token])):
                    gradient = by_logit * factor
                    squares[i] += gradient * gradient
                    constant_and_slope[i] -= RATE * gradient / math.sqrt(squares[i])
    learned.bias[:] -= BIAS_RATE * found.probabilities
    learned.bias[target] += BIAS_RATE


@compiled()
def read(index: Index, learned: Learned, line_ends: Array, texts: Array, log_p: Array) -> None:
    """Reads tokens one after the other: predicts what follows each of the last n, then learns from what did.

    Index, `learned` and `log_p` change in place. The first row of `texts` (2 t) are the tokens, the second one what
    followed each, -1 if it is not known. `log_p` (n v) are log-probabilities by the model of what follows the last n
    tokens, and become those of the mixture. `line_ends` (v) are true for the tokens that end a line.
    """
    vocab_size = log_p.shape[1]
    found = Found(
        candidates=np.empty(N_KINDS * MOST_FOLLOWERS, np.int64),
        counts=np.zeros((vocab_size, N_KINDS), np.int64),
        totals=np.empty(N_KINDS, np.int64),
        latest=np.empty(N_KINDS, np.int64),
        surprises=np.empty(vocab_size),
        probabilities=np.empty(vocab_size),
    )
    n_tokens = texts.shape[1]
    n_not_predicted = n_tokens - len(log_p)
    for i in range(n_tokens):
        token, follower = texts[0, i], texts[1, i]
        is_follower_known = follower >= 0
        append(index, token, line_ends)
        if i >= n_not_predicted:
            candidates = find(index, found)
            predict(candidates, found, learned, log_p[i - n_not_predicted])
            if is_follower_known:  # it is used only after it was predicted
                learn(candidates, found, follower, learned)
            for candidate in candidates:  # `find` needs counts of 0; to clear all of them would take longer
                found.counts[candidate] = 0
        if is_follower_known:
            store(index, follower)


PROGRAM = "from xlcli.kernels import mixture; mixture.FILES.compile_here(*mixture.example_arguments())"


def example_arguments() -> tuple[Any, ...]:
    """Arguments of the types that the kernel has for every cache."""
    index, learned = context_cache.new_index(1), context_cache.new_learned(2)
    return index, learned, np.empty(2, np.bool_), np.empty((2, 1), np.int64), np.empty((1, 2))


def _kernel_files() -> KernelFiles | None:
    """The file that keeps the compiled kernel, None where it cannot be kept."""
    try:
        return KernelFiles(read, lambda _: PROGRAM, [context_cache.__file__])
    except ConfigError:
        raise
    except Exception:  # no folder for kernels can be written, or Numba does not compile
        return None


FILES = _kernel_files()


def is_compiled() -> bool:
    return FILES is not None and FILES.has(*example_arguments())


def compile_kernels(stop: Callable[[], bool]) -> str | None:
    """Compiles the kernel, unless `stop` becomes true. Returns the reason for which it cannot be kept, if any."""
    return None if FILES is None else FILES.compile(*example_arguments(), stop=stop)
