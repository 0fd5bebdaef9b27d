"""Tensor functions without parameters and configuration, and the context of one call.

call         span, context
softmax      attend, which chooses among its kernels, and attend_blocks
linear       favor
LSH          lsh_attention for many tokens in a bucket, lsh_gather for few, lsh_table
elements     layers

Axis letters, used in every shape of the project: b sequence of a batch, t new token, s source token (memory and new),
m memory, d width, h head, e head width, f feature, v vocabulary, c chunk, w window, r hash round.
"""
