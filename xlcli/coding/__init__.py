"""Compression of text by arithmetic coding with the predictions of a model.

`compress` and `decompress` (`workflow`) read the text one token at a time, so both compute the same numbers. The size
of the result is the surprisal of the text, as `eval` reports it, and about 0.1 % more for the frames (`container`).
"""
