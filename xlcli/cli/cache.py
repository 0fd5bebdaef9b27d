"""`xlcli cache`: lists and removes token files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlcli.cli import options, units
from xlcli.cli.group import Group
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.options import Unit
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.text.cache import CacheEntry

_HEADING = ("used", "size", "tokens", "tokenizer", "text", "file")
_FLEXIBLE = {"text": 12, "file": 13}
_OPTIONAL = ("tokenizer", "tokens", "file")
_RIGHT = ("used", "size", "tokens")
app = typer.Typer(name="cache", cls=Group, invoke_without_command=True, context_settings=CONTEXT)


@app.callback(epilog="xlcli cache\nxlcli cache prune --older-than 7d --max-size 2GiB")
def cache(
    context: typer.Context,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """List the cached tokens of your texts, or remove them.

    The cache also prunes itself when it grows. Files that a running process uses stay.
    """
    if context.invoked_subcommand is None:
        from xlcli.cli.prologue import open_screen

        _list(open_screen(context))


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli cache prune --older-than 7d --max-size 2GiB\nxlcli cache prune --all",
)
def prune(
    context: typer.Context,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="TIME",
            parser=Unit(units.age, "30d"),
            allow_from_autoenv=False,
            help="Remove files that have not been used for this time. Default: 30d.",
            rich_help_panel="Removal",
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            "--max-size",
            metavar="BYTES",
            parser=Unit(units.size, "2GiB"),
            allow_from_autoenv=False,
            help="Remove the least recently used files beyond this total. Default: 10 GB or a tenth of the free disk.",
            rich_help_panel="Removal",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", allow_from_autoenv=False, help="Remove all files.", rich_help_panel="Removal")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """Remove files by age and size.

    The cache does the same when it grows. Files that a running process uses stay.
    """
    from xlcli.cli.prologue import open_screen

    if everything and (older_than is not None or max_size is not None):
        raise ConfigError("--all removes files of any age and size.", "Leave out the other option.")
    _prune(open_screen(context), older_than, 0 if everything else max_size)


def _list(screen: Screen) -> None:
    from xlcli.cli import quantities, tables
    from xlcli.text import cache

    folder = cache.cache_folder()
    found = cache.entries(folder)
    total = cache.total_bytes(found)
    limit = cache.limit(folder, total)
    if screen.json:
        screen.object({"folder": folder, "bytes": total, "max_bytes": limit, "files": _objects(found)})
        return
    if found:
        rows = [_HEADING, *(_row(entry) for entry in reversed(found))]
        shown = tables.fitted(rows, screen.columns, flexible=_FLEXIBLE, optional=_OPTIONAL, right=_RIGHT)
        screen.print(shown + "\n")
    files = quantities.counted(len(found), "file")
    screen.print(f"{folder}: {files}, {quantities.size(total)} of at most {quantities.size(limit)}\n")


def _prune(screen: Screen, older_than: float | None, max_size: int | None) -> None:
    from xlcli.cli import quantities
    from xlcli.text import cache

    folder = cache.cache_folder()
    unused = cache.UNUSED_SECONDS if older_than is None else older_than
    removed = cache.prune(folder, max_bytes=max_size, unused_seconds=unused)
    left = cache.entries(folder)
    freed = cache.total_bytes(removed)
    if screen.json:
        screen.object({"folder": folder, "removed": _objects(removed), "bytes": freed, "files": _objects(left)})
    in_use = sum(entry.in_use for entry in left)
    used = f", {in_use} of them in use" if in_use else ""
    screen.say(
        f"{quantities.counted(len(removed), 'file')} removed, {quantities.size(freed)}; "
        f"{quantities.counted(len(left), 'file')} left, {quantities.size(cache.total_bytes(left))}{used}"
    )


def _row(entry: CacheEntry) -> tuple[str, ...]:
    from xlcli.cli import quantities
    from xlcli.text.cache import is_of_another_version

    used = "in use" if entry.in_use else quantities.age(entry.age)
    if (header := entry.header) is None:
        problem = "of another version" if is_of_another_version(entry.path) else "damaged"
        about = ("-", "-", "unfinished" if entry.unfinished else problem)
    else:
        about = (quantities.amount(header.n_tokens), header.tokenizer, header.text)
    return (used, quantities.size(entry.bytes), *about, entry.path.name)


def _objects(found: Sequence[CacheEntry]) -> list[dict[str, Any]]:
    objects = []
    for entry in found:
        header = entry.header
        objects.append(
            {
                "path": entry.path,
                "bytes": entry.bytes,
                "age_seconds": entry.age,
                "in_use": entry.in_use,
                "unfinished": entry.unfinished,
                "text": header.text if header else None,
                "text_bytes": header.n_bytes if header else None,
                "tokens": header.n_tokens if header else None,
                "tokenizer": header.tokenizer if header else None,
            }
        )
    return objects
