"""Kernels that Numba compiles for generation on a CPU, behind one function, `decode.decode`.

compiler   Numba, without settings of the working folder
records    what the kernels read; imports no Numba
threads    decorators, arrays at addresses, and threads that share the tasks of a step
linear     inner products, norms, linear layers
attention  memory and softmax
decode     all blocks for one token
files      files of compiled kernels
"""
