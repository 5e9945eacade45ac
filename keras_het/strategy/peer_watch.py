"""Notices a lost worker and says which one it was."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping

_logger = logging.getLogger(__name__)


_SHORTEST_TIMEOUT = 0.5


class WorkerLostError(RuntimeError):
    """Another worker of the cluster died or no longer answers; the message names it."""


class PeerWatch:
    """Asks the other workers for a sign of life and ends pending collectives if one is gone.

    A worker that waits in a collective for a dead one would wait for minutes, or fail with a
    message about sockets. The watch makes every pending collective fail and knows who was lost. A
    dead process refuses the connection at once; one that hangs is given `timeout_seconds` to
    answer, `num_failures` times.

    Args:
        peers: name of the task ("/job:worker/replica:0/task:1") to its address.
        is_healthy: asks one peer, given its task name and a time-out in seconds.
        abort: makes pending collectives fail with a message.
        interval_seconds: pause between two rounds, in seconds.
        timeout_seconds: time all peers together may take to answer, in seconds; a peer that is
            asked after a slow one is given half a second at least.
        num_failures: rounds a peer may miss in a row before it counts as lost.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        is_healthy: Callable[[str, float], bool],
        abort: Callable[[str], None],
        interval_seconds: float = 0.5,
        timeout_seconds: float = 3.0,
        num_failures: int = 2,
    ) -> None:
        self._peers = dict(peers)
        self._is_healthy = is_healthy
        self._abort = abort
        self._interval = interval_seconds
        self._timeout = timeout_seconds
        self._num_failures = num_failures
        self._missed = dict.fromkeys(self._peers, 0)
        self._stop = threading.Event()
        self._found = threading.Event()
        self._message: str | None = None
        self._thread = threading.Thread(target=self._run, name="keras_het-peers", daemon=True)

    def start(self) -> None:
        """Starts watching in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
        self._stop.set()

    def wait_for_loss(self, timeout_seconds: float) -> str | None:
        """Waits until a worker is known to be lost.

        Args:
            timeout_seconds: longest wait, in seconds.

        Returns:
            The message that names the lost worker, or None if all workers answer.
        """
        self._found.wait(timeout_seconds)
        return self._message

    def check(self) -> str | None:
        """Asks every peer once and returns the message about the lost ones, if any."""
        lost = []
        # Asking holds the interpreter's lock: peers can only be asked one after the other, and
        # several that hang must not add up to more than a survivor may take to notice.
        end = time.monotonic() + self._timeout
        for task in self._peers:
            patience = max(end - time.monotonic(), min(self._timeout, _SHORTEST_TIMEOUT))
            healthy = self._is_healthy(task, patience)
            self._missed[task] = 0 if healthy else self._missed[task] + 1
            if self._missed[task] >= self._num_failures:
                lost.append(task)
        return _message({task: self._peers[task] for task in lost}) if lost else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            message = self.check()
            if message is not None:
                _logger.debug("%s", message)
                self._message = message
                self._found.set()
                self._abort(message)
                return


def _message(lost: Mapping[str, str]) -> str:
    names = ", ".join(f"{_short_name(task)} ({address})" for task, address in lost.items())
    return (
        f"Lost {names}: it no longer answers, so the step of all workers cannot finish. See that "
        "worker's own output for the reason. Restart all workers; with "
        "keras_het.callbacks.BackupAndRestore training goes on where it was saved."
    )


def _short_name(task: str) -> str:
    """Turns "/job:worker/replica:0/task:1" into "worker 1"."""
    job = task.split("/job:")[1].split("/")[0]
    return f"{job} {task.rsplit(':', 1)[1]}"


def name_lost_workers(watch: PeerWatch, function: Callable[..., object]) -> Callable[..., object]:
    """Wraps a step function so that a lost worker is one error that names it.

    Args:
        watch: the watch of this process.
        function: function that runs collectives.

    Returns:
        The function; it raises `WorkerLostError` in place of TensorFlow's error about a broken
        connection, and passes every other error on.
    """

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not may_be_a_lost_connection(error) or message_in(error):
                raise
            started = time.monotonic()
            message = watch.wait_for_loss(timeout_seconds=11.0)
            _logger.debug("waited %.1f s after %s", time.monotonic() - started, error)
            if message is None:
                raise
            # TensorFlow's error is pages of graph nodes and says nothing about the worker.
            raise WorkerLostError(message) from None

    step.names_lost_workers = True  # type: ignore[attr-defined]
    return step


_CONNECTION_ERRORS = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "InternalError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "UnknownError",
)


def may_be_a_lost_connection(error: BaseException) -> bool:
    """Whether an error is of a kind that TensorFlow raises when another process is gone."""
    return type(error).__name__ in _CONNECTION_ERRORS


def message_in(error: BaseException) -> str | None:
    """What another worker has told this one through TensorFlow's error, None if nothing."""
    found = re.search(r"\[\[(The workers.*?)\]\]", str(error), re.DOTALL)
    return found.group(1) if found else None
