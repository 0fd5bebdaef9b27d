"""Training: from text to a model folder; a run can be resumed at every step.

`workflow` has the generators `train` and `resume`, `prepare` turns text into tokens, `defaults` fills in settings that
are not set, `memory` estimates memory. A run is three values: a model with its optimizers that takes steps (`run`), its
data (`prepare.Prepared`) and its folder (`folder`). `loop` trains, validates and saves it, `checkpoint` writes and
reads checkpoints, `validation` scores it.
"""

from xlcli.training.workflow import resume, train

__all__ = ["resume", "train"]
