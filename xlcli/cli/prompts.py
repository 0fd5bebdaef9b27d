"""Prompts of `xlcli generate`, one text or many in a file of JSON lines, and what is printed of their continuations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xlcli.cli import report
from xlcli.cli.pipe import open_source, portions
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop, Stopped
from xlcli.errors import DataError
from xlcli.events import Generated, GeneratedText, Notice, ProgressMeter
from xlcli.files import parse_json

MAX_PROMPT = 2**26
"""Maximum length of a prompt in bytes."""
MAX_BYTES = 2**28
"""Maximum size of a file of prompts."""
_EXAMPLE = 'Write each as {"prompt": "Once upon a"}.'

Prompt = tuple[bytes, dict[str, Any]]
"""A line of the file: the text of the prompt, and the table with its `id`, empty without one."""


def read_prompt(words: Sequence[str] | None, stop: Stop) -> bytes:
    """The prompt as bytes: the argument, standard input for `-`, or no bytes."""
    if not words:
        return b""
    if words[0] != "-":
        return os.fsencode(words[0])
    remedy = "Read a long text first: xlcli stream --state FILE, then xlcli generate --state FILE."
    return _joined(portions(0, stop, None), stop, "the prompt", MAX_PROMPT, remedy)


def read_prompts(name: str, stop: Stop) -> list[Prompt]:
    """The prompts of a file, which may be compressed or in UTF-16 or UTF-32, or of standard input for `-`.

    Raises:
        DataError: A line is no prompt, or the file cannot be read.
    """
    from xlcli.text.formats import in_utf8, unpacked

    label = "standard input" if name == "-" else name
    data = _joined(portions(open_source(name), stop, None), stop, label)
    return list(_parsed(_joined(in_utf8(unpacked(iter([data]), label), label), stop, label), label))


def _joined(
    parts: Iterable[bytes | None], stop: Stop, label: str, limit: int = MAX_BYTES, remedy: str = "Divide it."
) -> bytes:
    data = bytearray()
    for part in parts:
        data += part or b""
        if len(data) > limit:
            raise DataError(f"{label} is longer than {limit >> 20} MiB.", remedy)
    if stop():
        raise Stopped(stop.exit_code)
    return bytes(data)


def _parsed(data: bytes, label: str) -> Iterator[Prompt]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number} of {label}"
        try:
            value = parse_json(line)
        except ValueError:
            raise DataError(f"{place} is not JSON that can be read.", _EXAMPLE) from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise DataError(f"{place} has no text in 'prompt'.", _EXAMPLE)
        if unknown := sorted(value.keys() - {"prompt", "id"}):
            raise DataError(f"{place} has the unknown key '{unknown[0]}'.", "The keys are prompt and id.")
        if isinstance(value.get("id"), list | dict):
            raise DataError(f"the id in {place} is a list or an object.", "Write a string or a number.")
        yield value["prompt"].encode(), {"id": value["id"]} if "id" in value else {}


def show(events: Iterable[GeneratedText | Generated | Notice], screen: Screen, *, prompt: bytes, several: bool) -> None:
    """Shows text as it is generated, with a line `---` between samples; or one JSON object at the end."""
    done: list[dict[str, object]] = []
    current = -1
    for event in events:
        if screen.shows(event):
            continue
        if event.sample != current and not screen.json:
            screen.model_text((b"\n---\n" if current >= 0 else b"") + prompt)
        current = event.sample
        if isinstance(event, Generated):
            done.append(report.generated_object(event))
            rate = report.amount(event.tokens_per_second)
            tokens = report.counted(event.tokens, "token")
            screen.say(f"sample {event.sample}: seed {event.seed}, {tokens}, {rate} tokens/s", "detail")
        elif not screen.json:
            screen.model_text(event.text)
    if screen.json:
        screen.object({"samples": done} if several else done[0] if done else {})
    else:
        screen.model_text(b"", final=True)


def show_results(
    prompts: Sequence[Prompt],
    events: Iterable[tuple[Generated, ...] | Notice],
    screen: Screen,
    *,
    n_samples: int,
    without_prompt: bool,
) -> None:
    """Prints one JSON object for each prompt, as soon as it and all before it are complete.

    After a signal, prompts at the end without any token are not printed.
    """
    meter, n_complete = ProgressMeter("generating", len(prompts), "prompts"), 0
    held: list[dict[str, Any]] = []
    names = (name for _, name in prompts)
    for event in events:
        if screen.shows(event):
            continue
        samples = [report.generated_object(result) for result in event]
        if without_prompt:
            samples = [{key: value for key, value in sample.items() if key != "prompt"} for sample in samples]
        tree = samples[0] if n_samples == 1 else {"samples": samples}
        held.append(next(names) | tree)
        is_complete = all(result.stop_reason != "interrupted" for result in event)
        if is_complete or any(result.tokens for result in event):
            for each in held:
                screen.object(each)
            held = []
        n_complete += is_complete
        for progress in meter.report(n_complete):
            screen.progress(progress)
    if n_complete < len(prompts):
        screen.say(f"stopped: {n_complete} of {len(prompts)} prompts were continued to their end", "warning")
