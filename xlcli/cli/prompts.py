"""Prompts of `xlcli generate`, one text or many in a file of JSON lines, and what is printed of their continuations."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.cli.objects import generated_object
from xlcli.cli.outputs import Sink
from xlcli.cli.pipe import label, open_source, portions
from xlcli.cli.quantities import approximate_count, compact_number
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop, Stopped
from xlcli.errors import DataError
from xlcli.events import Generated, GeneratedText, ProgressMeter

if TYPE_CHECKING:
    from xlcli.text.documents import Rows

MAX_PROMPT = 2**26  # maximum length of a prompt in bytes
MAX_BYTES = 2**28  # maximum size of a file of prompts
_EXAMPLE = 'Write each line as {"prompt": "Once upon a"}.'

Prompt = tuple[bytes, dict[str, Any]]  # text of a prompt, and the table with its `id`, empty without one


def read_prompt(words: Sequence[str] | None, stop: Stop, screen: Screen) -> bytes:
    """The prompt as bytes, with LF for CR LF: the argument, standard input for `-`, or no bytes."""
    data = os.fsencode(words[0]) if words else b""
    if data == b"-":
        remedy = "Read a long text first: xlcli stream --state FILE, then xlcli generate --state FILE."
        data = _read_all(0, stop, "the prompt", MAX_PROMPT, remedy)
    return _with_lf([data], screen)[0]


def note_file_as_prompt(words: Sequence[str], screen: Screen) -> None:
    """Says that a prompt is the name of a file, which is continued in place of the text in the file."""
    if words and Path(words[0]).is_file():
        name = words[0]
        screen.say(f"continuing the words '{name}'; to continue the file: xlcli generate - < {shlex.quote(name)}")


def read_prompts(name: str, stop: Stop, screen: Screen) -> list[Prompt]:
    """The prompts of a file of rows, or of standard input for `-`; `DataError` if a row is no prompt."""
    from xlcli.text.formats import text_of

    shown, source = label(name), open_source(name)
    data = iter([_read_all(source, stop, shown)])
    warn = partial(screen.say, level="warning")
    rows: Any = text_of(data, shown, ["prompt"], source, notice=warn, read=_prompts)
    prompts: list[Prompt] = [row for row in rows if row]
    texts = _with_lf([text for text, _ in prompts], screen)
    return [(text, table_of_id) for text, (_, table_of_id) in zip(texts, prompts, strict=True)]


def _with_lf(texts: Iterable[bytes], screen: Screen) -> list[bytes]:
    """Texts with LF for CR LF, of which the user is told."""
    from xlcli.text.formats import CRLF_NOTICE, LineEnds

    line_ends = LineEnds()
    texts_with_lf = [line_ends.feed(text, final=True) for text in texts]
    if line_ends.replaced:
        screen.say(CRLF_NOTICE)
    return texts_with_lf


def _read_all(source: int, stop: Stop, name: str, limit: int = MAX_BYTES, remedy: str = "Divide it.") -> bytes:
    """All bytes of a descriptor. `DataError` if they are more than the limit; `Stopped` after a signal."""
    data = bytearray()
    for part in portions(source, stop, None):
        data += part or b""
        if len(data) > limit:
            raise DataError(f"{name} is longer than {limit >> 20} MiB.", remedy)
    if stop():
        raise Stopped(stop.exit_code)
    return bytes(data)


def _prompts(rows: Rows, name: str, _fields: Sequence[str], _notice: object) -> Iterator[Prompt]:
    """The prompts of rows; raises `DataError` for a row with anything else, and if they are too long together."""
    n_bytes = 0
    for place, row in filter(None, rows):
        where = f"{place} of {name}"
        if isinstance(row, ValueError):
            raise DataError(f"{where} is not JSON that can be read.", _EXAMPLE)
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(f"{where} has no text in 'prompt'.", _EXAMPLE)
        unknown = sorted(row.keys() - {"prompt", "id"})
        if unknown:
            raise DataError(f"{where} has the unknown key '{unknown[0]}'.", "The keys are prompt and id.")
        if isinstance(row.get("id"), list | dict):
            raise DataError(f"the id in {where} is a list or an object.", "Write a string or a number.")
        try:
            json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
        except ValueError:
            raise DataError(f"{where} has a number or a character that JSON cannot have.", _EXAMPLE) from None
        n_bytes += len(row["prompt"])
        if n_bytes > MAX_BYTES:
            raise DataError(f"the prompts of {name} are longer than {MAX_BYTES >> 20} MiB.", "Divide it.")
        yield row["prompt"].encode(), {"id": row["id"]} if "id" in row else {}


class Samples(Sink):
    """Shows text as it is generated, after its prompt, with --- between samples; or one JSON object at the end."""

    def __init__(self, screen: Screen, prompt: bytes | None, *, several: bool) -> None:
        self._screen, self._prompt, self._several = screen, prompt, several
        self._done: list[dict[str, object]] = []
        self._current: int | None = None  # the sample that is shown

    def add(self, event: GeneratedText | Generated) -> None:
        screen = self._screen
        if event.sample != self._current and not screen.json:
            if self._current is not None:
                screen.model_text(b"\n---\n")
            screen.model_text(self._prompt or b"")
        self._current = event.sample
        if isinstance(event, Generated):
            self._done.append(generated_object(event, without_prompt=self._prompt is None))
            rate = compact_number(event.tokens_per_second)
            tokens = approximate_count(event.tokens, "token")
            screen.say(f"sample {event.sample}: seed {event.seed}, {tokens}, {rate} tokens/s", "detail")
        elif not screen.json:
            screen.model_text(event.text)

    def close(self) -> None:
        if not self._screen.json:
            self._screen.model_text(b"", final=True)
        elif self._several:
            self._screen.object({"samples": self._done})
        else:
            self._screen.object(next(iter(self._done), {}))


class Results(Sink):
    """Prints a JSON object per prompt, in order; `stop_reason` says which of them a signal has interrupted."""

    def __init__(self, prompts: Sequence[Prompt], screen: Screen, *, n_samples: int, without_prompt: bool) -> None:
        self._screen, self._n_samples, self._without_prompt = screen, n_samples, without_prompt
        self._n = len(prompts)
        self._n_complete = 0
        self._ids = (table_of_id for _, table_of_id in prompts)
        self._meter = ProgressMeter("generating", self._n, "prompts")

    def add(self, event: tuple[Generated, ...]) -> None:
        """Takes the samples of the next prompt."""
        samples = [generated_object(result, without_prompt=self._without_prompt) for result in event]
        row = samples[0] if self._n_samples == 1 else {"samples": samples}
        self._screen.object(next(self._ids) | row)
        if all(result.stop_reason != "interrupted" for result in event):
            self._n_complete += 1
        for progress in self._meter.report(self._n_complete):
            self._screen.progress(progress)

    def close(self) -> None:
        if self._n_complete < self._n:
            done = f"{self._n_complete} of {self._n} prompts were continued to their end"
            self._screen.say(f"stopped: {done}", "warning")
