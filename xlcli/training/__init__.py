"""Training: from text to a model folder; a run can be resumed at every step.

`workflow` has the generators `train` and `resume`, `prepare` turns text into tokens, `defaults` fills in what the
configuration leaves open, `run` is a run in memory and takes steps, `loop` decides between steps what is due,
`checkpoint` saves and restores a run, `memory` estimates memory, `final` evaluates the result.
"""

from xlcli.training.workflow import resume, train

__all__ = ["resume", "train"]
