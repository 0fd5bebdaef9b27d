"""Attention branches: softmax over the span; further kinds are siblings of `full`."""
