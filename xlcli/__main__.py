"""Start of the program: `python -m xlcli`, and the command `xlcli`, which imports `main` from here."""

import signal

try:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of imports, until `main` catches KeyboardInterrupt
except ValueError:  # imported in another thread than the main one, which gets no signals
    pass
except KeyboardInterrupt:
    raise SystemExit(130) from None

import sys

from xlcli.cli.entry import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
