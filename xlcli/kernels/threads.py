"""Parts of kernels that Numba compiles: decorators, arrays at addresses, and threads that share the tasks of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from xlcli.kernels.compiler import intrinsic, ir, numba, register_jitable, types
from xlcli.kernels.records import Array

SPINS = 2**20  # times that a waiting thread looks for the others, about 1 ms, before it lets other processes run
COUNTERS = 128  # size in bytes of the counters of a step, of tasks taken and of tasks done: two cache lines
FASTMATH = {"reassoc", "contract", "nsz"}  # sums may be reordered, to use vectors; inf and nan stay
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that Python calls."""
    return cast("Callable[[Kernel], Kernel]", numba.njit(nogil=True, error_model="numpy", **options))


def inner(**options: Any) -> Callable[[Kernel], Kernel]:
    """Decorator of a function that only compiled functions call: compiled without the wrappers for other callers."""
    return compiled(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], ir.IntType(8).as_pointer()
    )


@intrinsic
def add_at(typing: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at an address, in one operation for all threads; returns its value before that."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def read_at(typing: Any, address: Any) -> Any:
    """Int64 at an address, and with it everything that its writer wrote before."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), lower


sched_yield = types.ExternalFunction("sched_yield", types.int32())


@register_jitable
def array(address: int, shape: Any, dtype: Any = np.float32) -> Array:
    return numba.carray(pointer(address), shape, dtype)  # type: ignore[attr-defined, call-arg]


class Team(NamedTuple):
    """Threads that share the tasks of a step: their number, and the address of its counters, which are 0 at first."""

    size: int
    counters: int


@register_jitable
def next_step(team: Team) -> Team:
    """The threads at the next step."""
    return Team(team.size, team.counters + COUNTERS)


@register_jitable
def take(team: Team, n_tasks: int) -> int:
    """A task of the step for this thread alone, 0 to `n_tasks` - 1; -1 when all are done."""
    task: int = add_at(team.counters, 1)  # type: ignore[call-arg]
    if task < n_tasks:
        return task
    spins = 0
    while read_at(team.counters + COUNTERS // 2) < n_tasks:
        spins += 1
        if spins > SPINS:
            sched_yield()
    return -1


@register_jitable
def finish(team: Team) -> None:
    add_at(team.counters + COUNTERS // 2, 1)  # type: ignore[call-arg]
