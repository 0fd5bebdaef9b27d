"""Error of linear attention (random features) against softmax attention, by scale of queries and keys.

    python benchmarks/performer_error.py [--tokens 512] [--out benchmarks/results/performer_error.json]
    python benchmarks/performer_error.py --table benchmarks/results/performer_error.json    # table of benchmarks/log

Queries and keys are independent normal vectors with standard deviation `scale` in each component, so the softmax logits
q·k / sqrt(head width) have standard deviation scale²; values are standard normal. Attention is causal; 8 heads share
the features; everything is in float64. The error is the Frobenius norm of (linear - softmax) over that of softmax, over
all heads and tokens: 100 % is the error of an output of zeros. Each seed draws new features, queries, keys and values.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from xlcli.ops.favor import attend_linear, draw_features, key_features, query_features

HEAD_WIDTHS = (32, 64)
SCALES = (0.25, 0.5, 1.0)
N_FEATURES = (16, 64, 256, 1024)
N_HEADS = 8
SEEDS = range(10)


def relative_error(*, head_dim: int, n_tokens: int, scale: float, n_features: int, seed: int) -> float:
    """Relative error of one draw."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, N_HEADS, n_tokens, head_dim, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = scale * q, scale * k
    features = draw_features(n_features, head_dim, generator)
    s = torch.zeros(1, N_HEADS, n_features, head_dim, dtype=torch.float64)
    linear, _, _ = attend_linear(query_features(q, features), key_features(k, features), v, s, s[..., 0])
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((linear - softmax).norm() / softmax.norm())


def measure(n_tokens: int) -> list[dict[str, object]]:
    """One row for each head width, scale and number of features: relative errors of all seeds."""
    return [
        {
            "head_dim": head_dim, "tokens": n_tokens, "scale": scale, "n_features": n_features,
            "errors": [
                relative_error(head_dim=head_dim, n_tokens=n_tokens, scale=scale, n_features=n_features, seed=seed)
                for seed in SEEDS
            ],
        }
        for head_dim in HEAD_WIDTHS for scale in SCALES for n_features in N_FEATURES
    ]  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    """Markdown: mean error in per cent, half the range over seeds in brackets."""
    lines = [f"| head width | scale | {' | '.join(f'{n:,} features' for n in N_FEATURES)} |", "|---" * 6 + "|"]
    found = {(row["head_dim"], row["scale"], row["n_features"]): row["errors"] for row in rows}
    for head_dim in HEAD_WIDTHS:
        for scale in SCALES:
            cells = [found[head_dim, scale, n] for n in N_FEATURES]
            shown = [f"{100 * statistics.mean(c):.0f} % ({50 * (max(c) - min(c)):.0f})" for c in cells]
            lines.append(f"| {head_dim} | {scale} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, or prints the table of a file of results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        rows = json.loads(options.table.read_text())["rows"]
    else:
        rows = measure(options.tokens)
        if options.out:
            options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print(table(rows), end="")


if __name__ == "__main__":
    main()
