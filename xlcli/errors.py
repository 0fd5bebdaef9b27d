"""The tree of errors a user can cause or meet. The command line turns each into one sentence and an exit code.

An error says what happened (`message`) and what to type instead (`remedy`).
"""


class XLError(Exception):
    """Base of every error xlcli raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class ConfigError(XLError):
    """A usage or configuration mistake: unknown key, illegal combination, value out of range."""

    exit_code = 2


class DataError(XLError):
    """The text given cannot be used: empty, unreadable, not UTF-8 where UTF-8 is needed, changed since last time."""

    exit_code = 3


class StateError(XLError):
    """A saved memory does not belong to this model, or is damaged."""

    exit_code = 3


class CheckpointError(XLError):
    """A model folder or checkpoint is missing, damaged, mismatched or of a newer format."""

    exit_code = 3


class ResourceError(XLError):
    """Out of disk or memory."""

    exit_code = 4


class BusyError(XLError):
    """Another process is writing the same model folder."""

    exit_code = 5


class DivergedError(XLError):
    """Training met NaN or infinity; nothing non-finite was saved."""

    exit_code = 6
