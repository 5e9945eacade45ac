"""A group of workers of Ray: what runs on them, why they end, and how far they have come."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Container
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.train import FailureConfig
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.failure_handling.default import RETRYABLE_CONTROLLER_ERRORS

from keras_het.fit.backup_folder import RUN

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus

_has_ended = threading.Event()


class OnWorker:
    """Context of the training function: what its errors mean to the trainer."""

    def __init__(self, progress: ActorHandle, run: str) -> None:
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
    """Stop this worker at the next step, as all others; return whether it has ended and saved."""
    return stop() and _has_ended.wait(seconds)


def stop() -> bool:
    """Ask for a stop at the next step; False if no step has begun."""
    from keras_het.strategy.cluster.stop_signals import stop_signals

    return stop_signals.ask(signal.SIGTERM)


Place = tuple[int, ...]
"""An epoch, and the number of its steps that are trained."""


class Progress:
    """The furthest place from which each `fit` of a script can continue."""

    def __init__(self) -> None:
        self._furthest: dict[str, Place] = {}

    def note_saved(self, folder: str, *place: int) -> None:
        self._furthest[folder] = max(self._furthest.get(folder, (0, 0)), place)

    def furthest(self) -> dict[str, Place]:
        return dict(self._furthest)


def start_progress() -> ActorHandle:
    """Start the actor on this node, where it takes no CPU."""
    node = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Progress).options(num_cpus=0, scheduling_strategy=strategy).remote()


_LONGEST_SECONDS = 120.0


def on_every_node(
    function: Callable[..., Any], *arguments: object, but: Container[str] = ()
) -> None:
    """Call a function on each node that lives, but for some; what fails there is not raised."""
    kind = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    running = [
        ray.remote(function)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=kind(node, soft=False))
        .remote(*arguments)
        for node in (each["NodeID"] for each in ray.nodes() if each["Alive"])
        if node not in but
    ]
    ray.wait(running, num_returns=len(running), timeout=_LONGEST_SECONDS) if running else None


class TrainFunctionError(RuntimeError):
    """The training function raised an error on a worker; the message is its traceback."""


class MaxFailuresExceededError(RuntimeError):
    """Workers were lost again and again, and no backup got further in between."""


class LeavingError(RuntimeError):
    """All workers have stopped at the same step and saved, because a machine leaves."""


_logger = logging.getLogger(__name__)

_SECONDS_TO_ANSWER = 10.0


class StopTogether(ControllerCallback, WorkerGroupCallback):
    """Lets a group save before Ray ends it to make a larger or a smaller one."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._group: WorkerGroup | None = None

    def after_worker_group_training_start(self, worker_group: WorkerGroup) -> None:
        self._group = worker_group

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        """Stop the group as soon as Ray knows that one of its machines is about to leave."""
        if worker_group_status.errors:
            self._group = None  # what its workers hold is no longer that of one step
        if self._group is not None and worker_group_status.get_preemption_info() is not None:
            self._group.execute_async(stop)  # again if no step had begun

    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """Stop the group that trains, if there is one, when newcomers are ready."""
        if self._group is None:
            return
        used = {each.metadata.node_id for each in self._group.get_workers()}
        # newcomers read what a worker imports while the others still train
        on_every_node(_import, but=used)
        asked = self._group.execute_async(stop_and_wait, self._grace_seconds)
        ray.wait(asked, num_returns=len(asked), timeout=self._grace_seconds + _SECONDS_TO_ANSWER)

    def before_worker_group_shutdown(self, worker_group: WorkerGroup) -> None:
        self._group = None


def _first_line(error: Exception) -> str:
    """Return what a log shows of an error; Ray's own have a page about the worker."""
    return next(iter(str(error).splitlines()), "")


def _import() -> None:
    import keras_het.strategy.heterogeneous_strategy  # noqa: F401


class Losses(FailurePolicy):
    """Ends a training whose script fails, or which comes to nothing however often it starts."""

    # Backups of steps that an earlier group has saved are no progress: an error that comes back at
    # the same step ends the training, too.

    def __init__(self, failure_config: FailureConfig, most: float, progress: ActorHandle) -> None:
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
