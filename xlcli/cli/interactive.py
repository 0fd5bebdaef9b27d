"""`xlcli generate -i`: a conversation in which each line is continued and the memory is kept."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import TYPE_CHECKING

from xlcli.cli.prompts import show
from xlcli.cli.signals import Stop, Stopped
from xlcli.errors import DataError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import GenerateConfig
    from xlcli.events import Generated, GeneratedText, Notice
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState

PROMPT = "> "
LONGEST_LINE = 2**20
"""Maximum number of bytes of a line of standard input."""


class Conversation:
    """Turns of generation in one text. A line that is no continuation of the last one begins a new line of the text.

    Attributes:
        session: Session after the last turn; None before the first one.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: GenerateConfig,
        runtime: Runtime,
        *,
        seed: int | None,
        resume: SessionState | None,
    ) -> None:
        self.session = resume
        self._model, self._settings, self._runtime = model, settings, runtime
        self._seed = seed

    @property
    def at_line_start(self) -> bool:
        """Whether the text so far is empty or ends with a line end."""
        if self.session is None:
            return True
        last = self.session.pending.data or self._model.tokenizer.decode([self.session.last_token])
        return last.endswith(b"\n")

    def answer(self, line: bytes, stop: Stop) -> Iterator[GeneratedText | Generated | Notice]:
        """Events of the continuation of the text and `line`; an empty line continues the text as it is."""
        from xlcli import generation

        def keep(session: SessionState) -> None:
            self.session = session

        prompt = line if self.at_line_start or not line else b"\n" + line
        yield from generation.generate(
            self._model,
            prompt,
            self._settings,
            self._runtime,
            seed=self._seed,
            resume=self.session,
            save=keep,
            stop=stop,
        )
        self._seed = None  # the next turn continues the generator of the session


def converse(conversation: Conversation, screen: Screen, first: bytes | None, save: SaveState | None) -> int:
    """Answers `first` and the lines of standard input until it ends; saves the session; returns the exit code.

    On a terminal, SIGINT stops the answer, or clears the line being typed; without one it ends the conversation, as
    SIGTERM and SIGHUP always do.

    Raises:
        DataError: Standard input is closed, or has a line of more than `LONGEST_LINE` bytes.
    """
    if sys.stdin is None:
        raise DataError("standard input is closed.", "Give the prompt as an argument, without -i.")
    with suppress(ImportError):  # editing and history of lines, where Python has readline
        import readline

        readline.set_completer(lambda text, state: None)
    on_keyboard = sys.stdin.isatty()
    if on_keyboard:
        screen.say("Type text to continue; an empty line goes on. Ctrl-C stops, Ctrl-D ends.")
    exit_code = 0
    try:
        with _ending_signals():
            line = _read_line(screen) if first is None else first
            while line is not None:
                with Stop() as stop, screen.until(stop, announced=True):
                    show(conversation.answer(line, stop), screen, prompt=b"", several=False)
                    if not (screen.json or screen.on_terminal or conversation.at_line_start):
                        screen.write(b"\n")
                screen.until(None)
                if stop() and not (on_keyboard and stop.signal == signal.SIGINT):
                    raise Stopped(stop.exit_code)
                line = _read_line(screen)
    except Stopped as stopped:
        exit_code = stopped.exit_code
    except KeyboardInterrupt:  # between two turns
        exit_code = 128 + signal.SIGINT
    finally:
        if save is not None and conversation.session is not None:
            save(conversation.session)
    return exit_code


def _read_line(screen: Screen) -> bytes | None:
    """The next line without its end; None at the end of standard input. A prompt never goes into a file of answers."""
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline(LONGEST_LINE + 1)
        if len(data) > LONGEST_LINE:
            raise DataError(
                f"a line of standard input has more than {LONGEST_LINE >> 20} MiB.",
                "Divide it, or give all of it as one prompt: xlcli generate - < FILE",
            )
        return data.rstrip(b"\r\n") if data else None
    with redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):
        while True:
            try:
                return os.fsencode(input(PROMPT))
            except EOFError:
                sys.stdout.write("\n")
                sys.stdout.flush()
                return None
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                sys.stdout.flush()
            except UnicodeDecodeError:
                screen.say("that line is not UTF-8 and was not read", "warning")


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `Stopped`, unless they are ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
