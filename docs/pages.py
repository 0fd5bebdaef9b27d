"""Hook of mkdocs: the pages of the site are the Markdown files of the repository, each at its own path.

So a link between two of them is the same on the site and in the repository. Other files that a page links to, such as
pictures, are copied.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1]
STYLE = SOURCE / "docs" / "site.css"
PAGES = ("*.md", "docs/**/*.md", "models/README.md", "models/books/README.md", "benchmarks/log/*.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by pages of the whole repository and what they link to."""
    pages = {path for pattern in PAGES for path in SOURCE.glob(pattern)}
    linked = {target for page in pages for target in targets(page)}
    of_theme = [file for file in files if not file.abs_src_path.startswith(f"{SOURCE / 'docs'}/")]
    ours = [
        File.generated(config, path.relative_to(SOURCE).as_posix(), abs_src_path=str(path))
        for path in sorted({*pages, *linked, STYLE})
    ]
    return Files([*of_theme, *ours])


def targets(page: Path) -> set[Path]:
    """Files of the repository that a page links to or shows."""
    found = set()
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file():
            found.add(path)
    return found
