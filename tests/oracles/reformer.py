"""Hashed attention in index loops, from the definition and from Kitaev et al. 2020 (Reformer), equations 2 to 5."""

import math

import torch


def bucket(x, directions, factors):
    """argmax([xR; -xR]) (Andoni et al. 2015) of one vector, a digit for each factor, the last one running fastest."""
    number, at = 0, 0
    for n in factors:
        turned = [sum(float(a) * float(w) for a, w in zip(x, row, strict=True)) for row in directions[at : at + n // 2]]
        both = turned + [-y for y in turned]
        number = number * n + both.index(max(both))
        at += n // 2
    return number


def attended(buckets, i, bucket_size, limit=None):
    """The keys that query i sees: buckets[r][j] is the bucket of token j in round r."""
    union = set()
    for of_round in buckets:
        mates = [j for j in range(i) if of_round[j] == of_round[i]]
        union |= set(mates[-bucket_size:])
    if limit is not None:
        union = {j for j in union if i - j <= limit}
    return union or {i}


def attend(q, v, buckets, bucket_size, scale=1.0, limit=None):
    """Outputs of one head for queries q (t e), whose directions are the keys, and values v (t w), as lists."""
    keys = [[float(a) / math.sqrt(sum(float(b) ** 2 for b in row)) for a in row] for row in q]
    out = []
    for i in range(len(q)):
        seen = sorted(attended(buckets, i, bucket_size, limit))
        scores = [scale * sum(float(a) * b for a, b in zip(q[i], keys[j], strict=True)) for j in seen]
        weights = [math.exp(s - max(scores)) for s in scores]
        out.append(
            [
                sum(w * float(v[j][f]) for w, j in zip(weights, seen, strict=True)) / sum(weights)
                for f in range(len(v[i]))
            ]
        )
    return out


def attended_mask(buckets, *, bucket_size, limit=None):
    """`attended` of all queries as a mask (b h t t), for tokens in buckets (b h r t)."""
    t = buckets.shape[-1]
    mates = (buckets.unsqueeze(-1) == buckets.unsqueeze(-2)).tril(-1)
    rank = mates.flip(-1).cumsum(-1).flip(-1)
    seen = (mates & (rank <= bucket_size)).any(2)
    if limit is not None:
        seen = seen.triu(-limit)
    return seen | (torch.eye(t, dtype=torch.bool) & ~seen.any(-1, keepdim=True))


def attend_masked(q, k, v, buckets, *, bucket_size, limit=None, scale):
    """Full attention (b h t w) under that mask, for queries, keys (b h t e) and values (b h t w)."""
    seen = attended_mask(buckets, bucket_size=bucket_size, limit=limit)
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v
