"""Training: from text to a model folder; a run can be resumed at every step.

`workflow` has the generators `train` and `resume`, `prepare` turns text into tokens, `defaults` fills in settings that
are not set, `run` is the run with its loop, its training step and its folder, `checkpoint` saves and restores a run,
`memory` estimates memory, `validation` scores the run.
"""

from xlcli.training.workflow import resume, train

__all__ = ["resume", "train"]
