"""Files of compiled kernels, in the folder `kernels` of the cache, or in `NUMBA_CACHE_DIR`.

Numba's own cache reads files that other users can write, executes damaged ones, may read the kernel of another process
if two compile at once, and does not show whether a kernel is in it. Here each combination of types of arguments has one
file, a pickle behind a checksum; what does not match its checksum is not loaded, but compiled and written again.

A process that compiles a parallel kernel runs other machine code, with other last bits, than one that reads it from a
file: in the first, the linker finds the body of the loop as it was before it was optimized with the kernel. So another
process compiles, which a signal may end, and every process reads the same file. That process also keeps each part of a
kernel as soon as it is compiled (`keep_parts`), so that the next one goes on there; the machine code is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle  # noqa: TID251
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xlcli.errors import XLError
from xlcli.files import check_writable, code_folder, read_checked, write_checked
from xlcli.kernels.compiler import CompileResult, dumps, llvmlite, numba

MOST_BYTES = 2**22  # bytes that a kernel and its parts need on the disk at most: the largest take 3 MB


class KernelFiles:
    """Cache of a compiled function; Numba calls `load_overload` and `save_overload`.

    Args:
        kernel: Function as `njit` returns it, which then uses the cache. It is compiled again when a Python file of its
            folder changes.
        program: Python program that compiles the kernel for a signature and writes its file, in another process; None
            compiles in this one.
        constants: Other Python files whose constants the kernel contains.

    Raises:
        ConfigError: Others can write the folder.
        ResourceError: The folder cannot be written.
        RuntimeError: Numba does not compile (`NUMBA_DISABLE_JIT`).
    """

    def __init__(self, kernel: Any, program: Callable[[Any], str] | None = None, constants: Sequence[str] = ()) -> None:
        if not hasattr(kernel, "py_func"):
            raise RuntimeError("Numba does not compile")
        self.kernel = kernel
        self.problem: str | None = None  # why the kernel that was compiled last could not be saved, if so
        self.program = program
        self.constants = constants
        self.cache_path = code_folder("kernels", "NUMBA_CACHE_DIR")
        folder = Path(kernel.py_func.__code__.co_filename).parent
        sources = [*sorted(folder.glob("*.py")), *map(Path, constants)]
        self._sources = [hashlib.sha256(source.read_bytes()).digest() for source in sources]
        kernel._cache = self

    def has(self, *arguments: Any) -> bool:
        """True if the kernel is compiled for arguments of these types, in this process or in a file."""
        signature = tuple(map(numba.typeof, arguments))
        return signature in self.kernel.overloads or self._read(signature, self.kernel.targetctx) is not None

    def compile(self, *arguments: Any, stop: Callable[[], bool]) -> str | None:
        """Compiles the kernel for arguments of these types, unless `stop` becomes true. Returns `problem`."""
        self.problem = None
        signature = tuple(map(numba.typeof, arguments))
        if self._read(signature, self.kernel.targetctx) is None:
            self._compile_apart(signature, stop)
            if self._read(signature, self.kernel.targetctx) is None:
                self.program = None  # nothing can be kept
        if not stop():
            self.kernel.compile(signature)
        return self.problem

    def compile_here(self, *arguments: Any) -> None:
        """Compiles the kernel and its parts in this process and writes their files: for `program`."""
        self.program = None
        keep_parts(self.constants)
        self.compile(*arguments, stop=lambda: False)

    def _compile_apart(self, signature: Any, stop: Callable[[], bool] = lambda: False) -> None:
        """Another process compiles the kernel and writes its file, if that can be written; `stop` ends it."""
        if self.program is None:
            return
        with contextlib.suppress(OSError, XLError):
            check_writable(self._path(signature, self.kernel.targetctx), MOST_BYTES)
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-c", self.program(signature)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the process that waits
            )
            try:
                while process.poll() is None and not stop():
                    time.sleep(0.05)
            finally:
                process.kill()
                process.wait()

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The kernel for arguments of these types; None if no file has it: then this process compiles it."""
        target.refresh()
        data = self._read(signature, target)
        if data is None:
            self._compile_apart(signature)
            data = self._read(signature, target)
        return None if data is None else CompileResult._rebuild(target, *data)  # type: ignore[no-untyped-call]

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Writes the file of a kernel, or sets `problem`."""
        if compiled.library.has_dynamic_globals:  # addresses of this process
            return
        try:
            data = dumps(compiled._reduce())  # type: ignore[no-untyped-call]
            write_checked(self._path(signature, compiled.target_context), data)
        except XLError as error:
            self.problem = error.message.rstrip(".")

    def _read(self, signature: Any, target: Any) -> Any:
        """Content of the file of a kernel; None if it is missing or damaged."""
        data = read_checked(self._path(signature, target))
        return None if data is None else pickle.loads(data)  # noqa: S301

    def _path(self, signature: Any, target: Any) -> Path:
        """File of a kernel, named after everything on which it depends."""
        versions = sys.version, numba.__version__, llvmlite.__version__, np.__version__
        function = self.kernel.py_func.__module__
        parts = *versions, function, self._sources, target.codegen().magic_tuple(), *map(str, signature)
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return self.cache_path / f"{self.kernel.py_func.__name__}.{name}.kernel"


def keep_parts(constants: Sequence[str] = ()) -> None:
    """Each compiled function of this package gets a file of its own; this process compiles those that are missing."""
    for name in [name for name in sys.modules if name.startswith(f"{__package__}.")]:
        for each in vars(sys.modules[name]).values():
            if hasattr(each, "overloads"):
                KernelFiles(each, constants=constants)
