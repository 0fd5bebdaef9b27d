"""System calls that fail, or kill the process, at the K-th one made."""

import builtins
import io
import os
from collections.abc import Callable

CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "fchmod", "scandir", "listdir")


class Faults:
    """Counts calls that touch the disk; `strike` runs in place of the `at`-th, and with `lasting` of all later ones."""

    def __init__(self, at: int, strike: Callable[[], None], lasting: bool = False) -> None:
        self.at, self.strike, self.lasting = at, strike, lasting
        self.count = 0

    def install(self, replace: Callable[[object, str, object], None]) -> None:
        for name in CALLS:
            replace(os, name, self._wrapped(getattr(os, name)))
        opened = self._wrapped(io.open)
        replace(io, "open", opened)
        replace(builtins, "open", opened)

    def _wrapped(self, call):
        def counted(*args, **kwargs):
            self.count += 1
            if self.count == self.at or (self.lasting and self.count > self.at):
                self.strike()
            return call(*args, **kwargs)

        return counted
