"""Attention over the band of a full memory without a mask: three causal calls, FlexAttention, and the mask itself.

    python benchmarks/band.py

Each of 256 queries sees M keys before its own and that. The kernels of PyTorch that hold no scores know no such band.
But its oldest keys are a causal triangle if both sides are reversed, its newest keys are one as it is, and all queries
see those between; the parts are joined by the logarithms of their sums. Prints the largest error against float64, and
processor times in ms (one thread, float32, median of 15). It measures the CPU: on a GPU it is only an arithmetic.
"""

import statistics
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

B, H, T, E = 4, 8, 256, 64  # sequences, heads, queries, width


def in_parts(q, k, v, n_memory):
    """The output (b h t e) by calls without a mask; at least as many keys in memory as queries. Has no gradient."""
    outs, log_sums = [], []

    def add(keys, *, is_causal, is_reversed=False):
        inputs = [q, k[:, :, keys], v[:, :, keys]]
        if is_reversed:
            inputs = [x.flip(2) for x in inputs]
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, is_causal)
        out, log_sum = (x.flip(2) for x in parts) if is_reversed else parts
        outs.append(out)
        log_sums.append(log_sum)

    add(slice(0, T), is_causal=True, is_reversed=True)
    if n_memory > T:
        add(slice(T, n_memory), is_causal=False)
    add(slice(n_memory, None), is_causal=True)
    weights = torch.stack(log_sums).softmax(0).unsqueeze(-1)
    return (torch.stack(outs) * weights).sum(0)


def processor_ms(function):
    times = []
    for _ in range(16):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times[1:])  # the first one compiles


def compare(n_memory, compiled_flex):
    """Prints error and time of each way with this number of keys in memory."""
    n_keys = n_memory + T
    q, k, v = torch.randn(B, H, T, E), torch.randn(B, H, n_keys, E), torch.randn(B, H, n_keys, E)

    def sees(_batch, _head, query, key):
        return (key >= query) & (key <= query + n_memory)

    visible = sees(None, None, torch.arange(T)[:, None], torch.arange(n_keys))
    block_mask = create_block_mask(sees, None, None, T, n_keys, device="cpu")
    ways = {
        "mask": lambda: scaled_dot_product_attention(q, k, v, attn_mask=visible),
        "parts": lambda: in_parts(q, k, v, n_memory),
        "flex": lambda: compiled_flex(q, k, v, block_mask=block_mask),
    }
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible)
    for name, way in ways.items():
        with torch.inference_mode():
            error = float((way().double() - exact).abs().max())
            print(f"memory {n_memory}, {name}: error {error:.1e}, {processor_ms(way):.1f} ms")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    compiled = torch.compile(flex_attention)
    for number in (256, 512, 1024):
        compare(number, compiled)
