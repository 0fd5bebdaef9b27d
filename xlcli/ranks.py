"""Ranks: the processes of one run, each with a share of the rows, joined by `torch.distributed`.

`--nproc` starts them on one machine, `torchrun` on several. A single process is the same value with size 1, whose
operations return their argument. No module below this one depends on the number of ranks. Torch is imported in
functions only.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from xlcli.errors import ConfigError, LostRankError, RankError
from xlcli.events import StoppedEarlyError
from xlcli.files import STANDARD_INPUT, is_pipe

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

JOIN_SECONDS = 180.0  # maximum number of seconds until all ranks have joined
STORE = "XLCLI_RANK_STORE"
"""Environment variable with the file through which the ranks of `--nproc` find each other, in a private folder."""
LATE_SECONDS = 15.0  # maximum number of seconds by which the end of a wait within PyTorch is late
MOST_PORT_DIGITS = 5
POLL_SECONDS = 0.1  # seconds between two looks for a published value


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, seen from one of them. Every rank must call the same operations in the same order."""

    rank: int = 0  # number of this rank; rank 0, the first, alone writes files and reports
    size: int = 1  # number of ranks
    local_rank: int = 0  # number of this rank on its machine, and of its CUDA device
    local_size: int = 1  # number of ranks on this machine
    restarts: int = 0  # number of times that the launcher has started all ranks again
    # Key-value store of the process group; None in a single process.
    store: Any = field(default=None, repr=False, compare=False)
    meshes: list[Any] = field(default_factory=list, repr=False, compare=False)  # device meshes made by `mesh`

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def rows(self, n_rows: int) -> slice:
        """Rows of this rank among `n_rows`; all ranks have equally many if their number divides `n_rows`."""
        return slice(self.rank * n_rows // self.size, (self.rank + 1) * n_rows // self.size)

    def require_files(self, paths: Sequence[str]) -> None:
        """Raises `ConfigError` if several ranks were to read standard input or a pipe as their text."""
        if self.size == 1:
            return
        for path in paths:
            if is_pipe(path):
                name = STANDARD_INPUT if path == "-" else path
                raise ConfigError(f"several processes cannot read {name}.", "Give the text as a file.")

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of this tensor over all ranks, on every rank, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def gather_rows(self, tensor: Tensor, *, everywhere: bool = False) -> Tensor:
        """Concatenation (b ...) of the tensors (r ...) of all ranks, on the first or `everywhere`; else the tensor."""
        if self.size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        tensor = tensor.contiguous()
        parts: list[Tensor] = []
        if everywhere or self.is_first:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
        # Sent as bytes, because gloo lacks some number types.
        sent = tensor.view(torch.uint8)
        received = [part.view(torch.uint8) for part in parts]
        if everywhere:
            dist.all_gather(received, sent)
        elif self.is_first:
            dist.gather(sent, received)
        else:
            dist.gather(sent, None)
            return tensor
        return torch.cat(parts)

    def gather(self, value: Any) -> list[Any]:
        """JSON values of all ranks in order, on every rank."""
        if self.size == 1:
            return [value]
        import torch

        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.gather_rows(torch.tensor([len(text)]), everywhere=True).tolist()
        padded = torch.nn.functional.pad(text, (0, max(lengths) - len(text)))
        texts = self.gather_rows(padded[None], everywhere=True)
        values: list[Any] = []
        for row, length in zip(texts, lengths, strict=True):
            values.append(json.loads(bytes(row[:length].tolist()).decode()))
        return values

    def broadcast(self, value: Any) -> Any:
        """JSON value of the first rank, on every rank."""
        return self.gather(value if self.is_first else None)[0]

    def mesh(self, device_type: str) -> DeviceMesh:
        """One-dimensional device mesh of several ranks; `join` drops its process group when it ends."""
        assert self.size > 1
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, (self.size,))
        self.meshes.append(mesh)
        return mesh

    def barrier(self) -> None:
        self.gather(None)

    def publish(self, name: str, value: Any) -> None:
        """Makes a JSON value known under a name; see `published`."""
        if self.store is not None:
            self.store.set(name, json.dumps(value))

    def withdraw(self, name: str) -> None:
        """Removes what was published under a name, if anything."""
        if self.store is not None:
            self.store.delete_key(name)

    def published(self, name: str, stop: Callable[[], bool] = lambda: False) -> Any:
        """The JSON value published under a name; waits without a limit, `StoppedEarlyError` once `stop` is true."""
        while not self.store.check([name]):
            if stop():
                raise StoppedEarlyError
            time.sleep(POLL_SECONDS)
        return json.loads(self.store.get(name))


SINGLE = Ranks()  # a single process


_FIELDS = {  # of `Ranks`, and the variables of torchrun that set them
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
}
_USE_TORCHRUN = "Start all processes with torchrun, or unset WORLD_SIZE."


def environment(variables: Mapping[str, str] = os.environ) -> Ranks:
    """Ranks by environment variables, not yet joined; `ConfigError` if the variables contradict each other."""
    numbers: dict[str, Any] = {}
    try:
        for field_name, variable in _FIELDS.items():
            if variables.get(variable):
                numbers[field_name] = int(variables[variable])
    except ValueError as error:
        raise ConfigError(f"an environment variable of torchrun is not a number: {error}.", _USE_TORCHRUN) from None
    ranks = Ranks(**numbers)
    if ranks.size > 1:
        _require_address(variables, ranks.size)
        local_size = numbers.get("local_size", ranks.size)  # without the variables of a machine, all ranks are on one
        local_rank = numbers.get("local_rank", ranks.rank % max(1, local_size))
        ranks = replace(ranks, local_size=local_size, local_rank=local_rank)
    if not (0 <= ranks.rank < ranks.size and 0 <= ranks.local_rank < ranks.local_size):
        raise ConfigError(f"RANK is {ranks.rank}, but WORLD_SIZE is {ranks.size}.", _USE_TORCHRUN)
    return ranks


def _require_address(variables: Mapping[str, str], size: int) -> None:
    """`ConfigError` if one of several ranks does not know its number, or where it meets the others."""
    needed = ["RANK"]
    if not variables.get(STORE):  # a file in which they meet
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if not variables.get(name):
            raise ConfigError(f"WORLD_SIZE is {size}, but {name} is not set.", _USE_TORCHRUN)
    port = variables.get("MASTER_PORT")
    if not port:
        return
    is_number = port.isascii() and port.isdigit() and len(port) <= MOST_PORT_DIGITS
    if not is_number or not 0 < int(port) < 2**16:
        raise ConfigError(f"MASTER_PORT is '{port}', not a port.", "Set it to a number from 1 to 65535.")


@contextmanager
def join(timeout: float = 600.0, remedy: str = "Run the command again.") -> Iterator[Ranks]:
    """The ranks of the environment, joined until the context ends: gloo between CPUs, NCCL between CUDA devices.

    `ConfigError` if the variables contradict each other, or this process has joined others; `RankError` with the
    remedy if another rank has ended, does not come, or does not answer for `timeout` seconds.
    """
    ranks = environment()
    if ranks.size == 1:
        yield ranks
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # no stack traces of C++ beside errors that are raised
    if os.environ.get(STORE):  # all ranks are on this machine
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    import torch.distributed as dist

    if dist.is_initialized():
        problem = "torch.distributed is initialized in this process already."
        raise ConfigError(problem, "Leave init_process_group to xlcli, and end one run before the next one.")
    # If imported while the group exists, as by the first step of an optimizer, its functions keep that group as a
    # default argument.
    import torch.distributed.nn  # noqa: F401

    meshes: list[Any] = []
    try:
        yield replace(ranks, store=_connect(ranks, timeout, remedy), meshes=meshes)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        noticed = f"(noticed by rank {ranks.rank} of {ranks.size})"
        if is_timeout(error):
            message = f"another process of this run has not answered for {timeout:g} seconds {noticed}."
            raise RankError(message, remedy) from error
        raise LostRankError(f"another process of this run was lost {noticed}.", remedy) from error
    finally:
        _leave(meshes)


def _leave(meshes: Sequence[Any]) -> None:
    """Destroys the process group and drops the references that would keep it, so that the threads of gloo end.

    A thread that is left may release a tensor while the interpreter ends, and this aborts the process.
    """
    import torch.distributed as dist

    with suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()
    for mesh in meshes:  # caches of DTensor keep the meshes themselves
        getattr(mesh, "_pg_registry", {}).clear()
    gc.collect()  # divided models are reference cycles that hold the group
    if meshes:
        atexit.register(gc.collect)  # the caller, or the traceback of an exception, may still hold a model


def _connect(ranks: Ranks, timeout: float, remedy: str) -> Any:
    """Connects this rank with all others; returns the key-value store of this run.

    Rendezvous and gloo handle no signal while they wait, and gloo waits without a limit for a rank that ends while they
    connect. So they have a thread of their own, which is left behind if gloo waits. A thread whose wait is about to end
    must end first: if it came back while the interpreter ends, it would abort the process. `LostRankError` if not all
    ranks have joined in time.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    limit = min(timeout, JOIN_SECONDS)
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    outcomes: list[Any] = []

    def connect() -> None:
        try:
            store = _rendezvous(ranks.rank, ranks.size, limit)
            number = store.add(f"runs of rank {ranks.rank} after {ranks.restarts} restarts", 1)
            store_of_run = PrefixStore(f"run {ranks.restarts}.{number}", store)
            store_of_run.set_timeout(timedelta(seconds=timeout))
            dist.init_process_group(
                backends,
                store=PrefixStore("group", store_of_run),
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timedelta(seconds=timeout),
            )
            outcomes.append(PrefixStore("xlcli", store_of_run))
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=connect, name="connect", daemon=True)
    thread.start()
    thread.join(limit + LATE_SECONDS)
    outcome = outcomes[0] if outcomes else None
    is_alone = isinstance(outcome, RuntimeError) and (is_lost(outcome) or is_timeout(outcome))
    if outcome is None or is_alone:
        message = f"rank {ranks.rank} of {ranks.size} could not connect with all others in {limit:g} seconds."
        raise LostRankError(message, f"Check that all of them run. {remedy}") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@cache
def _rendezvous(rank: int, size: int, seconds: float) -> Any:
    """The store that all ranks reach, which this process keeps until it ends: others may already begin the next run."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    file = os.environ.get(STORE)
    if file:
        return FileStore(file, size)
    return next(rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))[0]


def is_lost(error: RuntimeError) -> bool:
    """True if an error means that another rank has ended or does not answer."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return "gloo/" in str(error) or "pair closure" in str(error)


def is_timeout(error: RuntimeError) -> bool:
    """True if another rank does not answer although it may still run.

    A refused connection is the end of a rank after it has published its address; gloo says "timed out connecting" too.
    """
    text = str(error)
    return re.search(r"time ?out|timed out", text, re.IGNORECASE) is not None and "Connection refused" not in text


def is_divided(tensor: Tensor) -> bool:
    """True if each rank has a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Part of this rank, which shares memory with the tensor; may be empty."""
    if not is_divided(tensor):
        return tensor
    return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """The tensor on every rank. All ranks must call it."""
    if not is_divided(tensor):
        return tensor
    return tensor.detach().full_tensor()  # type: ignore[attr-defined, no-any-return]


def divided(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, divided as `like`; without communication."""
    if not is_divided(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
