"""Several prompts and several streams in one batch, and one after the other: tokens per second.

    python benchmarks/several.py [--model books] [--text demo/shakespeare.txt] [--texts 16] [--bytes 700] [--tokens 32]
        [--threads 1]

Prompts have different lengths. Streams arrive as lines, as lines after each of which nothing arrives for a moment, and
as a whole. Results in a batch are compared with those alone.
"""

import argparse
import time
from pathlib import Path

import xlcli
from xlcli.events import Generated, StreamStats


def timed(work):
    """Result of a function, and its duration in seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def paused(text):
    """Lines after each of which nothing arrives."""
    for line in text.splitlines(keepends=True):
        yield line
        yield None


ARRIVALS = {
    "lines": lambda text: iter(text.splitlines(keepends=True)),
    "pauses": paused,
    "whole": lambda text: iter([text]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="books")
    parser.add_argument("--text", type=Path, default=Path("demo/shakespeare.txt"))
    for name, default in (("texts", 16), ("bytes", 700), ("tokens", 32), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = xlcli.load(options.model, threads=options.threads)
    data = options.text.read_bytes()
    step = len(data) // options.texts
    texts = [data[i * step :][: options.bytes].decode() for i in range(options.texts)]
    prompts = [text[: 20 + 13 * i] for i, text in enumerate(texts)]
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
    for name, arrive in ARRIVALS.items():

        def one(arrive=arrive):
            found = [e for text in texts for e in xlcli.stream(model, filter(None, arrive(text)))]
            return sum(event.tokens for event in found if isinstance(event, StreamStats) and event.final)

        def several(arrive=arrive):
            return list(xlcli.stream_several(model, {str(i): arrive(text) for i, text in enumerate(texts)}))

        (n, seconds), (_, less) = timed(one), timed(several)
        print(f"stream, {name}: alone {n / seconds:.0f} tokens/s, together {n / less:.0f} tokens/s")


if __name__ == "__main__":
    main()
