"""Training: from text to a model folder; a run can be resumed at every step.

`workflow` has the generators `train` and `resume` and their loop, `prepare` turns text into tokens, `defaults` fills in
settings that are not set, `run` takes training steps and keeps the folder, `checkpoint` saves and restores a run,
`memory` estimates memory, `validation` scores the run.
"""

from xlcli.training.workflow import resume, train

__all__ = ["resume", "train"]
