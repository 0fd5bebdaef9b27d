"""What some systems lack: the tests that need it are skipped there, and say so by its name."""

from pathlib import Path

import pytest


def needs(path: str) -> pytest.MarkDecorator:
    """Mark of a test that needs this file of the system; macOS has no `/proc` and no `/dev/full`."""
    return pytest.mark.skipif(not Path(path).exists(), reason=f"this system has no {path}")
