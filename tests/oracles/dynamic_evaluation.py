"""Dynamic evaluation (Krause et al. 2018, section 3): blocks of text, and a step of SGD on each after it was scored.

Gradients are divided by the root of their mean square (section 3.2), a running mean that is factored for matrices
(Shazeer and Stern 2018, algorithm 4), and every step goes back toward the trained weights (equation 7). The rate of a
matrix is multiplied by e to the cosine between what was learned so far and the negative gradient; it begins at 0.3 for
`slow` ones. Plain autograd on a copy of the model, one element at a time.
"""

import copy
import math

import torch


def dynamic_nats(model, text, *, block, lr, decay, beta, mem_len, names, slow):
    """Surprisal (n - 1) in nats of text (n) but its first token, and the weights after its last whole block."""
    model = copy.deepcopy(model)
    weights = {name: p for name, p in model.named_parameters() if name in names}
    trained = {name: p.detach().clone() for name, p in weights.items()}
    squares = {name: torch.zeros_like(p) for name, p in weights.items()}
    rates = {name: lr * (0.3 if name in slow else 1) for name in weights}
    state = model.init_state(1, mem_len=mem_len, segment_len=13)
    out = []
    for step, start in enumerate(range(0, len(text) - 1, block), 1):
        targets = text[start + 1 : start + 1 + block]
        nll, state = model.score(text[None, start : start + len(targets)], targets[None], state)[:2]
        out.append(nll[0].detach())
        if len(targets) < block:
            break
        model.zero_grad()
        nll.mean().backward()
        with torch.no_grad():
            for name, weight in weights.items():
                squares[name] = beta * squares[name] + (1 - beta) * weight.grad**2
                mean = squares[name] / (1 - beta**step)
                if mean.ndim == 2:
                    rows, columns = mean.mean(1) + 1e-16, mean.mean(0) + 1e-16
                    mean = torch.outer(rows, columns) / rows.mean()
                    moved = (weight - trained[name]).flatten()
                    if moved.any():
                        cosine = torch.cosine_similarity(moved, -weight.grad.flatten(), dim=0, eps=0)
                        rates[name] = (rates[name] * cosine.exp()).clamp(lr * math.exp(-5), lr * math.exp(3))
                else:
                    mean = mean + 1e-16
                weight -= rates[name] * weight.grad / mean.sqrt()
                weight += decay * (trained[name] - weight)
    return torch.cat(out), weights
