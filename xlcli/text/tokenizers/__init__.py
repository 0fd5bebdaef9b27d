"""Tokenizers: bytes, sentencepiece pieces and words; `registry` chooses, trains and loads them."""
