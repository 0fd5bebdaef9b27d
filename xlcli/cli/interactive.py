"""`xlcli generate -i`: a conversation in which each line is continued and the memory is kept."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlcli.cli.prompts import Samples
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stopped, handling
from xlcli.config import GenerateConfig
from xlcli.errors import DataError

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState

PROMPT = "> "
LONGEST_LINE = 2**20  # maximum number of bytes of a line of standard input


@dataclass
class Conversation:
    """Continues lines, one after the other, each after all that was read and generated before."""

    model: LoadedModel
    settings: GenerateConfig
    runtime: Runtime
    screen: Screen
    seed: int | None  # of the first answer; the others continue its generator
    session: SessionState | None

    def run(self, first: bytes | None, save: SaveState | None) -> int:
        """Continues `first` and the lines of standard input until it ends; returns the exit code.

        On a terminal, SIGINT stops the answer or clears the line; else it ends the conversation, as SIGTERM and SIGHUP
        do. `save` gets the session. `DataError` if standard input is closed, or a line is longer than `LONGEST_LINE`.
        """
        if sys.stdin is None:
            raise DataError("standard input is closed.", "Give the prompt as an argument, without -i.")
        with suppress(ImportError):  # editing and history of lines, where Python has readline
            import readline

            readline.set_completer(lambda text, state: None)
        if sys.stdin.isatty():
            self.screen.say("Type text to continue; an empty line goes on. Ctrl-C stops, Ctrl-D ends.")
        try:
            with handling(_end_conversation, (signal.SIGTERM, signal.SIGHUP)):
                line = _read_line(self.screen) if first is None else first
                while line is not None:
                    self.answer(line)
                    line = _read_line(self.screen)
        except Stopped as stopped:
            return stopped.exit_code
        except KeyboardInterrupt:  # between two turns
            return 128 + signal.SIGINT
        finally:
            if save is not None and self.session is not None:
                save(self.session)
        return 0

    def answer(self, line: bytes) -> None:
        """Prints a continuation of the text so far and a line, or of the text; `Stopped` if a signal ends it all."""
        from xlcli.generation import generate

        screen = self.screen
        if line and not self._at_line_start():  # an empty one continues the text so far
            line = b"\n" + line
        with screen.stop(announced=True) as stop:
            arguments: dict[str, Any] = {"seed": self.seed, "resume": self.session, "save": self._keep, "stop": stop}
            events = generate(self.model, line, self.settings, self.runtime, **arguments)
            screen.drive(events, Samples(screen, b"", several=False))
            is_in_pipe = not (screen.json or screen.on_terminal)
            if is_in_pipe and not self._at_line_start():
                screen.write(b"\n")
        self.seed = None
        ends_answer_only = sys.stdin.isatty() and stop.signal == signal.SIGINT
        if stop() and not ends_answer_only:
            raise Stopped(stop.exit_code)

    def _keep(self, session: SessionState) -> None:
        self.session = session

    def _at_line_start(self) -> bool:
        """True if the text so far is empty or ends with a line end."""
        session = self.session
        if session is None:
            return True
        end = session.pending.data or self.model.tokenizer.decode([session.last_token])
        return end.endswith(b"\n")


def _read_line(screen: Screen) -> bytes | None:
    """The next line without its end; None at the end of standard input. A prompt never goes into a file of answers."""
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline(LONGEST_LINE + 1)
        if len(data) > LONGEST_LINE:
            raise DataError(
                f"a line of standard input has more than {LONGEST_LINE >> 20} MiB.",
                "Divide it, or give all of it as one prompt: xlcli generate - < FILE",
            )
        if not data:
            return None
        return data.rstrip(b"\r\n")
    with redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):
        while True:
            try:
                return os.fsencode(input(PROMPT))
            except (EOFError, KeyboardInterrupt) as end:
                sys.stdout.write("\n")
                sys.stdout.flush()
                if isinstance(end, EOFError):
                    return None
            except UnicodeDecodeError:
                screen.say("that line is not UTF-8 and was not read", "warning")


def _end_conversation(number: int, _: object) -> None:
    raise Stopped(128 + number)
