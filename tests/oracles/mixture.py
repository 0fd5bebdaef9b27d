"""A model's predictions corrected by what followed the same contexts (`docs/adapting.md`), by dictionaries.

Contexts are compared token by token in the whole text.
"""

import math
from collections import Counter, defaultdict

ORDERS = (1, 2, 3, 6, 12)
FIRST_SLOPES, RATE, BIAS_RATE = (1, 1.5, 2.5, 2.5, 2.5, 1, 1, 1), 0.25, 0.02


def contexts(read, line_ends):
    """Every context of the last token of a text, as a value that equal contexts share."""
    at = len(read) - 1
    get = lambda i: read[i] if i >= 0 else None  # noqa: E731
    found = [tuple(get(at - i) for i in range(order)) for order in ORDERS]
    starts = [i for i in range(at + 1) if read[i] in line_ends or i == 0]
    line, before = starts[-1], starts[-2] if len(starts) > 1 else None
    column, above, head = min(at - line, 128), None, (None, None)
    if column < 128:
        head = tuple(read[line + i] if line + i <= at else None for i in (1, 2))
        if before is not None and at - before < 256 and before + column + 1 <= at:
            above = read[before + column + 1]
    return [*found, (column, read[at]), (above, read[at]), (head, column)]


class Mixture:
    """Mixture over tokens 0 to `n_kinds` - 1; None is a follower that is unknown."""

    def __init__(self, n_kinds, window, line_ends):
        self.window, self.line_ends = window, line_ends
        self.tokens, self.followers, self.contexts = [], [], []
        self.weights = {}
        self.squares = defaultdict(lambda: [1.0, 1.0])
        self.bias = [0.0] * n_kinds

    def read(self, token, follower, log_p):
        """Log-probabilities of the token that follows, given those of the model; learns from the follower."""
        self.tokens.append(token)
        self.contexts.append(contexts(self.tokens, self.line_ends))
        self.followers.append(None)
        logits = [p + bias for p, bias in zip(log_p, self.bias, strict=True)]
        features = self.features(logits)
        raised = defaultdict(float)
        for candidate, cell, surprise in features:
            constant, slope = self.weights.setdefault(cell, [0.0, FIRST_SLOPES[cell[0]]])
            raised[candidate] += constant + slope * surprise
        for candidate, change in raised.items():
            logits[candidate] += min(max(change, -30), 30)
        total = math.log(sum(map(math.exp, logits)))
        log_p = [logit - total for logit in logits]
        if follower is not None:
            self.learn(follower, features, log_p)
            self.followers[-1] = follower
        return log_p

    def features(self, logits):
        """For each candidate and each kind of context that it followed: the cell of the weights, and the surprise."""
        at, out, order = len(self.tokens) - 1, [], {}
        for kind, context in enumerate(self.contexts[-1]):
            window = range(max(0, len(self.tokens) - self.window), at)
            places = [i for i in window if self.contexts[i][kind] == context and self.followers[i] is not None]
            found = [self.followers[i] for i in reversed(places)][:64]
            for candidate, n in Counter(found).items():
                order.setdefault(candidate, len(order))
                cell = kind, candidate == found[0], n.bit_length(), (len(found) - n).bit_length()
                out.append((candidate, cell, min(max(-logits[candidate] / 12, 0), 1)))
        return sorted(out, key=lambda feature: order[feature[0]])  # steps of one cell are taken in this order

    def learn(self, follower, features, log_p):
        steps = defaultdict(list)
        for candidate, cell, surprise in features:
            error = math.exp(log_p[candidate]) - (candidate == follower)
            steps[cell].append((error, error * surprise))
        for cell, gradients in steps.items():
            for gradient in gradients:
                for i in range(2):
                    self.squares[cell][i] += gradient[i] ** 2
                    self.weights[cell][i] -= RATE * gradient[i] / math.sqrt(self.squares[cell][i])
        for token, p in enumerate(log_p):
            self.bias[token] -= BIAS_RATE * (math.exp(p) - (token == follower))
