"""`xlcli generate --prompts`: continues the prompts of a file of JSON lines in batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlcli.cli.pipe import open_source, portions
from xlcli.cli.signals import Stop, Stopped
from xlcli.errors import DataError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.events import Generated, Notice

MAX_BYTES = 2**28
"""Maximum size of a file of prompts."""
_EXAMPLE = 'Write each as {"prompt": "Once upon a"}.'


@dataclass(frozen=True)
class NamedPrompt:
    """A line of the file: the text of the prompt, and its key `id`, a tuple of one value, if it has one."""

    text: bytes
    id: tuple[Any, ...] = ()


def read_prompts(name: str, stop: Stop) -> list[NamedPrompt]:
    """The prompts of a file, or of standard input for `-`.

    Raises:
        DataError: A line is no prompt, or the file cannot be read.
    """
    data, label = bytearray(), "standard input" if name == "-" else name
    for portion in portions(open_source(name), stop, None):
        data += portion or b""
        if len(data) > MAX_BYTES:
            raise DataError(f"{label} is longer than {MAX_BYTES >> 20} MiB.", "Divide it.")
    if stop():
        raise Stopped(stop.exit_code)
    return list(_parsed(bytes(data), label))


def _parsed(data: bytes, label: str) -> Iterator[NamedPrompt]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number} of {label}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{place} is not JSON.", _EXAMPLE) from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise DataError(f"{place} has no text in 'prompt'.", _EXAMPLE)
        if unknown := sorted(value.keys() - {"prompt", "id"}):
            raise DataError(f"{place} has the unknown key '{unknown[0]}'.", "The keys are prompt and id.")
        try:
            text = value["prompt"].encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise DataError(f"the prompt in {place} is not Unicode.", "Write characters as UTF-8.") from None
        yield NamedPrompt(text, (value["id"],) if "id" in value else ())


def show_results(
    prompts: Iterable[NamedPrompt],
    events: Iterable[tuple[Generated, ...] | Notice],
    screen: Screen,
    *,
    n_samples: int,
    without_prompt: bool,
) -> None:
    """Prints one JSON object for each prompt, as soon as it and all before it are complete."""
    from xlcli.cli import json_objects
    from xlcli.events import ProgressMeter

    prompts = list(prompts)
    meter, n_done = ProgressMeter("generating", len(prompts), "prompts"), 0
    for event in events:
        if not isinstance(event, tuple):
            screen.notice(event)
            continue
        prompt = prompts[n_done]
        samples = [json_objects.generated_object(result) for result in event]
        if without_prompt:
            samples = [{key: value for key, value in sample.items() if key != "prompt"} for sample in samples]
        tree = samples[0] if n_samples == 1 else {"samples": samples}
        screen.object({"id": prompt.id[0]} | tree if prompt.id else tree)
        n_done += 1
        for progress in meter.report(n_done):
            screen.progress(progress)
    if n_done < len(prompts):
        screen.say(f"stopped: {n_done} of {len(prompts)} prompts were continued", "warning")
