"""Standard input of this process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def standard_input(source: bytes | Path | int) -> Iterator[None]:
    """Makes these bytes, a file, or an open descriptor standard input."""
    with contextlib.ExitStack() as files:
        if isinstance(source, bytes):
            file = files.enter_context(tempfile.TemporaryFile())
            file.write(source)
            file.seek(0)
            source = file.fileno()
        elif isinstance(source, Path):
            source = files.enter_context(source.open("rb")).fileno()
        saved = os.dup(0)
        os.dup2(source, 0)
        try:
            yield
        finally:
            os.dup2(saved, 0)
            os.close(saved)
