"""Training: from text to a model folder, resumable at every step.

`plan` decides what was left open, `run` holds one run's state and takes steps, `checkpoint` puts it on disk and back,
`workflow` is the generator that a command renders.
"""

from xlcli.train.workflow import train

__all__ = ["train"]
