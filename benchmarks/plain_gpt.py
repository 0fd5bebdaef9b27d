"""Speed of the shape of peer-12x512 in plain PyTorch: what a reader would write with its fused causal attention.

    python benchmarks/plain_gpt.py --device cuda [--seconds 1] [1]

12 pre-norm layers of width 512, 8 heads, feed-forward 2,048, 256 symbols; no memory, so each token sees those before it
in its segment. Training: forward and backward pass, gradient clipping and fused AdamW, float32 weights under autocast
to bfloat16. Evaluation: the loss of each token. Every result is a line of JSON with the median milliseconds of a call
and tokens per second. The last argument makes the shape small, to prove the script.
"""

import argparse
import json
import statistics
import time

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

DIM, LAYERS, HEADS, FFN, VOCAB = 512, 12, 8, 2048, 256


class Block(nn.Module):
    """Attention and feed-forward branch, each after a norm."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)

    def forward(self, x):
        """Output (b t d)."""
        q, k, v = rearrange(self.qkv(self.norms[0](x)), "b t (n h e) -> n b h t e", n=3, h=HEADS)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(rearrange(heads, "b h t e -> b t (h e)"))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Surprisal of each token (b t) but the first."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(4096, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        """Surprisal in nats of tokens (b t+1) after the first."""
        x = self.embedding(ids[:, :-1])
        x = self.norm(self.blocks(x + self.positions.weight[: x.shape[1]]))
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def median_seconds(call, seconds, device):
    """Median duration of a call, after three that are not timed."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, end = [], None
    while end is None or time.perf_counter() < end or len(times) < 6:
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
        if len(times) == 3:
            end = time.perf_counter() + seconds
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    layers, batch, lengths = (2, 2, (64,)) if options.small else (LAYERS, 32, (512, 1024))
    model = Model(layers).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for compiled in (False,) if options.small else (False, True):
        network = torch.compile(model) if compiled else model
        for length in lengths:
            ids = torch.randint(0, VOCAB, (batch, length + 1), device=options.device)

            def evaluate(ids=ids, network=network):
                with torch.inference_mode(), torch.autocast(options.device, torch.bfloat16):
                    network(ids).sum().item()

            def train(ids=ids, network=network):
                with torch.autocast(options.device, torch.bfloat16):
                    loss = network(ids).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                loss.item()

            for task in (train, evaluate):
                seconds = median_seconds(task, options.seconds, options.device)
                rate = round(batch * length / seconds)
                row = {"task": task.__name__, "batch": batch, "length": length, "compiled": compiled}
                print(json.dumps(row | {"ms": round(1000 * seconds, 3), "tokens_per_second": rate}), flush=True)


if __name__ == "__main__":
    main()
