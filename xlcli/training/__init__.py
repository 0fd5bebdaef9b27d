"""Training: from text to a model folder, resumable at every step.

`plan` decides what was left open, `prepare` turns text into tokens, `run` holds one run's state and takes steps,
`checkpoint` puts it on disk and back, `course` is the loop, `ending` the final score, and `workflow` the generator that
a command renders.
"""

from xlcli.training.workflow import train

__all__ = ["train"]
