"""Tensor functions without parameters and configuration, and the context of one call.

Axis letters, used in every shape of the project: b sequence of a batch, t new token, s source token (memory and new),
m memory, d width, h head, e head width, f feature, v vocabulary, c chunk, w window, r hash round.
"""
