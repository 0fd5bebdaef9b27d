"""Tensor functions without parameters and configuration, and the context of one call.

call         span, positions, context
softmax      attend, which chooses among its kernels, and attend_blocks
linear       favor
LSH          lsh_attention, lsh_table, lsh_tiles for many tokens in a bucket, lsh_gather for few
elements     layers

Axis letters, used in every shape of the project: b sequence of a batch, t new token, s source token (memory and new),
m memory, d width, h head, e head width, f feature, v vocabulary, c chunk, w window, r hash round.
"""
