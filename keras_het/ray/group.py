"""What happens to a group of workers that is about to end: all stop together, and save."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.train import FailureConfig
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.failure_handling.default import RETRYABLE_CONTROLLER_ERRORS

from keras_het.ray import worker
from keras_het.ray.errors import LeavingError, TrainFunctionError
from keras_het.ray.nodes import on_every_node
from keras_het.ray.progress import Place

_logger = logging.getLogger(__name__)

_SECONDS_TO_ANSWER = 10.0


class StopTogether(ControllerCallback, WorkerGroupCallback):
    """Lets a group save before Ray ends it to make a larger or a smaller one.

    Args:
        grace_seconds: the longest time to wait for the group's next step and its backup.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._group: Any = None

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Stop the group as soon as Ray knows that one of its machines is about to leave."""
        if worker_group_status.errors:
            self._group = None  # what its workers hold is no longer that of one step
        if self._group is not None and worker_group_status.get_preemption_info() is not None:
            self._group.execute_async(worker.stop)  # again if no step had begun

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Stop the group that trains, if there is one, when newcomers are ready."""
        if self._group is None:
            return
        used = {each.metadata.node_id for each in self._group.get_workers()}
        # newcomers read what a worker imports while the others still train
        on_every_node(_import, but=used)
        asked = self._group.execute_async(worker.stop_and_wait, self._grace_seconds)
        ray.wait(asked, num_returns=len(asked), timeout=self._grace_seconds + _SECONDS_TO_ANSWER)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None


def _first_line(error: Exception) -> str:
    """Return what a log shows of an error; Ray's own have a page about the worker."""
    return next(iter(str(error).splitlines()), "")


def _import() -> None:
    import keras_het.strategy.heterogeneous_strategy  # noqa: F401


class Losses(FailurePolicy):
    """Ends a training whose script fails, or which comes to nothing however often it starts.

    Backups of steps that an earlier group has already saved are no progress: an error that comes
    back at the same step ends the training, too.

    Args:
        failure_config: of Ray Train.
        most: how often workers may be lost in a row without progress in between.
        progress: the actor that knows how far the backups have come.
    """

    def __init__(self, failure_config: FailureConfig, most: float, progress: Any) -> None:
        super().__init__(failure_config)
        self._most, self._progress = most, progress
        self._num_lost = 0
        self._furthest: dict[str, Place] = {}

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Let Ray start another group, unless that is of no use."""
        cause = getattr(training_failed_error, "controller_failure", None)
        if cause is not None:  # a group that waits for machines may wait for long
            is_waiting = isinstance(cause, RETRYABLE_CONTROLLER_ERRORS)
            return FailureDecision.RETRY if is_waiting else FailureDecision.RAISE
        failures = getattr(training_failed_error, "worker_failures", {})
        if any(isinstance(error, TrainFunctionError) for error in failures.values()):
            return FailureDecision.RAISE
        if not all(isinstance(error, LeavingError) for error in failures.values()):
            furthest = ray.get(self._progress.furthest.remote())
            self._num_lost = 1 if furthest != self._furthest else self._num_lost + 1
            self._furthest = furthest
            if self._num_lost > self._most:
                return FailureDecision.RAISE
        names = "; ".join(
            f"worker {rank}: {type(error).__name__}: {_first_line(error)}"
            for rank, error in sorted(failures.items())
        )
        _logger.warning(
            "Another group of workers continues from the newest backup, after %s",
            names or _first_line(training_failed_error),
        )
        return FailureDecision.RETRY
