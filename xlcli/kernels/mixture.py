"""Mixture of a model's predictions with what followed the same contexts before, token by token, compiled by Numba.

As in compressors of the PAQ family (Mahoney 2005, "Adaptive weighing of context models for lossless data compression"),
a token is a path of binary decisions. Here it leads down a balanced tree over the vocabulary in the order of the texts
of its tokens, so that tokens that begin alike share their first decisions. Node 1 is the root, and node n has the lower
half 2n and the upper half 2n + 1; of 8 leaves, 8 to 15, leaf 13 is below 1, 3 and 6. The probabilities of both halves
of a node by the model are sums over its tokens. Each decision has these inputs, as logits ("stretched" probabilities):

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
LEAST_TOKEN = 1e-12
"""Added to the probability of each token, so that none is 0."""
COUNT_PRIOR, SURPLUS_PRIOR = 0.4, 0.1
"""Added to the numbers whose ratios are the inputs `COUNTS` and `SURPLUS`."""
STATE_DELAY, STATE_RATE = 9.5, 1 / 255
MAP_DELAY, MAP_RATE = 6.0, 1 / 500
"""The mean of a state or of a cell of a map changes by 1 / (updates + delay), and at least by the rate."""
NO_STATE = -1
"""State of a context without followers."""
_ORDERS = np.array(ORDERS)


class Space(NamedTuple):
    """Values of one token, and of its decisions by depth d: nothing is learned before all of them are predicted.

    Attributes:
        hashes: Hash (c) of each context.
        slots: Its slot (c) in the index.
        found: Leaves (c n) of its latest followers, the latest first.
        n_found: Their number (c).
        inputs: Inputs (d i) of the mixers: model, counts, surplus, and two of each context.
        states: State (d c) of a context, or `NO_STATE`.
        halves: Half (d c) of the node that its latest follower took: 0 lower, 1 upper.
        lows: Bin (d c) of the map of a context below the model's logit.
        shares: Distance (d c) of the logit from it, in bins.
        classes: Class (d m) of the weights of each mixer: the same for all decisions; by node near the root, then by
            depth; by the longest context that occurred, and depth.
        logits: Result (d m) of each mixer, and of the last one.
        rows: Row (d 2) of each correction.
        places: Place (d) of the result in the bins of the corrections.
        sums: Probability (2 l) of each node by the model.
    """

    hashes: Array
    slots: Array
    found: Array
    n_found: Array
    inputs: Array
    states: Array
    halves: Array
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
        states=np.full((d, c), NO_STATE),
        halves=np.zeros((d, c), np.int64),
        lows=np.zeros((d, c), np.int64),
        shares=np.zeros((d, c)),
        classes=np.zeros((d, N_MIXERS), np.int64),
        logits=np.zeros((d, N_MIXERS + 1)),
        rows=np.zeros((d, 2), np.int64),
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
    index.inputs[at] = token
    index.targets[at] = -1
    if token == line_end or at == 0:
        index.lines[at] = at
    else:
        index.lines[at] = index.lines[at - 1]
    index.sizes[N_READ] = at + 1


@inner()
def place_in_line(index: Index) -> tuple[int, int, int, int]:
    """Column of the last token read, the token above it, and those in columns 1 and 2 up to it; -1 if there is none.

    In column 0 is the end mark of the line before. Of columns from `LINE` on nothing else is told.
    """
    at = index.sizes[N_READ] - 1
    start = index.lines[at]
    column = at - start
    if column >= LINE:
        return LINE, -1, -1, -1
    first = token_at(index, start + 1) if column > 0 else -1
    second = token_at(index, start + 2) if column > 1 else -1
    above = -1
    start_before = index.lines[start - 1] if start > 0 else -1
    place_above = start_before + column + 1
    if start_before >= 0 and at - start_before < REACH and place_above <= at:
        above = token_at(index, place_above)
    return column, above, first, second


@inner()
def hash_contexts(index: Index, out: Array) -> None:
    """Writes the hash of each context of the last token read to `out` (c)."""
    at = index.sizes[N_READ] - 1
    key = np.uint64(1)
    n_hashed = 0
    for i in range(len(_ORDERS)):  # the hash of a longer context goes on from that of a shorter one
        while n_hashed < _ORDERS[i]:
            key = hashed(key, token_at(index, at - n_hashed))
            n_hashed += 1
        out[i] = key
    last, second = index.inputs[at], token_at(index, at - 1)
    third, fourth = token_at(index, at - 2), token_at(index, at - 3)
    column, above, first_in_line, second_in_line = place_in_line(index)
    # Numbers 11 to 15 keep the kinds of contexts apart.
    n = len(_ORDERS)
    out[n] = hashed(hashed(np.uint64(11), column), last)
    out[n + 1] = hashed(hashed(np.uint64(12), second), third)
    out[n + 2] = hashed(hashed(np.uint64(13), above), last)
    out[n + 3] = hashed(hashed(hashed(np.uint64(14), second), third), fourth)
    out[n + 4] = hashed(hashed(hashed(np.uint64(15), first_in_line), second_in_line), column)


@inner()
def slot_of(index: Index, c: int, key: Any) -> int:
    """Slot of the context of kind c with this hash, or the free slot that it would get (linear probing)."""
    n_slots = index.owners.shape[1]
    last_slot = n_slots - 1  # all bits are 1, because the number of slots is a power of two
    slot = np.int64((key * HASH_FACTOR) >> np.uint64(20)) & last_slot
    while index.owners[c, slot] != 0 and index.owners[c, slot] != key:
        slot = (slot + 1) & last_slot
    return slot  # type: ignore[no-any-return]


@inner()
def find(index: Index, leaf_of: Array, space: Space) -> None:
    """Looks up the contexts of the last token read: sets `hashes`, `slots`, `found` and `n_found` of the space.

    Found are the leaves of the tokens that followed each context within the window, the latest first.
    """
    hash_contexts(index, space.hashes)
    oldest = max(0, index.sizes[N_READ] - index.sizes[WINDOW])
    for c in range(N_CONTEXTS):
        slot = slot_of(index, c, space.hashes[c])
        space.slots[c] = slot
        # A chain leads from each position of the context to the one before; positions are stored plus 1.
        at = index.latest[c, slot] - 1
        n = 0
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
        index.owners[c, slot] = space.hashes[c]
        index.latest[c, slot] = at + 1
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
    """Writes the probability of each node of the tree to `sums` (2 l), given log-probabilities (v)."""
    sums[:] = 0
    for token in range(len(leaf_of)):
        sums[leaf_of[token]] = math.exp(log_p[token]) + LEAST_TOKEN
    for node in range(len(sums) // 2 - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]


@inner()
def node_above(leaf: int, depth: int, n_levels: int) -> int:
    """Node at a depth (the root: 0) on the way to a leaf. Example: leaf 13 of 8 leaves (3 levels) is below 1, 3, 6."""
    return leaf >> (n_levels - depth)


@inner()
def half_of(leaf: int, depth: int, n_levels: int) -> int:
    """Half of the node at a depth in which a leaf below it is: 0 lower, 1 upper."""
    return (leaf >> (n_levels - 1 - depth)) & 1


@inner()
def has_tokens(node: int, depth: int, leaf_of: Array, space: Space) -> bool:
    """True if tokens are below a node at this depth: v tokens have the first v leaves, those behind have none."""
    n_levels = len(space.inputs)
    first_leaf = node << (n_levels - depth)
    first_of_all = 1 << n_levels
    return first_leaf - first_of_all < len(leaf_of)


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
def followers_below(node: int, depth: int, c: int, space: Space) -> tuple[int, int, int]:
    """Half that the latest follower of context c below a node took, how often in a row, and how many took the other.

    The half is 0 (lower), 1 (upper), or -1 without followers. Example: 1, 1, 1, 0, 1, the latest first, give (1, 3, 1).
    """
    n_levels = len(space.inputs)
    latest, n_same, n_other = -1, 0, 0
    for i in range(space.n_found[c]):
        leaf = space.found[c, i]
        if node_above(leaf, depth, n_levels) != node:
            continue
        half = half_of(leaf, depth, n_levels)
        if latest < 0:
            latest = half
        if half != latest:
            n_other += 1
        elif not n_other:
            n_same += 1
    return latest, n_same, n_other


@inner()
def add_context(node: int, depth: int, c: int, mixer: Mixer, space: Space) -> None:
    """Sets both inputs of context c for the decision at a node, and its state, map and half in `space`.

    Needs the input `MODEL`. Without followers below the node the inputs are 0.
    """
    x = space.inputs[depth]
    by_order = N_COMMON + 2 * c  # place of what the followers alone predict
    by_model = by_order + 1  # and of how they change the prediction of the model
    latest, n_same, n_other = followers_below(node, depth, c, space)
    if latest < 0:
        x[by_order] = x[by_model] = 0.0
        space.states[depth, c] = NO_STATE
        return
    state = N_LEVELS * level(n_same) + level(n_other)
    if node > 1:  # the root has states of its own
        state += N_LEVELS * N_LEVELS
    # Inputs are logits of the upper half; states and maps know those of the half of the latest follower.
    sign = 1.0 if latest else -1.0
    model_logit = sign * x[MODEL]
    place = in_bins(model_logit, MAP_RANGE, MAP_BINS)
    low = int(place)
    share = place - low
    cells = mixer.maps[c, state]
    mapped = cells[low, PROBABILITY] * (1 - share) + cells[low + 1, PROBABILITY] * share
    x[by_order] = sign * stretch(mixer.states[c, state, PROBABILITY], least=1e-5)
    x[by_model] = sign * min(max(stretch(mapped, least=1e-6) - model_logit, -LIMIT), LIMIT)
    space.states[depth, c] = state
    space.halves[depth, c] = latest
    space.lows[depth, c] = low
    space.shares[depth, c] = share


@inner()
def predict(node: int, depth: int, known: bool, index: Index, mixer: Mixer, space: Space) -> float:
    """Probability that the next token is in the upper half of a node at this depth.

    Without `known`, no context has a follower below the node. Leaves in `space` what `update` needs.
    """
    lower, upper = 2 * node, 2 * node + 1
    x = space.inputs[depth]
    x[MODEL] = stretch(space.sums[upper] / space.sums[node], least=1e-7)
    n_lower, n_upper = float(index.counts[lower]), float(index.counts[upper])
    x[COUNTS] = 0.0
    if n_lower + n_upper > 0:
        x[COUNTS] = math.log((n_upper + COUNT_PRIOR) / (n_lower + COUNT_PRIOR))
    # What the model expected of all tokens predicted so far, for as many as are counted in the window.
    scale = index.sizes[N_COUNTED] / max(mixer.progress[0], 1.0)
    surplus_upper = math.log((n_upper + SURPLUS_PRIOR) / (mixer.expected[upper] * scale + SURPLUS_PRIOR))
    surplus_lower = math.log((n_lower + SURPLUS_PRIOR) / (mixer.expected[lower] * scale + SURPLUS_PRIOR))
    x[SURPLUS] = surplus_upper - surplus_lower
    n_inputs = N_COMMON
    if known:
        n_inputs = len(x)
        for c in range(N_CONTEXTS):
            add_context(node, depth, c, mixer, space)
    logit = mix(node, depth, n_inputs, mixer, space)
    corrected = correct(node, depth, logit, index, mixer, space)
    p = (1 - SSE_SHARE) * logistic(logit) + SSE_SHARE * corrected
    return min(max(p, LEAST), 1 - LEAST)


@inner()
def mix(node: int, depth: int, n_inputs: int, mixer: Mixer, space: Space) -> float:
    """Logit by all mixers together, of the first inputs (`n_inputs`); sets `classes` and `logits` of the space."""
    x, classes, logits = space.inputs[depth], space.classes[depth], space.logits[depth]
    longest = 0  # number of the longest context of latest tokens that occurred before, from 1
    for c in range(len(_ORDERS)):
        if space.n_found[c]:
            longest = c + 1
    weighted_depth = min(depth, MAX_DEPTH)
    classes[0] = 0
    classes[1] = node if node < FIRST_NODES else FIRST_NODES + weighted_depth
    classes[2] = longest * (MAX_DEPTH + 1) + weighted_depth
    total = 0.0
    for m in range(N_MIXERS):
        logit = 0.0
        weights = mixer.weights[m, classes[m]]
        for i in range(n_inputs):
            logit += weights[i] * x[i]
        logits[m] = min(max(logit, -MAX_LOGIT), MAX_LOGIT)
        total += mixer.final[weighted_depth, m] * logits[m]
    total = min(max(total, -MAX_LOGIT), MAX_LOGIT)
    logits[N_MIXERS] = total
    return total


@inner()
def correct(node: int, depth: int, logit: float, index: Index, mixer: Mixer, space: Space) -> float:
    """Probability of a logit, plus the mean of both corrections; sets `rows` and `places` of the space."""
    token = np.uint64(index.inputs[index.sizes[N_READ] - 1])
    rows = space.rows[depth]
    rows[0] = node & (SSE_ROWS - 1)
    rows[1] = np.int64(hashed(hashed(np.uint64(17), token), node) & np.uint64(SSE_ROWS - 1))
    place = in_bins(logit, SSE_RANGE, SSE_BINS)
    space.places[depth] = place
    low = int(place)
    share = place - low
    p = bin_probability(low) * (1 - share) + bin_probability(low + 1) * share
    for i in range(len(rows)):
        table = mixer.sse[i, rows[i]]
        p += 0.5 * (table[low] * (1 - share) + table[low + 1] * share)
    return p


@inner()
def bin_probability(number: int) -> float:
    """Probability at the lower end of a bin of the corrections."""
    width = 2 * SSE_RANGE / SSE_BINS
    return logistic(number * width - SSE_RANGE)


@inner()
def update(depth: int, half: int, mixer: Mixer, space: Space) -> None:
    """Learns that a decision led to the lower (0) or upper (1) half; `predict` has left its values in `space`."""
    update_mixers(depth, half, mixer, space)
    # Both bins around the result learn, by their shares.
    low = int(space.places[depth])
    share = space.places[depth] - low
    for i in range(space.rows.shape[1]):
        table = mixer.sse[i, space.rows[depth, i]]
        update_correction(table, low, 1 - share, half)
        update_correction(table, low + 1, share, half)
    for c in range(N_CONTEXTS):
        state = space.states[depth, c]
        if state == NO_STATE:
            continue
        repeated = 1.0 if half == space.halves[depth, c] else 0.0
        low, share = space.lows[depth, c], space.shares[depth, c]
        update_mean(mixer.states[c, state], repeated, 1.0, STATE_DELAY, STATE_RATE)
        update_mean(mixer.maps[c, state, low], repeated, 1 - share, MAP_DELAY, MAP_RATE)
        update_mean(mixer.maps[c, state, low + 1], repeated, share, MAP_DELAY, MAP_RATE)


@inner()
def update_mixers(depth: int, half: int, mixer: Mixer, space: Space) -> None:
    """One step of all mixers along the gradient of the surprisal; their rate falls with the number of predictions."""
    x, logits = space.inputs[depth], space.logits[depth]
    final = mixer.final[min(depth, MAX_DEPTH)]
    rate = max(LAST_RATE, FIRST_RATE / (1 + 0.002 * mixer.progress[0]))
    error = half - logistic(logits[N_MIXERS])
    for m in range(N_MIXERS):
        final[m] = min(max(final[m] + FINAL_RATE * error * logits[m], -LIMIT), LIMIT)
        change = rate * (half - logistic(logits[m]))
        weights = mixer.weights[m, space.classes[depth, m]]
        for i in range(len(x)):
            weights[i] = min(max(weights[i] + change * x[i], -LIMIT), LIMIT)


@inner()
def update_correction(table: Array, number: int, share: float, half: int) -> None:
    error = half - bin_probability(number) - table[number]
    table[number] += SSE_RATE * share * error


@inner()
def update_mean(cell: Array, value: float, share: float, delay: float, least_rate: float) -> None:
    """Moves the mean in a cell towards a value, by a share of a rate that falls with its number of updates."""
    rate = share * max(1 / (cell[N_UPDATES] + delay), least_rate)
    cell[PROBABILITY] += rate * (value - cell[PROBABILITY])
    cell[N_UPDATES] += share


@inner()
def encode(log_p: Array, target: int, leaf_of: Array, index: Index, mixer: Mixer, space: Space) -> float:
    """Surprisal in nats of a token after the last one read, whose contexts `find` has left in `space`.

    `log_p` (v) are log-probabilities of the model. The mixer learns from the token.
    """
    leaf = leaf_of[target]
    n_levels = len(space.inputs)
    sum_tree(log_p, leaf_of, space.sums)
    # All decisions on the way from the root to the leaf are predicted before anything is learned from one. A node
    # without tokens in its upper half leaves nothing to decide.
    nats = 0.0
    for depth in range(n_levels):
        node = node_above(leaf, depth, n_levels)
        if has_tokens(2 * node + 1, depth + 1, leaf_of, space):
            p_upper = predict(node, depth, True, index, mixer, space)
            p = p_upper if half_of(leaf, depth, n_levels) else 1 - p_upper
            nats -= math.log(p)
    for depth in range(n_levels):
        node = node_above(leaf, depth, n_levels)
        if has_tokens(2 * node + 1, depth + 1, leaf_of, space):
            update(depth, half_of(leaf, depth, n_levels), mixer, space)
    # The model's expectations of each node, as shares of the root.
    scale = 1 / space.sums[1]
    for node in range(1, len(space.sums)):
        mixer.expected[node] += space.sums[node] * scale
    mixer.progress[0] += 1
    return nats


@inner()
def advance(index: Index, leaf_of: Array, line_end: int, token: int) -> None:
    """Reads a token. If there is no room for it, what is older than the window is forgotten first."""
    size, window = index.sizes[N_READ], index.sizes[WINDOW]
    if size == len(index.inputs):
        first = size - window - REACH
        inputs, targets = index.inputs[first:size].copy(), index.targets[first:size].copy()
        index.owners[:] = 0
        index.latest[:] = 0
        index.earlier[:] = 0
        index.counts[:] = 0
        index.sizes[N_READ] = index.sizes[N_COUNTED] = 0
        space = new_space(1)
        for i in range(len(inputs)):
            append(index, inputs[i], line_end)
            forget(index, leaf_of)
            if targets[i] >= 0:
                find(index, leaf_of, space)
                learn(index, leaf_of, targets[i], space)
    append(index, token, line_end)
    forget(index, leaf_of)


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
    """Writes the surprisal of each follower, the second row of `texts` (2 t), to `nats` (t), and learns from it.

    The first row are the tokens before them; with `is_read` there is one, which is in the index already. `log_p` (t v)
    are log-probabilities of the model.
    """
    space = new_space(len(index.counts) // 2)
    for i in range(texts.shape[1]):
        token, follower = texts[0, i], texts[1, i]
        if not is_read:
            advance(index, leaf_of, line_end, token)
        find(index, leaf_of, space)
        nats[i] = encode(log_p[i], follower, leaf_of, index, mixer, space)
        learn(index, leaf_of, follower, space)


@compiled()
def distribution(index: Index, mixer: Mixer, leaf_of: Array, log_p: Array) -> Array:
    """Log-probabilities (v) of the token after the last one read, given the model's (v). Nothing is learned."""
    n_leaves = len(index.counts) // 2
    space = new_space(n_leaves)
    find(index, leaf_of, space)
    sum_tree(log_p, leaf_of, space.sums)
    known = nodes_with_followers(n_leaves, space)
    # Log-probability of each node, from the root (number 1) down. Nodes 2^d to 2^(d + 1) - 1 are at depth d.
    log_p_of = np.full(2 * n_leaves, -np.inf)
    log_p_of[1] = 0.0
    for depth in range(len(space.inputs)):
        for node in range(1 << depth, 2 << depth):
            lower, upper = 2 * node, 2 * node + 1
            if not has_tokens(lower, depth + 1, leaf_of, space):
                continue
            log_p_of[lower] = log_p_of[node]
            if has_tokens(upper, depth + 1, leaf_of, space):
                p_upper = predict(node, depth, known[node], index, mixer, space)
                log_p_of[lower] += math.log(1 - p_upper)
                log_p_of[upper] = log_p_of[node] + math.log(p_upper)
    return log_p_of[leaf_of]


@inner()
def nodes_with_followers(n_leaves: int, space: Space) -> Array:
    """Mask (2 l) of the nodes above a follower of some context; at the others mixers need no inputs of contexts."""
    known = np.zeros(2 * n_leaves, np.bool_)
    for c in range(N_CONTEXTS):
        for i in range(space.n_found[c]):
            node = space.found[c, i] >> 1
            while node and not known[node]:  # what is above a known node is known
                known[node] = True
                node >>= 1
    return known


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
