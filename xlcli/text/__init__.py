"""Text in, token ids out: vocabularies, the one cutting rule, corpora of any size, and the readers of token ids.

pieces          where text may be cut without changing a token; used alike by corpora and pipes
vocabulary      what every vocabulary can do
rawbytes        256 byte values
sentencepieces  a learned vocabulary of word pieces, lossless for any bytes
words           whole words, for published word-level benchmarks
tokenizer       choose, train and load a vocabulary
sources         one file, safely opened, read in blocks
corpus          files, folders, gzip and standard input as one text, in bounded memory
heldout         training, validation and test parts
cache, tokens   token ids on disk, built once, mapped into memory
segments        training lanes around a ring; scoring lanes that see every token once
"""
