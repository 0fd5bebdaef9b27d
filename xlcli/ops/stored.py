"""Weight matrices that stay in the numbers of their file, and are float32 only while they are used."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

_EXPONENT_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
HALVES = _EXPONENT_BITS.keys()  # types of 16-bit floats
_WITHOUT_SIGN = 0x7FFF
_LARGEST_INT8 = 127
_aten = torch.ops.aten
_SAME_MATRIX = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_WITHOUT_VALUES = {
    Tensor.clone, Tensor.requires_grad_, Tensor.to, Tensor.__deepcopy__, Tensor.size, Tensor.dim,
    Tensor.numel, Tensor.__len__, Tensor.element_size, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
}  # fmt: skip
"""Methods that do not need float32 values."""
_TRANSPOSED = [Tensor.T.__get__, Tensor.mT.__get__]  # type: ignore[attr-defined]
"""Attributes that need them."""
_IN_PLACE = re.compile(r"__setitem__|__i\w+__|\w*[^_]_")  # names of functions that change their first argument
TILE = 2**20  # number of weights that a product widens at once: 4 MiB, which stay in the cache until multiplied
TILE_ROWS = 64  # tiles have a multiple of this many rows, so a product of MKL sums in the same order as for all rows


class StoredMatrix(Tensor):
    """A matrix (o i) of 16-bit floats, or of int8 rows with a scale (o) each, that acts as its float32 values.

    Every function of PyTorch widens it first, and nothing keeps the float32 values; a lookup of rows widens only these,
    and a linear layer one tile of rows after the other. So all results are those of a float32 matrix with these values.
    It cannot be changed, and has no gradient.
    """

    rows: Tensor  # the numbers as they are stored
    scale: Tensor | None  # scales of int8 rows, else None

    @staticmethod
    def __new__(cls, rows: Tensor, scale: Tensor | None = None) -> StoredMatrix:
        self: StoredMatrix = Tensor._make_wrapper_subclass(cls, rows.shape, dtype=torch.float32, device=rows.device)
        self.rows = rows
        self.scale = scale
        return self

    def widened(self) -> Tensor:
        """Its float32 values (o i), in memory of their own."""
        wide = self.rows.float()
        if self.scale is not None:
            wide.mul_(self.scale.float().unsqueeze(-1))  # in place, because tables of tokens are large
        return wide

    def rows_at(self, ids: Tensor) -> Tensor:
        """The float32 values (... i) of the rows with these numbers (...)."""
        wide = self.rows[ids].float()
        if self.scale is not None:
            wide.mul_(self.scale[ids].float().unsqueeze(-1))
        return wide

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (... o) for x (... i) in float32, without a gradient."""
        rows = x.reshape(-1, x.shape[-1])
        n_outputs, width = self.shape
        out = torch.empty(len(rows), n_outputs)
        n_tile = max(1, TILE // (TILE_ROWS * width)) * TILE_ROWS
        scratch = torch.empty(min(n_tile, n_outputs), width)
        for start in range(0, n_outputs, n_tile):
            part = slice(start, min(start + n_tile, n_outputs))
            tile = scratch[: part.stop - start].copy_(self.rows[part])
            if self.scale is not None:
                tile.mul_(self.scale[part].float().unsqueeze(-1))
            if bias is None:
                torch.mm(rows, tile.T, out=out[:, part])
            else:
                torch.addmm(bias[part], rows, tile.T, out=out[:, part])
        return out.view(*x.shape[:-1], n_outputs)

    def is_finite(self) -> bool:
        """True if its float32 values are neither NaN nor infinite; takes no memory for them."""
        if self.scale is not None:
            largest = _LARGEST_INT8 * self.scale.float()  # each row has such a number, if not zeros alone
            return bool(largest.isfinite().all())
        # A number is infinite or NaN if all bits of its exponent are set. Bits are compared faster than floats.
        exponent = _EXPONENT_BITS[self.rows.dtype]
        tiles = torch.split(self.rows.view(torch.int16).flatten(), TILE)
        return all(int((bits & _WITHOUT_SIGN).max()) < exponent for bits in tiles)

    @classmethod
    def cat(cls, matrices: list[StoredMatrix]) -> StoredMatrix:
        """The rows of several matrices of one type in one."""
        scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
        return cls(torch.cat([matrix.rows for matrix in matrices]), torch.cat(scales) if scales else None)

    def part(self, start: int, stop: int) -> StoredMatrix:
        """A matrix of some rows, which shares their memory."""
        scale = None if self.scale is None else self.scale[start:stop]
        return StoredMatrix(self.rows[start:stop], scale)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of a function of PyTorch that has such a matrix among its arguments.

        Look-ups and linear layers widen only what they need. `TypeError` if the function would change the matrix.
        """
        kwargs = kwargs or {}
        if func is F.embedding:
            ids, matrix = args[:2]
            return matrix.rows_at(ids)
        if func is Tensor.detach:
            return cls(args[0].rows, args[0].scale)
        if func is F.linear and _is_plain(args[0]):
            x, matrix, *bias = args
            return matrix.product(x, *bias)
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__") and func not in _TRANSPOSED
        needs_values = not is_attribute and func not in _WITHOUT_VALUES
        if needs_values and _IN_PLACE.fullmatch(name) and isinstance(args[0], StoredMatrix):
            raise TypeError(f"{name} would change a stored matrix")
        if needs_values:
            args, kwargs = pytree.tree_map_only(StoredMatrix, StoredMatrix.widened, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same for operations that PyTorch calls itself, as to copy a module."""
        first = args[0]
        if func in _SAME_MATRIX:
            return StoredMatrix(first.rows, first.scale)
        if func is _aten.clone.default:
            return StoredMatrix(first.rows.clone(), None if first.scale is None else first.scale.clone())
        args, kwargs = pytree.tree_map_only(StoredMatrix, StoredMatrix.widened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredMatrix({list(self.shape)}, {self.rows.dtype})"


def _is_plain(x: Tensor) -> bool:
    """True if a product of x is of float32 on a CPU, and nobody asks for its gradient."""
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    is_float = x.dtype == torch.float32 and x.device.type == "cpu"
    return is_float and not needs_gradient and not torch.is_autocast_enabled("cpu")


def is_finite(weight: Tensor) -> bool:
    """True if no number of a weight is NaN or infinite."""
    return weight.is_finite() if isinstance(weight, StoredMatrix) else bool(weight.isfinite().all())


def widened(weight: Tensor) -> Tensor:
    """A weight in float32 whose numbers have an address: itself, unless it is a `StoredMatrix`."""
    return weight.widened() if isinstance(weight, StoredMatrix) else weight
