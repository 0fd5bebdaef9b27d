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
    COUNTS,
    LINE,
    MAP_BINS,
    MAP_RANGE,
    MAX_DEPTH,
    MODEL,
    N_COMMON,
    N_CONTEXTS,
    N_COUNTED,
    N_INPUTS,
    N_LATEST,
    N_LEVELS,
    N_MIXERS,
    N_READ,
    N_UPDATES,
    ORDERS,
    PROBABILITY,
    REACH,
    SSE_BINS,
    SSE_RANGE,
    SSE_ROWS,
    SURPLUS,
    WINDOW,
    Index,
    Mixer,
)

FIRST_RATE, LAST_RATE, FINAL_RATE = 0.04, 0.002, 5e-4
"""Learning rate of mixers before the first token, its minimum, and that of the last mixer."""
SSE_SHARE, SSE_RATE = 0.4, 0.02
"""Share of the corrections in a prediction, and their learning rate."""
LIMIT = 8.0
"""Maximum of a weight, and of what a context changes."""
MAX_LOGIT = 16.0
"""Maximum of the result of a mixer."""
LEAST = 2e-8
"""Least probability of a decision."""
FIRST_NODES = 128
"""Nodes below this number, near the root, have weights of their own."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: multiplied by it, similar keys become dissimilar."""
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
    return 1 / (1 + math.exp(-x))


@inner()
def stretch(p: float, least: float) -> float:
    """Logit of a probability that is at least `least` and at most 1 - `least`."""
    p = min(max(p, least), 1 - least)
    return math.log(p / (1 - p))


@inner()
def new_space(n_leaves: int) -> Space:
    c, d = N_CONTEXTS, 1
    while 1 << d < n_leaves:
        d += 1
    return Space(
        hashes=np.zeros(c, np.uint64),
        slots=np.zeros(c, np.int64),
        found=np.zeros((c, N_LATEST), np.int64),
        n_found=np.zeros(c, np.int64),
        inputs=np.zeros((d, N_INPUTS)),
        states=np.zeros((d, c), np.int64),
        lows=np.zeros((d, c), np.int64),
        shares=np.zeros((d, c)),
        classes=np.zeros((d, N_MIXERS), np.int64),
        logits=np.zeros((d, N_MIXERS + 1)),
        rows=np.zeros(d, np.int64),
        places=np.zeros(d),
        sums=np.zeros(2 * n_leaves),
    )


@inner()
def hashed(key: Any, value: Any) -> Any:
    """Hash of a key and one more token."""
    key = (key ^ np.uint64(value + 2)) * HASH_FACTOR + np.uint64(7)
    return key ^ (key >> np.uint64(29))


@inner()
def token_at(index: Index, at: int) -> int:
    """Token at a position, -1 before the first."""
    if at < 0:
        return -1
    return index.inputs[at]  # type: ignore[no-any-return]


@inner()
def append(index: Index, token: int, line_end: int) -> None:
    at = index.sizes[N_READ]
    index.inputs[at], index.targets[at] = token, -1
    if token == line_end or at == 0:
        index.lines[at] = at
    else:
        index.lines[at] = index.lines[at - 1]
    index.sizes[N_READ] = at + 1


@inner()
def hash_contexts(index: Index, out: Array) -> None:
    """Hash (c) of each context of the last token read."""
    at, key, n = index.sizes[N_READ] - 1, np.uint64(1), 0
    for i in range(len(_ORDERS)):  # the hash of a longer context goes on from that of a shorter one
        while n < _ORDERS[i]:
            key = hashed(key, token_at(index, at - n))
            n += 1
        out[i] = key
    last, second = index.inputs[at], token_at(index, at - 1)
    third, fourth = token_at(index, at - 2), token_at(index, at - 3)

    # The place in the line, the first two tokens of the line, and the token of the line before at the next place.
    line = index.lines[at]
    line_before = index.lines[line - 1] if line > 0 else -1
    column, above, first_in_line, second_in_line = at - line, -1, -1, -1
    if column >= LINE:
        column = LINE
    else:
        if column > 0:
            first_in_line = token_at(index, line + 1)
        if column > 1:
            second_in_line = token_at(index, line + 2)
        place_above = line_before + column + 1
        if line_before >= 0 and at - line_before < REACH and place_above <= at:
            above = token_at(index, place_above)

    # Numbers 11 to 15 keep the kinds of contexts apart.
    n = len(_ORDERS)
    out[n] = hashed(hashed(np.uint64(11), column), last)
    out[n + 1] = hashed(hashed(np.uint64(12), second), third)
    out[n + 2] = hashed(hashed(np.uint64(13), above), last)
    out[n + 3] = hashed(hashed(hashed(np.uint64(14), second), third), fourth)
    out[n + 4] = hashed(hashed(hashed(np.uint64(15), first_in_line), second_in_line), column)


@inner()
def slot_of(index: Index, c: int, key: Any) -> int:
    """Slot of a context, or the free one that it would get (linear probing)."""
    n_slots = index.owners.shape[1]  # a power of two
    slot = np.int64((key * HASH_FACTOR) >> np.uint64(20)) & (n_slots - 1)
    while index.owners[c, slot] != 0 and index.owners[c, slot] != key:
        slot = (slot + 1) & (n_slots - 1)
    return slot  # type: ignore[no-any-return]


@inner()
def find(index: Index, leaf_of: Array, space: Space) -> None:
    """Leaves of the latest followers of each context within the window, the latest first, in `space.found`.

    Also sets `hashes`, `slots` and `n_found` of the space.
    """
    hash_contexts(index, space.hashes)
    oldest = max(0, index.sizes[N_READ] - index.sizes[WINDOW])
    for c in range(N_CONTEXTS):
        slot = slot_of(index, c, space.hashes[c])
        space.slots[c] = slot
        # The chain of its positions, which are stored plus 1.
        at, n = index.latest[c, slot] - 1, 0
        while at >= oldest and n < N_LATEST:
            space.found[c, n] = leaf_of[index.targets[at]]
            n += 1
            at = index.earlier[c, at] - 1
        space.n_found[c] = n


@inner()
def learn(index: Index, leaf_of: Array, target: int, space: Space) -> None:
    """Stores the token that follows the last one read, whose contexts `find` has looked up."""
    at = index.sizes[N_READ] - 1
    index.targets[at] = target
    for c in range(N_CONTEXTS):
        slot = space.slots[c]
        index.earlier[c, at] = index.latest[c, slot]
        index.owners[c, slot], index.latest[c, slot] = space.hashes[c], at + 1
    count(index, leaf_of, target, 1)


@inner()
def count(index: Index, leaf_of: Array, token: int, change: int) -> None:
    """Counts a token that enters (change 1) or leaves (-1) the window, at its leaf and all nodes above."""
    if token >= 0:
        index.sizes[N_COUNTED] += change
        node = leaf_of[token]
        while node:
            index.counts[node] += change
            node >>= 1


@inner()
def forget(index: Index, leaf_of: Array) -> None:
    at = index.sizes[N_READ] - 1 - index.sizes[WINDOW]
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
    """Class of a number of followers, 0 to `N_LEVELS` - 1."""
    if n < 4:
        return n
    return 4 + (n >= 6) + (n >= 9) + (n >= 16) + (n >= 32)


@inner()
def in_bins(logit: float, most: float, n_bins: int) -> float:
    """Place of a logit between -`most` and `most`, counted in bins: 0 to a little less than `n_bins`.

    Its whole part is a bin, its fraction the share of the next bin in a mean of both.
    """
    return min(max((logit + most) * n_bins / (2 * most), 0.0), n_bins - 1e-6)


@inner()
def add_context(c: int, node: int, shift: int, mixer: Mixer, space: Space, depth: int) -> None:
    """Sets the inputs of a context from its followers within a node; needs the input `MODEL`.

    Their state is the direction of the latest one, how often it repeated, and how many went the other way.
    """
    x, n_same, n_other, latest = space.inputs[depth], 0, 0, -1
    for i in range(space.n_found[c]):
        leaf = space.found[c, i]
        if leaf >> (shift + 1) != node:
            continue
        direction = (leaf >> shift) & 1
        if latest < 0:
            latest = direction
        if direction != latest:
            n_other += 1
        elif not n_other:
            n_same += 1
    by_order = N_COMMON + 2 * c  # place of what the followers alone predict
    by_model = by_order + 1  # and of how they change the prediction of the model
    x[by_order], x[by_model], space.states[depth, c] = 0.0, 0.0, 0
    if latest < 0:
        return
    state = N_LEVELS * level(n_same) + level(n_other)
    if node > 1:  # the root has states of its own
        state += N_LEVELS * N_LEVELS
    # Inputs are logits of the upper half; states and maps know those of the direction of the latest follower.
    sign = 1.0 if latest else -1.0
    model_logit = sign * x[MODEL]
    place = in_bins(model_logit, MAP_RANGE, MAP_BINS)
    low = int(place)
    share = place - low
    cells = mixer.maps[c, state]
    mapped = cells[low, PROBABILITY] * (1 - share) + cells[low + 1, PROBABILITY] * share
    x[by_order] = sign * stretch(mixer.states[c, state, PROBABILITY], 1e-5)
    x[by_model] = sign * min(max(stretch(mapped, 1e-6) - model_logit, -LIMIT), LIMIT)
    space.states[depth, c] = 2 * state + latest + 1
    space.lows[depth, c], space.shares[depth, c] = low, share


@inner()
def predict(node: int, shift: int, index: Index, mixer: Mixer, space: Space, known: bool, depth: int) -> float:
    """Probability that the next token is in the upper half of a node of 2^(shift + 1) leaves at this depth.

    Without `known`, no context has a follower there. Leaves in `space` what `update` needs.
    """
    x, sums = space.inputs[depth], space.sums
    # Inputs of the model and of the counts.
    low, high = float(index.counts[2 * node]), float(index.counts[2 * node + 1])
    x[MODEL] = stretch(sums[2 * node + 1] / sums[node], 1e-7)
    x[COUNTS] = math.log((high + 0.4) / (low + 0.4)) if low + high > 0 else 0.0
    scale = index.sizes[N_COUNTED] / max(mixer.progress[0], 1.0)
    expected_low, expected_high = mixer.expected[2 * node] * scale, mixer.expected[2 * node + 1] * scale
    x[SURPLUS] = math.log((high + 0.1) / (expected_high + 0.1)) - math.log((low + 0.1) / (expected_low + 0.1))
    # Inputs of the contexts, and the longest one of latest tokens that occurred before.
    longest = 0
    for c in range(N_CONTEXTS):
        if known:
            add_context(c, node, shift, mixer, space, depth)
        if c < len(_ORDERS) and space.n_found[c]:
            longest = c + 1
    n_inputs = len(x) if known else N_COMMON
    total = mix(node, longest, n_inputs, mixer, space, depth)
    corrected = correct(node, total, index, mixer, space, depth)
    p = (1 - SSE_SHARE) * logistic(total) + SSE_SHARE * corrected
    return min(max(p, LEAST), 1 - LEAST)


@inner()
def mix(node: int, longest: int, n_inputs: int, mixer: Mixer, space: Space, depth: int) -> float:
    """Logit by all mixers together, of the first inputs (`n_inputs`); sets `classes` and `logits` of the space."""
    x, classes, logits, weighted = space.inputs[depth], space.classes[depth], space.logits[depth], min(depth, MAX_DEPTH)
    classes[0] = 0
    classes[1] = node if node < FIRST_NODES else FIRST_NODES + weighted
    classes[2] = longest * (MAX_DEPTH + 1) + weighted
    total = 0.0
    for m in range(N_MIXERS):
        logit = 0.0
        weights = mixer.weights[m, classes[m]]
        for i in range(n_inputs):
            logit += weights[i] * x[i]
        logits[m] = min(max(logit, -MAX_LOGIT), MAX_LOGIT)
        total += mixer.final[weighted, m] * logits[m]
    total = min(max(total, -MAX_LOGIT), MAX_LOGIT)
    logits[N_MIXERS] = total
    return total


@inner()
def correct(node: int, logit: float, index: Index, mixer: Mixer, space: Space, depth: int) -> float:
    """Probability of a logit, plus the mean of both corrections; sets `rows` and `places` of the space."""
    token = np.uint64(index.inputs[index.sizes[N_READ] - 1])
    row = np.int64(hashed(hashed(np.uint64(17), token), node) & np.uint64(SSE_ROWS - 1))
    place = in_bins(logit, SSE_RANGE, SSE_BINS)
    low = int(place)
    share = place - low
    p = bin_probability(low) * (1 - share) + bin_probability(low + 1) * share
    for i in range(2):
        table = mixer.sse[i, row if i else node & (SSE_ROWS - 1)]
        p += 0.5 * (table[low] * (1 - share) + table[low + 1] * share)
    space.rows[depth], space.places[depth] = row, place
    return p


@inner()
def bin_probability(number: int) -> float:
    """Probability at the lower end of a bin of the corrections."""
    width = 2 * SSE_RANGE / SSE_BINS
    return logistic(number * width - SSE_RANGE)


@inner()
def update(node: int, bit: int, mixer: Mixer, space: Space, depth: int) -> None:
    """Learns a decision, of which `predict` has left its values in `space`."""
    # Mixers, by the gradient of the surprisal.
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

    # Corrections, in both bins by their shares.
    row, place = space.rows[depth], space.places[depth]
    low = int(place)
    share = place - low
    for i in range(2):
        table = mixer.sse[i, row if i else node & (SSE_ROWS - 1)]
        for j in range(2):
            part = share if j else 1 - share
            table[low + j] += SSE_RATE * part * (bit - bin_probability(low + j) - table[low + j])

    # States and maps of the contexts that had followers: means whose rate falls with the number of updates.
    for c in range(N_CONTEXTS):
        if not space.states[depth, c]:
            continue
        state, latest = (space.states[depth, c] - 1) >> 1, (space.states[depth, c] - 1) & 1
        repeated = 1.0 if bit == latest else 0.0
        cell = mixer.states[c, state]
        cell[PROBABILITY] += max(1 / (cell[N_UPDATES] + 9.5), 1 / 255) * (repeated - cell[PROBABILITY])
        cell[N_UPDATES] += 1
        for j in range(2):
            part = space.shares[depth, c] if j else 1 - space.shares[depth, c]
            cell = mixer.maps[c, state, space.lows[depth, c] + j]
            cell[PROBABILITY] += part * max(1 / (cell[N_UPDATES] + 6), 1 / 500) * (repeated - cell[PROBABILITY])
            cell[N_UPDATES] += part


@inner()
def is_decision(node: int, shift: int, n_leaves: int, n_tokens: int) -> bool:
    """True if the upper half of a node of 2^(shift + 1) leaves has tokens; the last leaves of the tree have none."""
    first_leaf = (2 * node + 1) << shift
    return first_leaf - n_leaves < n_tokens


@inner()
def encode(log_p: Array, target: int, leaf_of: Array, index: Index, mixer: Mixer, space: Space) -> float:
    """Surprisal in nats of a token after the last one read, which `find` has looked up; the mixer learns from it."""
    sums, n_leaves, nats = space.sums, len(space.sums) // 2, 0.0
    sum_tree(log_p, leaf_of, sums)
    leaf, n_levels = leaf_of[target], len(space.inputs)
    # All decisions on the way to the leaf are predicted before anything is learned from one.
    for depth in range(n_levels):
        shift = n_levels - 1 - depth
        node, bit = leaf >> (shift + 1), (leaf >> shift) & 1
        if is_decision(node, shift, n_leaves, len(leaf_of)):
            p = predict(node, shift, index, mixer, space, True, depth)
            nats -= math.log(p if bit else 1 - p)
    for depth in range(n_levels):
        shift = n_levels - 1 - depth
        node, bit = leaf >> (shift + 1), (leaf >> shift) & 1
        if is_decision(node, shift, n_leaves, len(leaf_of)):
            update(node, bit, mixer, space, depth)
    scale = 1 / sums[1]
    for node in range(1, 2 * n_leaves):
        mixer.expected[node] += sums[node] * scale
    mixer.progress[0] += 1
    return nats


@inner()
def advance(index: Index, leaf_of: Array, line_end: int, token: int) -> None:
    """Reads a token. If there is no room for it, what is older than the window is forgotten first."""
    size, window = index.sizes[N_READ], index.sizes[WINDOW]
    if size == len(index.inputs):
        first = size - window - REACH
        inputs, targets = index.inputs[first:size].copy(), index.targets[first:size].copy()
        index.owners[:], index.latest[:], index.earlier[:], index.counts[:] = 0, 0, 0, 0
        index.sizes[N_READ] = index.sizes[N_COUNTED] = 0
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
def take_back(index: Index, leaf_of: Array, n: int) -> None:
    """Removes the last n tokens read, and what follows them; the index must not have been made anew since.

    Contexts leave in the reverse of the order in which they came, so linear probing needs no marks of removed ones.
    """
    hashes = np.zeros(N_CONTEXTS, np.uint64)
    for _ in range(n):
        at = index.sizes[N_READ] - 1
        if index.targets[at] >= 0:
            hash_contexts(index, hashes)
            for c in range(N_CONTEXTS):
                slot = slot_of(index, c, hashes[c])
                index.latest[c, slot] = index.earlier[c, at]
                if index.latest[c, slot] == 0:
                    index.owners[c, slot] = 0
            count(index, leaf_of, index.targets[at], -1)
        left_window = at - index.sizes[WINDOW]
        if left_window >= 0:
            count(index, leaf_of, index.targets[left_window], 1)
        index.sizes[N_READ] = at


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
    # Nodes with a follower of some context; at the others the mixers need no inputs of contexts.
    known = np.zeros(2 * n_leaves, np.bool_)
    for c in range(N_CONTEXTS):
        for i in range(space.n_found[c]):
            node = space.found[c, i] >> 1
            while node and not known[node]:
                known[node] = True
                node >>= 1
    # Log-probability of each node, from the root (number 1) down.
    nodes = np.full(2 * n_leaves, -np.inf)
    nodes[1] = 0.0
    depth = 0
    for node in range(1, n_leaves):
        if node == 2 << depth:  # the first node of the next depth
            depth += 1
        shift = len(space.inputs) - 1 - depth
        if ((2 * node) << shift) - n_leaves >= len(leaf_of):  # no token is below the node
            continue
        nodes[2 * node] = nodes[node]
        if is_decision(node, shift, n_leaves, len(leaf_of)):
            p = predict(node, shift, index, mixer, space, known[node], depth)
            nodes[2 * node] += math.log(1 - p)
            nodes[2 * node + 1] = nodes[node] + math.log(p)
    return nodes[leaf_of]


PROGRAM = "from xlcli.kernels.mixture import compile_here; compile_here()"
CONSTANTS = [context_cache.__file__]


def _kernel_files() -> list[KernelFiles]:
    """Files that keep the compiled kernels, none where they cannot be kept."""
    kernels = score, fill, read, distribution, take_back
    try:
        return [KernelFiles(kernel, lambda _: PROGRAM, CONSTANTS) for kernel in kernels]
    except ConfigError:
        raise
    except Exception:  # no folder for kernels can be written, or Numba does not compile
        return []


FILES = _kernel_files()


def _arguments() -> list[tuple[Any, ...]]:
    """Arguments for the kernels of `FILES`, of the types that they have for every cache."""
    index, mixer, leaf_of = context_cache.new_index(1, 2), context_cache.new_mixer(2), np.empty(2, np.int64)
    log_p, texts, line_end = np.empty((1, 1)), np.empty((2, 1), np.int64), 0
    return [
        (index, mixer, leaf_of, line_end, log_p, texts, False, log_p[0]),
        (index, leaf_of, line_end, *texts),
        (index, leaf_of, line_end, texts[0]),
        (index, mixer, leaf_of, log_p[0]),
        (index, leaf_of, 1),
    ]


def is_compiled() -> bool:
    if not FILES:
        return False
    return all(file.has(*arguments) for file, arguments in zip(FILES, _arguments(), strict=True))


def compile_kernels(stop: Callable[[], bool]) -> str | None:
    """Compiles the kernels, unless `stop` becomes true. Returns the reason for which they cannot be kept, if any."""
    problem = None
    for file, arguments in zip(FILES, _arguments(), strict=False):
        problem = file.compile(*arguments, stop=stop) or problem
        if file.program is None:  # nothing can be kept: this process compiles the others, too
            for other in FILES:
                other.program = None
    return problem


def compile_here() -> None:
    """Compiles the kernels in this process and writes their files."""
    for file in FILES:
        file.program = None
    keep_parts(CONSTANTS)
    compile_kernels(lambda: False)
