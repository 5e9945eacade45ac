"""Why a training on Ray ends, or continues with other workers."""

from __future__ import annotations


class TrainFunctionError(RuntimeError):
    """The training function raised an error on a worker; the message is its traceback."""


class MaxFailuresExceededError(RuntimeError):
    """Workers were lost again and again, and no backup got further in between."""


class LeavingError(RuntimeError):
    """All workers have stopped at the same step and saved, because a machine leaves."""
