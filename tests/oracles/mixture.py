"""Mixture of a model with what followed the same contexts (`docs/adapting.md`), one binary decision at a time.

Contexts are compared token by token in the whole text, learned values are in dictionaries, and every decision looks at
all tokens below its node.
"""

import math
from collections import defaultdict

import numpy as np

ORDERS = (1, 2, 3, 4, 6, 10, 18)
CLASSES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 5, 7: 5, 8: 5} | dict.fromkeys(range(9, 16), 6)
CLASSES |= dict.fromkeys(range(16, 32), 7) | dict.fromkeys(range(32, 65), 8)


def logistic(x):
    return 1 / (1 + math.exp(-x))


def logit(p, least):
    p = min(max(p, least), 1 - least)
    return math.log(p) - math.log(1 - p)


def clip(x, limit):
    return min(max(x, -limit), limit)


def contexts(read, line_end):
    """Every context of the last token of a text, as a value that equal contexts share."""
    at = len(read) - 1
    get = lambda i: read[i] if i >= 0 else None  # noqa: E731
    found = [("order", *(get(at - i) for i in range(order))) for order in ORDERS]
    starts = [i for i in range(at + 1) if read[i] == line_end or i == 0]
    line, before = starts[-1], starts[-2] if len(starts) > 1 else None
    column, above, head = min(at - line, 128), None, (None, None)
    if column < 128:
        head = tuple(read[line + i] if line + i <= at else None for i in (1, 2))
        if before is not None and at - before < 256 and before + column + 1 <= at:
            above = read[before + column + 1]
    last, second, third, fourth = (get(at - i) for i in range(4))
    return [
        *found,
        ("column", column, last),
        ("skip", second, third),
        ("above", above, last),
        ("skip two", second, third, fourth),
        ("head", *head, column),
    ]


class Mixture:
    """Mixture over tokens 0 to v - 1, whose leaves are in the order of `ranks`; None is a follower that is unknown."""

    def __init__(self, ranks, window, line_end):
        self.ranks, self.window, self.line_end = ranks, window, line_end
        self.depth = max(1, (len(ranks) - 1).bit_length())
        self.read, self.followers, self.contexts = [], [], []
        self.n, self.expected = 0, defaultdict(float)
        n_inputs = 3 + 2 * (len(ORDERS) + 5)
        self.weights = defaultdict(lambda: [0.9, 0.0, 0.0] + [0.05] * (n_inputs - 3))
        self.final = defaultdict(lambda: 1 / 3)
        self.states, self.maps, self.sse = {}, {}, defaultdict(float)  # corrections are kept in float32

    def append(self, token, follower):
        """Reads a token and the one that follows it."""
        self.read.append(token)
        self.contexts.append(contexts(self.read, self.line_end))
        self.followers.append(None)
        self.latest = self._latest()
        self.followers[-1] = follower

    def _latest(self):
        """Leaves of the latest followers of each present context in the window, the latest first."""
        oldest = max(0, len(self.read) - self.window)
        out = []
        for kind, context in enumerate(self.contexts[-1]):
            places = [i for i in range(oldest, len(self.read)) if self.contexts[i][kind] == context]
            known = [self.ranks[self.followers[i]] for i in reversed(places) if self.followers[i] is not None]
            out.append(known[:64])
        return out

    def inside(self, rank, node):
        """True if a leaf is below a node: the path to it so far."""
        return format(rank, f"0{self.depth}b").startswith(node)

    def nats(self, probabilities, target):
        """Surprisal of the last follower, given the model's distribution; learns from it."""
        total, path, updates = 0.0, format(self.ranks[target], f"0{self.depth}b"), []
        sums = lambda node: sum(  # noqa: E731
            p + 1e-12 for token, p in enumerate(probabilities) if self.inside(self.ranks[token], node)
        )
        before = self.followers[max(0, len(self.read) - self.window) : -1]
        count = lambda node: sum(  # noqa: E731
            1 for token in before if token is not None and self.inside(self.ranks[token], node)
        )
        n_counted = sum(token is not None for token in before)
        for depth, step in enumerate(path):
            node = path[:depth]
            if int((node + "1").ljust(self.depth, "0"), 2) < len(self.ranks):
                p, update = self._decide(node, sums, count, n_counted)
                total -= math.log(p if step == "1" else 1 - p)
                updates.append((update, int(step)))
        for update, bit in updates:
            update(bit)
        for depth in range(self.depth + 1):
            for i in range(2**depth):
                node = format(i, f"0{depth}b") if depth else ""
                self.expected[node] += sums(node) / sums("")
        self.n += 1
        return total

    def _decide(self, node, sums, count, n_counted):
        """Probability of the upper half of a node, and a function that learns which half it was."""
        low, high = node + "0", node + "1"
        x = [logit(sums(high) / sums(node), 1e-7), 0.0, 0.0]
        if count(node):
            x[1] = math.log((count(high) + 0.4) / (count(low) + 0.4))
        share = n_counted / max(1, self.n)
        surplus = [math.log((count(half) + 0.1) / (self.expected[half] * share + 0.1)) for half in (low, high)]
        x[2] = surplus[1] - surplus[0]
        cells, highest = [], 0
        for kind, leaves in enumerate(self.latest):
            if leaves and kind < len(ORDERS):
                highest = kind + 1
            steps = [format(leaf, f"0{self.depth}b")[len(node)] for leaf in leaves if self.inside(leaf, node)]
            if not steps:
                x += [0.0, 0.0]
                continue
            n_same = next((i for i, step in enumerate(steps) if step != steps[0]), len(steps))
            n_other = sum(step != steps[0] for step in steps)
            same, other, sign = CLASSES[n_same], CLASSES[n_other], 1 if steps[0] == "1" else -1
            key = kind, bool(node), same, other
            p = (same + 0.5) / (same + other + 1) if other else 1 - 0.3 / (same + 1)
            state = self.states.setdefault(key, [p, 0])
            own = sign * x[0]
            place = min(max((own + 9) / 1.5, 0), 12 - 1e-6)
            corners = [(self.maps.setdefault((*key, b), [logistic(-9 + 1.5 * b), 0]), 1 - abs(place - b))
                       for b in (int(place), int(place) + 1)]  # fmt: skip
            mapped = sum(cell[0] * part for cell, part in corners)
            x += [sign * logit(state[0], 1e-5), sign * clip(logit(mapped, 1e-6) - own, 8)]
            cells.append((int(steps[0]), state, corners))
        number = int("1" + node, 2)
        depth = min(len(node), 19)
        kinds = [(0, 0), (1, number if number < 128 else 128 + depth), (2, highest, depth)]
        logits = [clip(sum(w * v for w, v in zip(self.weights[kind], x, strict=True)), 16) for kind in kinds]
        mixed = clip(sum(self.final[depth, m] * logits[m] for m in range(3)), 16)
        place = min(max((mixed + 12) / 0.75, 0), 32 - 1e-6)
        bins = [(b, 1 - abs(place - b)) for b in (int(place), int(place) + 1)]
        corrected = sum(part * logistic(-12 + 0.75 * b) for b, part in bins)
        tables = [("node", number % 4096), ("last", self.row(number))]
        corrected += sum(part * self.sse[*table, b] for b, part in bins for table in tables) / 2
        p = min(max(0.6 * logistic(mixed) + 0.4 * corrected, 2e-8), 1 - 2e-8)

        def update(bit):
            rate = max(0.002, 0.04 / (1 + 0.002 * self.n))
            for m, kind in enumerate(kinds):
                self.final[depth, m] = clip(self.final[depth, m] + 5e-4 * (bit - logistic(mixed)) * logits[m], 8)
                step = rate * (bit - logistic(logits[m]))
                self.weights[kind] = [clip(w + step * v, 8) for w, v in zip(self.weights[kind], x, strict=True)]
            for table in tables:
                for b, part in bins:
                    error = bit - logistic(-12 + 0.75 * b) - self.sse[*table, b]
                    self.sse[*table, b] = float(np.float32(self.sse[*table, b] + 0.02 * part * error))
            for first, state, corners in cells:
                state[0] += max(1 / (state[1] + 9.5), 1 / 255) * ((bit == first) - state[0])
                state[1] += 1
                for cell, part in corners:
                    cell[0] += part * max(1 / (cell[1] + 6), 1 / 500) * ((bit == first) - cell[0])
                    cell[1] += part

        return p, update

    def row(self, number):
        """Row of the correction by node and last token: a hash, so that the table is small."""
        key = 17
        for value in (self.read[-1], number):
            key = ((key ^ (value + 2)) * 0x9E3779B97F4A7C15 + 7) % 2**64
            key ^= key >> 29
        return key % 4096
