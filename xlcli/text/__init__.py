"""Text in, token ids out.

formats      text out of compressed files and other encodings
recognition  what is JSON, a table or plain text, by name and content
json_rows    rows of JSON; beside it those of tables and of Parquet files
documents    texts of rows
oddities     what nobody sees in a text, but a model scores; misreadings: wrong encodings
sources      one file, safely opened and read in blocks
corpus       files, folders and standard input as one text, and its training, validation and test parts
pretokenize  words, the units that are tokenized independently
tokenizers   bytes, sentencepiece and words; choosing, training and loading one
tokens       token cache: ids on disk, built once and memory-mapped
loaders      batches for training and evaluation
"""
