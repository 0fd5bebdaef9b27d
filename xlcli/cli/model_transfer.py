"""Models sent to and fetched from remote locations, for `xlcli models push` and `xlcli models pull`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.cli import json_objects, quantities
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen


def push(name: str, url: str, screen: Screen, *, with_text: bool, force: bool) -> None:
    """Sends a model to a folder or URL."""
    from xlcli.store import remote
    from xlcli.store.discover import find

    folder = find(name)
    with screen:
        screen.wait("sending")
        sent = remote.push(folder, url, with_text=with_text, force=force)
    shown = remote.without_user(url)
    if screen.json:
        screen.object({"model": folder, "url": shown, "files": sent})
    text = "" if with_text else ", without its held-out text (--with-text sends it, too)"
    screen.say(f"{folder.name} sent to {shown}{text}")


def pull(url: str, name: str | None, screen: Screen) -> None:
    """Fetches a model into `./models`, by default under the last part of the URL."""
    from xlcli.store import remote
    from xlcli.store.discover import LOCAL, summarize

    if not name:
        shown = remote.without_user(url)
        name = shown.rstrip("/").rpartition("/")[2]
        if not name or name.startswith(".") or ":" in name:
            raise ConfigError(f"'{shown}' ends with no name for a model.", "Type xlcli models pull URL NAME.")
    target = Path(LOCAL) / name if Path(name).name == name else Path(name)
    with screen:
        screen.wait("fetching")
        remote.pull(url, target)
    made = summarize(target)
    if screen.json:
        screen.object(json_objects.fields(made))
    screen.say(f"{target} fetched, {quantities.size(made.bytes)}; score a text: xlcli eval -m {target} FILE")
