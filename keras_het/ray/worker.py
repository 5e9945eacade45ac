"""What runs on a worker: the training function, and what asks it to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from types import TracebackType
from typing import Any

from keras_het.fit.backup_folder import RUN
from keras_het.ray.errors import LeavingError, TrainFunctionError

_has_ended = threading.Event()


class OnWorker:
    """Context of the training function: what its errors mean to the trainer.

    Args:
        progress: the actor that knows how far backups have come.
        run: name of the run, the same for all groups of workers.
    """

    def __init__(self, progress: Any, run: str) -> None:
        self._progress, self._run = progress, run

    def __enter__(self) -> None:
        from keras_het.callbacks import elastic_backup

        os.environ[RUN] = self._run
        for name in ("tensorflow", "keras_het"):  # Ray shows whatever passes a logger
            logging.getLogger(name).setLevel(logging.WARNING)
        elastic_backup.when_saved(self._progress.note_saved.remote)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        from keras_het.strategy.cluster.arrival import PortInUseError
        from keras_het.strategy.cluster.peer_watch import WorkerLostError, may_be_a_lost_connection

        _has_ended.set()
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return True
            if error.code == 128 + signal.SIGTERM:
                raise LeavingError("all workers have saved, and stopped at the same step") from None
        # Ray chooses a free port, which another program may take before the worker does
        is_of_the_group = isinstance(error, WorkerLostError | PortInUseError)
        if error is None or is_of_the_group or may_be_a_lost_connection(error):
            return False
        lines = traceback.format_exception(error.with_traceback(_without_this(trace)))
        raise TrainFunctionError("".join(lines).rstrip()) from None


def _without_this(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frame of Ray's that called the training function."""
    return trace.tb_next if trace else None


def stop_and_wait(seconds: float) -> bool:
    """Stop the training of this worker at the next step, all workers alike.

    Returns:
        Whether it has ended, so that its state is saved; False if there was no step to wait for.
    """
    return stop() and _has_ended.wait(seconds)


def stop() -> bool:
    """Ask for a stop at the next step; False if no step has begun."""
    from keras_het.strategy.cluster.stop_signals import stop_signals

    return stop_signals.ask(signal.SIGTERM)
