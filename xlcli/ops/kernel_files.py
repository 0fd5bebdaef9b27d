"""Files of compiled kernels, in the folder that Numba chooses.

Numba's own cache fails on files that a loss of power left incomplete, may read the kernel of another process if two
compile at once, and does not show whether a kernel is in it. Here each combination of types of arguments has files of
its own, and incomplete ones are replaced.

A process that compiles a parallel kernel runs other machine code, with other last bits, than one that reads it from a
file: in the first, the linker finds the body of the loop as it was before it was optimized with the kernel. So another
process compiles, and every process reads the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import numba
from numba.core import caching

KEY = "kernel"
"""Key of the only entry of a file."""


class KernelFiles:
    """Cache of a compiled function; Numba calls `load_overload` and `save_overload`.

    Args:
        kernel: Function as `njit` returns it, which then uses the cache.
        modules: Other modules with parts of the kernel. It is compiled again when one of their files changes.
        program: Python program that compiles the kernel for a signature and writes its files, in another process; None
            compiles in this one.

    Attributes:
        problem: Reason for which a kernel that was compiled could not be saved, if any.

    Raises:
        RuntimeError: Numba finds no folder that can be written, or does not compile (`NUMBA_DISABLE_JIT`).
    """

    def __init__(
        self, kernel: Any, modules: Iterable[ModuleType] = (), program: Callable[[Any], str] | None = None
    ) -> None:
        if not hasattr(kernel, "py_func"):
            raise RuntimeError("Numba does not compile")
        self.kernel = kernel
        self.problem: str | None = None
        self.program = program
        self._caching: Any = caching
        self._format = self._caching.CompileResultCacheImpl(kernel.py_func)
        files = [Path(str(module.__file__)).stat() for module in modules]
        self._stamp = self._format.locator.get_source_stamp(), *((file.st_mtime, file.st_size) for file in files)
        kernel._cache = self

    @property
    def cache_path(self) -> str:
        """Folder of the files."""
        return str(self._format.locator.get_cache_path())

    def has(self, *arguments: Any) -> bool:
        """Whether the kernel is compiled for arguments of these types, in this process or in a file."""
        signature = tuple(map(numba.typeof, arguments))
        return signature in self.kernel.overloads or self._read(signature, self.kernel.targetctx) is not None

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The kernel for arguments of these types; None if no file has it."""
        target.refresh()
        data = self._read(signature, target)
        if data is None and self.program is not None:
            _run(self.program(signature))
            data = self._read(signature, target)
        return None if data is None else self._format.rebuild(target, data)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Writes the files of a kernel, or sets `problem`."""
        if not self._format.check_cachable(compiled):  # also generates the machine code
            return
        try:
            self._format.locator.ensure_cache_path()
            files = self._files(signature, compiled.target_context)
            files.flush()
            files.save(KEY, self._format.reduce(compiled))
        except OSError as error:
            self.problem = str(error)

    def _read(self, signature: Any, target: Any) -> Any:
        """Content of the files of a kernel; None if they are missing, unreadable or incomplete."""
        try:
            return self._files(signature, target).load(KEY)
        except Exception:  # damaged files raise errors of any kind
            return None

    def _files(self, signature: Any, target: Any) -> Any:
        """Files of a kernel, named after everything on which it depends."""
        versions = numba.__version__, llvmlite.__version__
        parts = *versions, self._stamp, target.codegen().magic_tuple(), *map(str, signature)
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return self._caching.IndexDataCacheFile(self.cache_path, f"{self._format.filename_base}.{name}", self._stamp)


def _run(program: str) -> None:
    """Runs a Python program in another process. If it fails, this process compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with contextlib.suppress(OSError):
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that waits
            check=False,
        )
