"""Mixture of a model's predictions with what followed the same contexts before, token by token, compiled by Numba.

As in compressors of the PAQ family (Mahoney 2005, "Adaptive weighing of context models for lossless data compression"),
a token is a path of binary decisions. Here it leads down a balanced tree over the vocabulary in the order of the texts
of its tokens, so that tokens that begin alike share their first decisions. The probabilities of both halves of a node
by the model are sums over its tokens. Each decision has these inputs, as logits ("stretched" probabilities):

model        the model's
counts       how often tokens of the window took it
surplus      these counts, divided by those that the model expected
contexts     for each context: what its earlier followers within the node predict by their number and order alone, and
             by how much they change the prediction of the model (an adaptive map of its logit, initially the identity)

Three mixers, each with weights for another property of the decision, are logistic regressions learned online; a last
one mixes them. Two adaptive maps of the result (secondary symbol estimation), by node, and by node and last token,
correct it.

Contexts are hashes of latest tokens, of tokens that skip one, and of the place in a line. A chain of positions leads to
what followed each. All of it depends on earlier tokens alone; `tests/oracles/mixture.py` is the slow twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xlcli.errors import ConfigError
from xlcli.kernels.files import KernelFiles, keep_parts
from xlcli.kernels.records import Array
from xlcli.kernels.threads import compiled, inner
from xlcli.memory import context_cache
from xlcli.memory.context_cache import (
    LINE,
    MAP_BINS,
    MAP_RANGE,
    MAX_DEPTH,
    N_CONTEXTS,
    N_LATEST,
    N_MIXERS,
    ORDERS,
    REACH,
    SSE_BINS,
    SSE_RANGE,
    SSE_ROWS,
    Index,
    Mixer,
)

FIRST_RATE, LAST_RATE, FINAL_RATE = 0.04, 0.002, 5e-4
"""Learning rate of mixers before the first token, its minimum, and that of the last mixer."""
SSE_SHARE, SSE_RATE = 0.4, 0.02
"""Share of the corrections in a prediction, and their learning rate."""
LIMIT = 8.0
"""Maximum of a weight, and of what a context changes."""
_ORDERS = np.array(ORDERS)


class Space(NamedTuple):
    """Values of one token, and of its decisions by depth d: nothing is learned before all of them are predicted.

    Attributes:
        hashes: Hash (c) of each context.
        slots: Its slot (c) in the index.
        found: Leaves (c n) of its latest followers, the latest first.
        n_found: Their number (c).
        inputs: Inputs (d i) of the mixers: model, counts, surplus, and two of each context.
        states: State (d c) of a context times two, plus the direction of its latest follower, plus 1; 0: none there.
        lows: Bin (d c) of the map of a context below the model's logit.
        shares: Distance (d c) of the logit from it, in bins.
        classes: Class (d m) of the weights of each mixer: the same for all decisions; by node near the root, then by
            depth; by the longest context that occurred, and depth.
        logits: Result (d m) of each mixer, and of the last one.
        rows: Row (d) of the second correction.
        places: Place (d) of the result in the bins of the corrections.
        sums: Probability (2 l) of each node by the model.
    """

    hashes: Array
    slots: Array
    found: Array
    n_found: Array
    inputs: Array
    states: Array
    lows: Array
    shares: Array
    classes: Array
    logits: Array
    rows: Array
    places: Array
    sums: Array


@inner()
def logistic(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x))


@inner()
def stretch(p: float, least: float) -> float:
    """Logit of a probability that is at least `least` and at most 1 - `least`."""
    p = min(max(p, least), 1 - least)
    return math.log(p / (1 - p))


@inner()
def new_space(n_leaves: int) -> Space:
    """Memory for `n_leaves` leaves."""
    c, d = N_CONTEXTS, 1
    while 1 << d < n_leaves:
        d += 1
    return Space(
        np.zeros(c, np.uint64), np.zeros(c, np.int64), np.zeros((c, N_LATEST), np.int64), np.zeros(c, np.int64),
        np.zeros((d, 3 + 2 * c)), np.zeros((d, c), np.int64), np.zeros((d, c), np.int64), np.zeros((d, c)),
        np.zeros((d, N_MIXERS), np.int64), np.zeros((d, N_MIXERS + 1)), np.zeros(d, np.int64), np.zeros(d),
        np.zeros(2 * n_leaves),
    )  # fmt: skip


@inner()
def hashed(key: Any, value: Any) -> Any:
    """Hash of a key and one more token."""
    key = (key ^ np.uint64(value + 2)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(7)
    return key ^ (key >> np.uint64(29))


@inner()
def token_at(index: Index, at: int) -> int:
    """Token at a position, -1 before the first."""
    return index.inputs[at] if at >= 0 else -1


@inner()
def append(index: Index, token: int, line_end: int) -> None:
    """Reads a token."""
    at = index.sizes[0]
    index.inputs[at], index.targets[at] = token, -1
    index.lines[at] = at if token == line_end or at == 0 else index.lines[at - 1]
    index.sizes[0] = at + 1


@inner()
def hash_contexts(index: Index, out: Array) -> None:
    """Hash of each context of the last token read."""
    at, key, n = index.sizes[0] - 1, np.uint64(1), 0
    for i in range(len(_ORDERS)):
        while n < _ORDERS[i]:
            key = hashed(key, token_at(index, at - n))
            n += 1
        out[i] = key
    last, second = index.inputs[at], token_at(index, at - 1)
    third, fourth = token_at(index, at - 2), token_at(index, at - 3)
    line = index.lines[at]
    before = index.lines[line - 1] if line > 0 else -1
    column, above, first, next_ = at - line, -1, -1, -1
    if column >= LINE:
        column = LINE
    else:
        first = token_at(index, line + 1) if column > 0 else -1
        next_ = token_at(index, line + 2) if column > 1 else -1
        if before >= 0 and at - before < REACH and before + column + 1 <= at:
            above = token_at(index, before + column + 1)
    n = len(_ORDERS)
    out[n] = hashed(hashed(np.uint64(11), column), last)
    out[n + 1] = hashed(hashed(np.uint64(12), second), third)
    out[n + 2] = hashed(hashed(np.uint64(13), above), last)
    out[n + 3] = hashed(hashed(hashed(np.uint64(14), second), third), fourth)
    out[n + 4] = hashed(hashed(hashed(np.uint64(15), first), next_), column)


@inner()
def find(index: Index, leaf_of: Array, space: Space) -> None:
    """Leaves of the latest followers of each context within the window, the latest first, in `space.found`."""
    hash_contexts(index, space.hashes)
    oldest = max(0, index.sizes[0] - index.sizes[2])
    n_slots = index.owners.shape[1]
    for c in range(N_CONTEXTS):
        key = space.hashes[c]
        slot = np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & (n_slots - 1)
        while index.owners[c, slot] != 0 and index.owners[c, slot] != key:
            slot = (slot + 1) & (n_slots - 1)
        space.slots[c] = slot
        at, n = index.latest[c, slot] - 1, 0
        while at >= oldest and n < N_LATEST:
            space.found[c, n] = leaf_of[index.targets[at]]
            n += 1
            at = index.earlier[c, at] - 1
        space.n_found[c] = n


@inner()
def learn(index: Index, leaf_of: Array, target: int, space: Space) -> None:
    """Stores the token that follows the last one read, whose contexts `find` has looked up."""
    at = index.sizes[0] - 1
    index.targets[at] = target
    for c in range(N_CONTEXTS):
        slot = space.slots[c]
        index.earlier[c, at] = index.latest[c, slot]
        index.owners[c, slot], index.latest[c, slot] = space.hashes[c], at + 1
    count(index, leaf_of, target, 1)


@inner()
def count(index: Index, leaf_of: Array, token: int, change: int) -> None:
    """Counts a token that enters or leaves the window."""
    if token >= 0:
        index.sizes[1] += change
        node = leaf_of[token]
        while node:
            index.counts[node] += change
            node >>= 1


@inner()
def forget(index: Index, leaf_of: Array) -> None:
    """Takes the token that leaves the window out of the counts."""
    at = index.sizes[0] - 1 - index.sizes[2]
    if at >= 0:
        count(index, leaf_of, index.targets[at], -1)


@inner()
def sum_tree(log_p: Array, leaf_of: Array, sums: Array) -> None:
    """Probability of each node of the tree, given log-probabilities (v)."""
    sums[:] = 0
    for token in range(len(leaf_of)):
        sums[leaf_of[token]] = math.exp(log_p[token]) + 1e-12
    for node in range(len(sums) // 2 - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]


@inner()
def level(n: int) -> int:
    """Class of a number of followers, 0 to 8."""
    return n if n < 4 else 4 + (n >= 6) + (n >= 9) + (n >= 16) + (n >= 32)


@inner()
def add_context(c: int, node: int, shift: int, mixer: Mixer, space: Space, depth: int) -> None:
    """Inputs of a context from its followers within a node.

    Their state is the direction of the latest one, how often it repeated, and how many went the other way.
    """
    x, n_same, n_other, first = space.inputs[depth], 0, 0, -1
    for i in range(space.n_found[c]):
        leaf = space.found[c, i]
        if leaf >> (shift + 1) != node:
            continue
        direction = (leaf >> shift) & 1
        if first < 0:
            first = direction
        if direction != first:
            n_other += 1
        elif not n_other:
            n_same += 1
    at = 3 + 2 * c
    x[at], x[at + 1], space.states[depth, c] = 0.0, 0.0, 0
    if first < 0:
        return
    state = (81 if node > 1 else 0) + 9 * level(n_same) + level(n_other)
    sign = 1.0 if first else -1.0
    own = sign * x[0]
    place = min(max((own + MAP_RANGE) * MAP_BINS / (2 * MAP_RANGE), 0.0), MAP_BINS - 1e-6)
    low = int(place)
    share = place - low
    mapped = mixer.maps[c, state, low, 0] * (1 - share) + mixer.maps[c, state, low + 1, 0] * share
    x[at] = sign * stretch(mixer.states[c, state, 0], 1e-5)
    x[at + 1] = sign * min(max(stretch(mapped, 1e-6) - own, -LIMIT), LIMIT)
    space.states[depth, c] = 2 * state + first + 1
    space.lows[depth, c], space.shares[depth, c] = low, share


@inner()
def predict(node: int, shift: int, index: Index, mixer: Mixer, space: Space, known: bool, depth: int) -> float:
    """Probability that the next token is in the upper half of a node of 2^(shift + 1) leaves at this depth.

    Without `known`, no context has a follower there.
    """
    x, sums, classes, logits = space.inputs[depth], space.sums, space.classes[depth], space.logits[depth]
    weighted = min(depth, MAX_DEPTH)
    low, high = float(index.counts[2 * node]), float(index.counts[2 * node + 1])
    x[0] = stretch(sums[2 * node + 1] / sums[node], 1e-7)
    x[1] = math.log((high + 0.4) / (low + 0.4)) if low + high > 0 else 0.0
    scale = index.sizes[1] / max(mixer.progress[0], 1.0)
    expected = mixer.expected[2 * node] * scale, mixer.expected[2 * node + 1] * scale
    x[2] = math.log((high + 0.1) / (expected[1] + 0.1)) - math.log((low + 0.1) / (expected[0] + 0.1))
    highest = 0
    for c in range(N_CONTEXTS):
        if known:
            add_context(c, node, shift, mixer, space, depth)
        if c < len(_ORDERS) and space.n_found[c]:
            highest = c + 1
    last = len(x) if known else 3
    classes[0] = 0
    classes[1] = node if node < 128 else 128 + weighted
    classes[2] = highest * (MAX_DEPTH + 1) + weighted
    total = 0.0
    for m in range(N_MIXERS):
        logit = 0.0
        weights = mixer.weights[m, classes[m]]
        for i in range(last):
            logit += weights[i] * x[i]
        logits[m] = min(max(logit, -16.0), 16.0)
        total += mixer.final[weighted, m] * logits[m]
    total = min(max(total, -16.0), 16.0)
    token = np.uint64(index.inputs[index.sizes[0] - 1])
    row = np.int64(hashed(hashed(np.uint64(17), token), node) & np.uint64(SSE_ROWS - 1))
    place = min(max((total + SSE_RANGE) * SSE_BINS / (2 * SSE_RANGE), 0.0), SSE_BINS - 1e-6)
    bin_ = int(place)
    share = place - bin_
    width = 2 * SSE_RANGE / SSE_BINS
    base = logistic(bin_ * width - SSE_RANGE) * (1 - share) + logistic((bin_ + 1) * width - SSE_RANGE) * share
    for i in range(2):
        table = mixer.sse[i, row if i else node & (SSE_ROWS - 1)]
        base += 0.5 * (table[bin_] * (1 - share) + table[bin_ + 1] * share)
    logits[N_MIXERS], space.rows[depth], space.places[depth] = total, row, place
    p = (1 - SSE_SHARE) * logistic(total) + SSE_SHARE * base
    return min(max(p, 2e-8), 1 - 2e-8)


@inner()
def update(node: int, bit: int, mixer: Mixer, space: Space, depth: int) -> None:
    """Learns a decision, of which `predict` has left its values in `space`."""
    x, logits, weighted = space.inputs[depth], space.logits[depth], min(depth, MAX_DEPTH)
    rate = max(LAST_RATE, FIRST_RATE / (1 + 0.002 * mixer.progress[0]))
    error = bit - logistic(logits[N_MIXERS])
    for m in range(N_MIXERS):
        change = rate * (bit - logistic(logits[m]))
        weight = mixer.final[weighted, m] + FINAL_RATE * error * logits[m]
        mixer.final[weighted, m] = min(max(weight, -LIMIT), LIMIT)
        weights = mixer.weights[m, space.classes[depth, m]]
        for i in range(len(x)):
            weights[i] = min(max(weights[i] + change * x[i], -LIMIT), LIMIT)
    row, place = space.rows[depth], space.places[depth]
    bin_ = int(place)
    share = place - bin_
    width = 2 * SSE_RANGE / SSE_BINS
    for i in range(2):
        table = mixer.sse[i, row if i else node & (SSE_ROWS - 1)]
        for j in range(2):
            part = share if j else 1 - share
            identity = logistic((bin_ + j) * width - SSE_RANGE)
            table[bin_ + j] += SSE_RATE * part * (bit - identity - table[bin_ + j])
    for c in range(N_CONTEXTS):
        if not space.states[depth, c]:
            continue
        state, first = (space.states[depth, c] - 1) >> 1, (space.states[depth, c] - 1) & 1
        repeated = 1.0 if bit == first else 0.0
        cell = mixer.states[c, state]
        cell[0] += max(1 / (cell[1] + 9.5), 1 / 255) * (repeated - cell[0])
        cell[1] += 1
        for j in range(2):
            part = space.shares[depth, c] if j else 1 - space.shares[depth, c]
            cell = mixer.maps[c, state, space.lows[depth, c] + j]
            cell[0] += part * max(1 / (cell[1] + 6), 1 / 500) * (repeated - cell[0])
            cell[1] += part


@inner()
def encode(log_p: Array, target: int, leaf_of: Array, index: Index, mixer: Mixer, space: Space) -> float:
    """Surprisal in nats of a token after the last one read, which `find` has looked up; the mixer learns from it."""
    sums, n_leaves, nats = space.sums, len(space.sums) // 2, 0.0
    sum_tree(log_p, leaf_of, sums)
    leaf, n_levels = leaf_of[target], len(space.inputs)
    for is_learned in range(2):
        for depth in range(n_levels):
            shift = n_levels - 1 - depth
            node, bit = leaf >> (shift + 1), (leaf >> shift) & 1
            if ((2 * node + 1) << shift) - n_leaves >= len(leaf_of):
                continue  # no token is in the upper half
            if is_learned:
                update(node, bit, mixer, space, depth)
            else:
                p = predict(node, shift, index, mixer, space, True, depth)
                nats -= math.log(p if bit else 1 - p)
    scale = 1 / sums[1]
    for node in range(1, 2 * n_leaves):
        mixer.expected[node] += sums[node] * scale
    mixer.progress[0] += 1
    return nats


@inner()
def advance(index: Index, leaf_of: Array, line_end: int, token: int) -> None:
    """Reads a token. If there is no room for it, what is older than the window is forgotten first."""
    size, window = index.sizes[0], index.sizes[2]
    if size == len(index.inputs):
        first = size - window - REACH
        inputs, targets = index.inputs[first:size].copy(), index.targets[first:size].copy()
        index.owners[:], index.latest[:], index.earlier[:], index.counts[:] = 0, 0, 0, 0
        index.sizes[0] = index.sizes[1] = 0
        store(index, leaf_of, line_end, inputs, targets)
    append(index, token, line_end)
    forget(index, leaf_of)


@inner()
def store(index: Index, leaf_of: Array, line_end: int, tokens: Array, targets: Array) -> None:
    """Reads tokens (t), for which there is room, and stores what follows them (t), -1 if it is unknown."""
    space = new_space(1)
    for i in range(len(tokens)):
        append(index, tokens[i], line_end)
        forget(index, leaf_of)
        if targets[i] >= 0:
            find(index, leaf_of, space)
            learn(index, leaf_of, targets[i], space)


@compiled()
def read(index: Index, leaf_of: Array, line_end: int, tokens: Array) -> None:
    """Reads tokens (t) of which nothing is learned."""
    for token in tokens:
        advance(index, leaf_of, line_end, token)


@compiled()
def fill(index: Index, leaf_of: Array, line_end: int, tokens: Array, targets: Array) -> None:
    """Reads tokens (t) and stores what follows them (t), -1 if it is unknown."""
    space = new_space(1)
    for i in range(len(tokens)):
        advance(index, leaf_of, line_end, tokens[i])
        if targets[i] >= 0:
            find(index, leaf_of, space)
            learn(index, leaf_of, targets[i], space)


@compiled()
def score(index: Index, mixer: Mixer, leaf_of: Array, line_end: int, log_p: Array, texts: Array, is_read: bool,
          nats: Array) -> None:  # fmt: skip
    """Surprisal in nats (t) of the second row of `texts` (2 t) after the first, and learns from it.

    `log_p` (t v) are log-probabilities of the model; with `is_read` the first row is in the index already.
    """
    space = new_space(len(index.counts) // 2)
    for i in range(texts.shape[1]):
        if not is_read:
            advance(index, leaf_of, line_end, texts[0, i])
        find(index, leaf_of, space)
        nats[i] = encode(log_p[i], texts[1, i], leaf_of, index, mixer, space)
        learn(index, leaf_of, texts[1, i], space)


@compiled()
def distribution(index: Index, mixer: Mixer, leaf_of: Array, log_p: Array) -> Array:
    """Log-probabilities (v) of the token after the last one read, given the model's (v)."""
    n_leaves = len(index.counts) // 2
    space = new_space(n_leaves)
    find(index, leaf_of, space)
    sum_tree(log_p, leaf_of, space.sums)
    known = np.zeros(2 * n_leaves, np.bool_)
    for c in range(N_CONTEXTS):
        for i in range(space.n_found[c]):
            node = space.found[c, i] >> 1
            while node and not known[node]:
                known[node] = True
                node >>= 1
    nodes = np.full(2 * n_leaves, -np.inf)
    nodes[1] = 0.0
    depth = 0
    for node in range(1, n_leaves):
        if node == 2 << depth:
            depth += 1
        shift = len(space.inputs) - 1 - depth
        if ((2 * node) << shift) - n_leaves >= len(leaf_of):
            continue
        nodes[2 * node] = nodes[node]
        if ((2 * node + 1) << shift) - n_leaves < len(leaf_of):
            p = predict(node, shift, index, mixer, space, known[node], depth)
            nodes[2 * node] += math.log(1 - p)
            nodes[2 * node + 1] = nodes[node] + math.log(p)
    return nodes[leaf_of]


PROGRAM = "from xlcli.kernels.mixture import compile_here; compile_here()"
CONSTANTS = [context_cache.__file__]


def _kernel_files() -> list[KernelFiles]:
    """Files that keep the compiled kernels, none where they cannot be kept."""
    try:
        return [KernelFiles(each, lambda _: PROGRAM, CONSTANTS) for each in (score, fill, read, distribution)]
    except ConfigError:
        raise
    except Exception:  # no folder for kernels can be written, or Numba does not compile
        return []


FILES = _kernel_files()


def _arguments() -> list[tuple[Any, ...]]:
    """Arguments for the kernels of `FILES`, of the types that they have for every cache."""
    index, mixer, leaf_of = context_cache.new_index(1, 2), context_cache.new_mixer(2), np.empty(2, np.int64)
    log_p, texts = np.empty((1, 1)), np.empty((2, 1), np.int64)
    return [
        (index, mixer, leaf_of, 0, log_p, texts, False, log_p[0]),
        (index, leaf_of, 0, *texts),
        (index, leaf_of, 0, texts[0]),
        (index, mixer, leaf_of, log_p[0]),
    ]


def is_compiled() -> bool:
    """True if the kernels are compiled, here or in files."""
    return bool(FILES) and all(file.has(*given) for file, given in zip(FILES, _arguments(), strict=True))


def compile_kernels(stop: Callable[[], bool]) -> str | None:
    """Compiles the kernels, unless `stop` becomes true. Returns the reason for which they cannot be kept, if any."""
    problem = None
    for file, given in zip(FILES, _arguments(), strict=False):
        problem = file.compile(*given, stop=stop) or problem
        if file.program is None:
            for other in FILES:
                other.program = None
    return problem


def compile_here() -> None:
    """Compiles the kernels in this process and writes their files."""
    for file in FILES:
        file.program = None
    keep_parts(CONSTANTS)
    compile_kernels(lambda: False)
