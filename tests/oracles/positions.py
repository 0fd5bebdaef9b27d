"""Every position encoding from its paper, one head, query and key at a time, in float64.

Absolute encodings are functions of a position and give what is added to an embedding there. Relative ones are made by
functions that return `score(q, k, i, j, h)`: the whole score of the query vector at position i and the key vector at
position j <= i in head h, which is what softmax is given. Shaw's encoding also has a `value(v, i, j)`.
"""

import math
from fractions import Fraction

import torch


def sinusoidal(position, dim):
    """Vaswani et al. 2017, section 3.5, sines of all frequencies first, then cosines."""
    angles = [position * 10000 ** (-2 * f / dim) for f in range(dim // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def learned(position, table, *, wrap=False):
    """Row of a table (n d); beyond it an IndexError or, with `wrap`, its rows once more."""
    return table[position % len(table) if wrap else position]


def axial(position, tables, *, wrap=False):
    """Kitaev et al. 2020 (their code): a row of each table, joined; the coordinate of the last one changes fastest."""
    if wrap:
        position %= math.prod(len(table) for table in tables)
    parts = []
    for table in reversed(tables):
        position, coordinate = divmod(position, len(table))
        parts.append(table[coordinate])
    if position:
        raise IndexError
    return torch.cat(parts[::-1])


def plain(q, k, i, j, h):
    """Vaswani et al. 2017, equation 1."""
    return q @ k / math.sqrt(len(q))


def linear(frequency, *, factor):
    """Chen et al. 2023, equation 4: positions between those of training, as if time went more slowly."""
    return frequency / factor


def llama3(frequency, *, factor, low_freq_factor, high_freq_factor, original_len):
    """Llama 3.1: short waves as they are, long ones longer by the factor, and a line between them."""
    wave = 2 * math.pi / frequency
    if wave < original_len / high_freq_factor:
        return frequency
    if wave > original_len / low_freq_factor:
        return frequency / factor
    smooth = (original_len / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotated(x, position, *, base, layout, width=None, scale=lambda frequency: frequency):
    """Su et al. 2021, equation 15: pair f of x turned by position * base^(-2f/e); pairs (2f, 2f+1) or (f, f+e/2).

    With `width` the first features alone, as if there were no others (Black et al. 2022, section 2.1.1).
    """
    width = width or len(x)
    out = x.clone()
    for f in range(width // 2):
        a, b = (2 * f, 2 * f + 1) if layout == "interleaved" else (f, f + width // 2)
        angle = position * scale(base ** (-2 * f / width))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def rope(*, layout, clamp_len=None, **series):
    """Su et al. 2021, section 3.2: queries and keys turned by their own positions, values untouched."""

    def score(q, k, i, j, h):
        j = j if clamp_len is None else max(j, i - clamp_len)
        return plain(rotated(q, i, layout=layout, **series), rotated(k, j, layout=layout, **series), i, j, h)

    return score


def added(vector):
    """Absolute positions in every layer, on queries and keys but not on values: vector(position, head) of width e.

    The table of learned vectors is as wide as all heads, each of which has its part; sinusoids are as wide as a head.
    """

    def score(q, k, i, j, h):
        return plain(q + vector(i, h), k + vector(j, h), i, j, h)

    return score


def alibi_slopes(n_heads):
    """Press et al. 2022, section 3 and its published code for head counts that are no power of two."""
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    between = [2 ** (-8 * k / (2 * power)) for k in range(1, 2 * power + 1)][::2]
    return slopes + between[: n_heads - power]


def alibi(n_heads):
    """Press et al. 2022, section 3: a constant slope per head times the distance, after scaling."""
    slopes = alibi_slopes(n_heads)

    def score(q, k, i, j, h):
        return plain(q, k, i, j, h) - slopes[h] * (i - j)

    return score


def bucket(distance, n_buckets, max_distance):
    """Raffel et al. 2020, section 2.1, for attention to the past alone, in whole numbers.

    With n the exact ones and N the others, distance >= n falls into bucket n + floor(N log(distance/n) / log(max/n)),
    at most the last: it is in number n + k or higher when (distance/n)^N >= (max/n)^k.
    """
    exact = n_buckets // 2
    if distance < exact:
        return distance
    others = n_buckets - exact
    farther = Fraction(distance, exact) ** others
    return exact + sum(farther >= Fraction(max_distance, exact) ** k for k in range(1, others))


def t5(table, *, max_distance, scaled=True):
    """Raffel et al. 2020, section 2.1: a scalar of table (n_buckets, n_heads) added to the score.

    T5 itself leaves the inner product as it is; `scaled` divides it by sqrt(e).
    """

    def score(q, k, i, j, h):
        inner = plain(q, k, i, j, h) if scaled else q @ k
        return inner + table[bucket(i - j, len(table), max_distance), h]

    return score


def shaw(keys, values):
    """Shaw et al. 2018, equations 3 and 4, for attention to the past alone: vectors (K + 1, e) shared by heads."""

    def score(q, k, i, j, h):
        return (q @ k + q @ keys[min(i - j, len(keys) - 1)]) / math.sqrt(len(q))

    def value(v, i, j):
        return v + values[min(i - j, len(values) - 1)]

    return score, value


def contextual_1(table, W_r, *, max_distance, n_heads):
    """Query to bucket: (q·k + q·(W_r E)) / sqrt(2e), with E (n_buckets d) and W_r (h*e d)."""

    def score(q, k, i, j, h):
        r = W_r.chunk(n_heads)[h] @ table[bucket(i - j, len(table), max_distance)]
        return (q @ k + q @ r) / math.sqrt(2 * len(q))

    return score


def contextual_2(table, W_q, W_k, *, max_distance, n_heads):
    """Disentangled (He et al. 2021, equations 2 to 4) with the layer's own W_q and W_k for the relative vectors E."""

    def score(q, k, i, j, h):
        e = table[bucket(i - j, len(table), max_distance)]
        to_position = q @ (W_k.chunk(n_heads)[h] @ e)
        from_position = k @ (W_q.chunk(n_heads)[h] @ e)
        return (q @ k + to_position + from_position) / math.sqrt(3 * len(q))

    return score


def attention(x, memory, weights, *, n_heads, window, start, encoding=plain, value=None, embed=None):
    """Branch output for each new token: x (t d) new inputs, memory (m d) older ones, the oldest at position `start`.

    `weights` maps W_q, W_k, W_v, W_o to matrices, and b_q to b_o to biases, if any. W_k and W_v may have fewer heads,
    each of which serves as many heads of queries, in their order (Ainslie et al. 2023, figure 2). `window` is how many
    tokens back a token sees (None: all); `encoding` is a `score`, `value` goes with Shaw's; `embed` makes of an input
    and its position what an absolute encoding makes of it.
    """
    m, t = len(memory), len(x)
    weights = {f"b_{name[2:]}": W.new_zeros(len(W)) for name, W in weights.items()} | weights
    rows = list(torch.cat((memory, x)))
    if embed is not None:
        rows = [embed(row, start + j) for j, row in enumerate(rows)]
    out = []
    for i in range(m, m + t):
        heads = []
        for h in range(n_heads):
            W_q, b_q = (weights[name].chunk(n_heads)[h] for name in ("W_q", "b_q"))
            n_groups = n_heads * len(weights["W_k"]) // len(weights["W_q"])
            group = h // (n_heads // n_groups)
            W_k, W_v, b_k, b_v = (weights[name].chunk(n_groups)[group] for name in ("W_k", "W_v", "b_k", "b_v"))
            seen = [j for j in range(i + 1) if window is None or i - j <= window]
            q = W_q @ rows[i] + b_q
            scores = torch.stack([encoding(q, W_k @ rows[j] + b_k, start + i, start + j, h) for j in seen])
            values = [W_v @ rows[j] + b_v for j in seen]
            if value is not None:
                values = [value(v, start + i, start + j) for v, j in zip(values, seen, strict=True)]
            heads.append(sum(p * v for p, v in zip(scores.softmax(0), values, strict=True)))
        out.append(weights["W_o"] @ torch.cat(heads) + weights["b_o"])
    return torch.stack(out)
