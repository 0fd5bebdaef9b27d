"""Token ids of a training text in a small file, for machines to which little can be carried.

    python benchmarks/ids.py pack TEXT... OUT.ids.xz      # ids of the texts, one after the other, compressed
    python benchmarks/ids.py unpack OUT.ids.xz TEXT       # the text, and its tokens in the cache of xlcli train

Tokens are those of the bundled model. English text takes 0.26 bytes a byte, a tenth less than compressed as text, and
the other machine need not tokenize it. `xlcli train TEXT --init books --valid FILE` then finds its tokens.
"""

import argparse
import lzma
from pathlib import Path

import numpy as np

from xlcli.text.corpus import Part, gather
from xlcli.text.pretokenize import whole_words
from xlcli.text.tokenizers import SentencePieceTokenizer, load_tokenizer
from xlcli.text.tokens import token_file

BOOKS = Path(__file__).parents[1] / "models" / "books"
# One stream: blocks would be compressed apart. Ids are 16-bit numbers.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**27, "lp": 1, "pb": 1}]


def result(generator):
    """What a generator returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def pack(texts, out):
    tokenizer = load_tokenizer(BOOKS)
    with lzma.open(out, "wb", filters=FILTERS) as file:
        for text in texts:
            for portion in whole_words([text.read_bytes()]):
                file.write(tokenizer.encode(portion).astype("<u2").tobytes())


class Known(SentencePieceTokenizer):
    """The tokenizer of a text whose ids are known."""

    ids = ends = np.empty(0, np.int64)

    def tokens(self, data, at=0):
        """Ids of `data`, which is at this offset of the text, and their sizes."""
        first, last = np.searchsorted(self.ends, (at, at + len(data)), side="right")
        ids = self.ids[first:last].astype(np.int32)
        assert self.decode(ids) == data
        return ids, self.id_sizes[ids]


def unpack(packed, text):
    with lzma.open(packed) as file:
        ids = np.frombuffer(file.read(), "<u2")
    tokenizer = load_tokenizer(BOOKS)
    text.write_bytes(tokenizer.decode(ids))
    tokenizer.__class__ = Known
    tokenizer.ids, tokenizer.ends = ids, np.cumsum(tokenizer.id_sizes[ids], dtype=np.int64)
    corpus = result(gather([str(text)]))
    result(corpus.scan())
    made = result(token_file(Part(corpus, 0, corpus.n_bytes), tokenizer))
    print(f"{corpus.n_bytes:,} bytes, {len(made):,} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["pack", "unpack"])
    parser.add_argument("paths", nargs="+", type=Path)
    options = parser.parse_args()
    *given, last = options.paths
    if options.task == "pack":
        pack(given, last)
    else:
        unpack(given[0], last)


if __name__ == "__main__":
    main()
