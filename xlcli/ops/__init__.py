"""Pure tensor functions: no parameters, no configuration, no state.

Axis letters, used in every shape of the project: b row, t new token, s source token (memory and new), m memory,
d width, h head, e head width, f feature, v vocabulary, c chunk, w window, r hash round.
"""
