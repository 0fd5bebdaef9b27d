"""Mixture of a model with the tokens that followed the same contexts before (`docs/adapting.md`), token by token.

The distribution of order k is (1 - w) p + w c: p of the order below, c of the tokens that followed the last k tokens.
Let w be the logistic function of z. After each token, w moves against the gradient in z of the log loss of this
distribution. By hand the gradient is w - w c / ((1 - w) p + w c), so that w moves towards the share of the context in
the prediction; here autograd takes it from the loss.
"""

import torch

ORDERS = 0, 1, 2, 3, 4, 5, 7, 10, 16


def followers(read, order, window):
    """Tokens that followed the last `order` tokens of `read` before, the latest first.

    The context must end among the latest `window` tokens. Of contexts of one token or more, 64 places count.
    """
    found = []
    context = read[len(read) - order :]
    for end in range(len(read) - 1, 0, -1):
        if end <= len(read) - window:
            break
        if end >= order and read[end - order : end] == context:
            found.append(read[end])
    return found[:64] if order else found


def kind(order, found):
    """Class of a context: its order, number of places by powers of two up to 128, and 1, 2, 3 or more followers."""
    n_places = 1
    while 2**n_places <= len(found) and n_places < 8:
        n_places += 1
    return order, n_places, min(len(set(found)), 4)


def mixture(own, ids, *, window):
    """Surprisal (n) in nats of all ids but the first, and the weights after each of them.

    Args:
        own: Probability (n) of each token by the model; None if it is read without a score, which changes no weight.
        ids: The text (n + 1).
        window: Number of latest tokens that count.

    Returns:
        Nats of the tokens with a score, and for each the weights and numbers of updates by class of context, of classes
        that were met.
    """
    nats, learned, after = [], {}, []
    for n, p in enumerate(own, 1):
        if p is None:
            continue
        read, target = ids[:n], ids[n]
        p = torch.tensor(p, dtype=torch.float64)
        for order in ORDERS:
            found = followers(read, order, window) if order < n else []
            if not found:
                break
            c = found.count(target) / len(found)
            w, n_updates = learned.get(kind(order, found), (0.1, 8))
            z = torch.tensor(w, dtype=torch.float64).logit().requires_grad_()
            mixed = (1 - z.sigmoid()) * p + z.sigmoid() * c
            [gradient] = torch.autograd.grad(-mixed.log(), z)
            p = mixed.detach()
            w -= max(1 / 50, 1 / (n_updates + 1)) * float(gradient)
            learned[kind(order, found)] = min(max(w, 1 / 10_000), 1 - 5 / 10_000), n_updates + 1
        nats.append(-float(p.log()))
        after.append(dict(learned))
    return nats, after
