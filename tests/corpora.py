"""Corpora opened without progress."""

from xlcli.text.corpus import TEXT, gather


def drain(work):
    """Result of a generator, whose events are dropped."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def open_corpus(paths, *, reading=TEXT):
    """The text of files, folders and `-`."""
    return drain(gather(paths, input_format=reading))
