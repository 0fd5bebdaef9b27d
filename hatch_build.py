"""Build hook of hatchling: manual pages in a wheel, made from the help of the commands."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):
    """Adds the manual pages to `share/man/man1`, except to an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the pages and lists them in `build_data`."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from xlcli.cli.man import write_pages

        self._folder = TemporaryDirectory()
        for path in write_pages(Path(self._folder.name)):
            build_data["shared_data"][str(path)] = f"share/man/man1/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the pages once they are in the wheel."""
        if version != "editable":
            self._folder.cleanup()
