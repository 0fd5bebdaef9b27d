"""The whole program as a function: turns every error into one sentence and an exit code.

Exit codes: 0 done, 1 bug, 2 usage or configuration, 3 input refused, 4 out of disk or RAM, or another rank fails,
5 folder in use, 6 diverged, 128 + n stopped by signal n (141: the reader of stdout closed it).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence

SPINS, SPINS_BESIDE_OTHERS = "10000", "1000"
"""Number of times that a thread of OpenMP looks for the others before it sleeps: 10,000 take under half a millisecond.
More win nothing on an idle machine. Beside other processes each one is lost to the thread that is waited for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    quits = signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # set by `xlcli.__main__`
    debug = "--debug" in arguments or os.environ.get("XLCLI_DEBUG", "0") not in ("", "0")
    try:
        _ensure_standard_streams()
        _prepare(debug=debug)
        from xlcli.cli.app import run

        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # ends by SIGPIPE, as Unix tools do, which Python ignores by default
        discard_stdout()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        _silence_stdout()
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty():
                sys.stderr.write("\n")  # after the ^C that the terminal has shown
                sys.stderr.flush()
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _report(error)
    finally:
        if quits:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the end of the interpreter


def _prepare(*, debug: bool) -> None:
    """Watches the launcher, hides warnings of libraries, and sets how long threads of OpenMP spin."""
    for name in ("COLUMNS", "LINES"):
        if len(os.environ.get(name, "")) > 5:  # rich takes any number of digits for a width
            del os.environ[name]
    if "XLCLI_LAUNCHER" in os.environ and "XLCLI_RANK_STORE" in os.environ:
        from xlcli.cli.signals import end_with_launcher

        end_with_launcher()
    if not (debug or sys.warnoptions):
        import warnings

        warnings.simplefilter("ignore")
    from xlcli.machine import is_contended

    was_contended = is_contended()
    import xlcli.cli.app  # noqa: F401 - takes time, after which a moment of contention is over

    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():  # read when torch is loaded
        os.environ["GOMP_SPINCOUNT"] = SPINS
        if was_contended and is_contended():
            os.environ["GOMP_SPINCOUNT"] = SPINS_BESIDE_OTHERS


def _report(error: Exception) -> int:
    """Prints an error and returns its exit code."""
    from xlcli.errors import LostRankError, RankError

    if isinstance(error, LostRankError) and "XLCLI_LAUNCHER" in os.environ:
        from xlcli.cli.launch import LOST

        os._exit(LOST)  # the launcher reports it
    code, message, remedy = _explain(error)
    _silence_stdout()
    if not getattr(error, "is_of_first_rank", False):
        if "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0":
            message = f"rank {os.environ['RANK']}: {message}"
        _print_error(message, remedy)
    if isinstance(error, RankError):
        os._exit(code)  # threads that wait for the lost process may abort the interpreter at its end
    return code


def _explain(error: Exception) -> tuple[int, str, str]:
    """Exit code, message and remedy of an error."""
    from xlcli.errors import XLError
    from xlcli.files import CLOSE_FILES, DISK_REMEDIES, TOO_MANY_FILES

    if isinstance(error, XLError):
        return error.exit_code, error.message, error.remedy
    detail = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")
    on_gpu = type(error).__name__ == "OutOfMemoryError"  # of torch, which is not imported for this
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if on_gpu or on_cpu or isinstance(error, MemoryError):
        memory = "GPU memory" if on_gpu else "RAM"
        remedy = "Use a smaller model, --mem-len, --batch-size or --segment-len (not every command has all)."
        return 4, f"out of {memory}: {detail}.", remedy
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return 4, "no more threads can be started.", "Close other programs, or raise the limit: ulimit -u."
    if isinstance(error, OSError) and error.errno is not None:
        where = "" if error.filename is None else f"{error.filename}: "
        if error.errno in TOO_MANY_FILES:
            return 4, f"{where}{error.strerror}.", CLOSE_FILES
        if error.errno in (*DISK_REMEDIES, errno.EROFS):
            remedy = DISK_REMEDIES.get(error.errno, "Write elsewhere.")
            return 4, f"cannot write: {where}{error.strerror}.", remedy
        if error.errno == errno.ENOENT and not where:  # of os.getcwd
            return 3, "the working folder was removed.", "Change to another folder with cd."
        return 3, f"{where}{error.strerror}.", "Check that path."
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{os.path.basename(frame.filename)}:{frame.lineno}"  # noqa: PTH119
    return 1, f"this is a bug: {detail} at {at}.", "Add --debug and report its output."


def discard_stdout() -> None:
    """Redirects stdout to the null device, after its reader has closed it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _print_error(message: str, remedy: str) -> None:
    from xlcli.cli.terminal import columns, wrapped
    from xlcli.markup import visible

    text = visible("xlcli: " + message.replace("\n", "\\n")) + "\n"
    if remedy:
        text += visible("       " + remedy.replace("\n", "\\n")) + "\n"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(wrapped(text, columns(sys.stderr)))
        sys.stderr.flush()


def _ensure_standard_streams() -> None:
    """Opens closed standard streams, or a data file would be descriptor 1; stdout as a pipe without a reader."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            if descriptor == 1:
                _, writer = os.pipe()  # the reading end is descriptor 1, the lowest free one: dup2 closes it
                os.dup2(writer, 1)
                os.close(writer)
            else:
                os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _silence_stdout() -> None:
    """Flushes stdout, or discards its buffer so that the last flush of the interpreter succeeds."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard_stdout()
