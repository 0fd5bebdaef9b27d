"""Tokenizers: `base` is their protocol, `registry` chooses, trains and loads one."""
