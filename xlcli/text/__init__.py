"""Text in, token ids out.

formats      text out of compressed files and other encodings
documents    texts of JSON lines, tables and Parquet files
sources      one file, safely opened and read in blocks
corpus       files, folders and standard input as one text, and its training, validation and test parts
pretokenize  words, the units that are tokenized independently
tokenizers   bytes, sentencepiece and words; choosing, training and loading one
tokens       token cache: ids on disk, built once and memory-mapped
loaders      batches for training and evaluation
"""
