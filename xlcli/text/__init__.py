"""Text in, token ids out.

sources      one file, safely opened and read in blocks
corpus       files, folders, gzip and standard input as one text, in bounded memory
heldout      training, validation and test parts of a corpus
pretokenize  words, the units that are tokenized independently
tokenizers   bytes, sentencepiece and words; choosing, training and loading one
cache        the cache folder and its bounds
tokens       token cache: ids on disk, built once and memory-mapped
loaders      batches for training and evaluation
"""
