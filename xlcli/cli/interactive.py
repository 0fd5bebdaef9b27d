"""`xlcli generate -i`: a conversation in which each line is continued and the memory is kept."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING

from xlcli.cli.prompts import show
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
LONGEST_LINE = 2**20
"""Maximum number of bytes of a line of standard input."""


def converse(
    model: LoadedModel,
    settings: GenerateConfig,
    runtime: Runtime,
    screen: Screen,
    *,
    first: bytes | None,
    seed: int | None,
    resume: SessionState | None,
    save: SaveState | None,
) -> int:
    """Continues `first` and the lines of standard input until it ends; saves the session; returns the exit code.

    A line that is no continuation of the last one begins a new line of the text; an empty line continues the text as it
    is. On a terminal, SIGINT stops the answer, or clears the line being typed; without one it ends the conversation, as
    SIGTERM and SIGHUP always do.

    `seed` is for the first answer; the others continue its generator. `save` is called at the end with the session, if
    there is one.

    Raises:
        DataError: Standard input is closed, or has a line of more than `LONGEST_LINE` bytes.
    """
    from xlcli.generation import generate

    session = resume

    def keep(made: SessionState) -> None:
        nonlocal session
        session = made

    def at_line_start() -> bool:
        """True if the text so far is empty or ends with a line end."""
        return session is None or (session.pending.data or model.tokenizer.decode([session.last_token])).endswith(b"\n")

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
        with handling(_end, (signal.SIGTERM, signal.SIGHUP)):
            line = _read_line(screen) if first is None else first
            while line is not None:
                with screen.stop(announced=True) as stop:
                    prompt = line if at_line_start() or not line else b"\n" + line
                    events = generate(model, prompt, settings, runtime, seed=seed, resume=session, save=keep, stop=stop)
                    show(events, screen, prompt=b"", several=False)
                    if not (screen.json or screen.on_terminal or at_line_start()):
                        screen.write(b"\n")
                seed = None
                if stop() and not (on_keyboard and stop.signal == signal.SIGINT):
                    raise Stopped(stop.exit_code)
                line = _read_line(screen)
    except Stopped as stopped:
        exit_code = stopped.exit_code
    except KeyboardInterrupt:  # between two turns
        exit_code = 128 + signal.SIGINT
    finally:
        if save is not None and session is not None:
            save(session)
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
            except (EOFError, KeyboardInterrupt) as end:
                sys.stdout.write("\n")
                sys.stdout.flush()
                if isinstance(end, EOFError):
                    return None
            except UnicodeDecodeError:
                screen.say("that line is not UTF-8 and was not read", "warning")


def _end(number: int, _: object) -> None:
    """Handler of a signal that ends the conversation."""
    raise Stopped(128 + number)
