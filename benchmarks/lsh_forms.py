"""Processor time of both forms of LSH attention, tiles and gathered keys, by number of tokens for each bucket.

    python benchmarks/lsh_forms.py [--only 512]

One layer, heads of width 64, one thread, best of four. Queries are those of a text: directions of 2,048 words with the
frequencies of Zipf's law, and noise. The table is in benchmarks/log; `GATHERED_TOKENS` in `xlcli/ops/lsh_attention.py`
follows from it.
"""

import argparse
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F

from xlcli.ops import lsh_attention
from xlcli.ops.lsh_gather import KeyWindow
from xlcli.ops.lsh_table import Table, draw_rotations, hash_buckets, insert, rank_in_buckets

WORDS, WIDTH, CALL, MEM_LEN = 2048, 64, 2048, 65536


class Case(NamedTuple):
    """Sizes of a call after `earlier` tokens; `trains`: with gradients."""

    rows: int
    heads: int
    tokens: int
    earlier: int
    bucket_size: int
    rounds: int
    buckets: tuple[int, ...]
    trains: bool


CASES = (
    Case(4, 3, 512, 8192, 32, 2, (16, 64, 256, 1024), trains=True),
    Case(1, 4, 2048, 8192, 64, 4, (64, 256), trains=True),
    Case(1, 4, 2048, 0, 64, 4, (256, 1024), trains=True),
    Case(1, 3, 512, 8192, 32, 2, (64, 256, 2048), trains=False),
    Case(1, 3, 2048, 8192, 32, 2, (256, 1024, 2048), trains=False),
    Case(1, 4, 1024, 0, 64, 4, (256, 1024), trains=False),
)


def measure(case: Case, n_buckets: int) -> list[float]:
    """Milliseconds of a call in tiles and with gathered keys."""
    generator = torch.Generator().manual_seed(0)
    half = 2 ** ((n_buckets.bit_length() - 1) // 2)
    factors = (n_buckets,) if n_buckets <= 64 else (half, n_buckets // half)
    rotations = draw_rotations(case.rounds, factors, WIDTH, generator)
    words, frequencies = torch.randn(WORDS, WIDTH, generator=generator), 1 / torch.arange(1, WORDS + 1)

    def draw(n: int) -> torch.Tensor:
        ids = torch.multinomial(frequencies, case.rows * case.heads * n, replacement=True, generator=generator)
        return (words[ids] + torch.randn(len(ids), WIDTH, generator=generator)).view(case.rows, case.heads, n, WIDTH)

    table = Table.empty(torch.zeros(WIDTH), case.rows, case.heads, case.rounds, n_buckets, case.bucket_size)
    for start in range(0, case.earlier, CALL):
        x = draw(CALL)
        ranks = rank_in_buckets(hash_buckets(x, rotations, factors), table.counts)
        insert(table, ranks, F.normalize(x, dim=-1), x, start)
    x, found = draw(case.tokens), []
    ranks = rank_in_buckets(hash_buckets(x, rotations, factors), table.counts)
    for limit in (0, case.tokens):
        lsh_attention.GATHERED_TOKENS = limit
        seconds = []
        for _ in range(4):
            q, v = (x.clone().requires_grad_(case.trains) for _ in range(2))
            before = time.process_time()
            with torch.set_grad_enabled(case.trains):
                y = lsh_attention.attend_hashed(
                    q,
                    F.normalize(q, dim=-1),
                    v,
                    ranks,
                    table if case.earlier else None,
                    KeyWindow(case.earlier, 0, MEM_LEN),
                    bucket_size=case.bucket_size,
                )
                if case.trains:
                    y.sum().backward()
            seconds.append(time.process_time() - before)
        found.append(1000 * min(seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, help="number of tokens of the calls to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if options.only in (None, case.tokens):
            for n_buckets in case.buckets:
                tiles, gathered = measure(case, n_buckets)
                print(f"{case._replace(buckets=(n_buckets,))}: tiles {tiles:.0f} ms, gathered {gathered:.0f} ms")


if __name__ == "__main__":
    main()
