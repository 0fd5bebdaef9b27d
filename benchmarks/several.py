"""Several prompts in one batch, and one after the other: tokens per second.

    python benchmarks/several.py [--model books] [--text demo/shakespeare.txt] [--texts 16] [--tokens 32] [--threads 1]

Prompts have different lengths. Results in a batch are compared with those alone.
"""

import argparse
import time
from pathlib import Path

import xlcli
from xlcli.events import Generated


def timed(work):
    """Result of a function, and its duration in seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="books")
    parser.add_argument("--text", type=Path, default=Path("demo/shakespeare.txt"))
    for name, default in (("texts", 16), ("tokens", 32), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = xlcli.load(options.model, threads=options.threads)
    data = options.text.read_bytes()
    step = len(data) // options.texts
    prompts = [data[i * step :][: 20 + 13 * i].decode() for i in range(options.texts)]
    sampling = {"max_new_tokens": options.tokens, "seed": 1}
    list(xlcli.generate(model, "a", max_new_tokens=3))  # loads the kernels

    def each():
        return [e for p in prompts for e in xlcli.generate(model, p, **sampling) if isinstance(e, Generated)]

    def batch():
        return [e[0] for e in xlcli.generate_prompts(model, prompts, **sampling) if isinstance(e, tuple)]

    (alone, seconds), (together, less) = timed(each), timed(batch)
    n = sum(result.tokens for result in alone)
    equal = [result.text for result in alone] == [result.text for result in together]
    print(f"generate: alone {n / seconds:.0f} tokens/s, in a batch {n / less:.0f} tokens/s, equal: {equal}")


if __name__ == "__main__":
    main()
