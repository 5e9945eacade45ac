"""Notices a lost worker and says which one it was."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

_logger = logging.getLogger(__name__)


class PeerWatch:
    """Asks the other workers for a sign of life and ends pending collectives if one is gone.

    A worker that waits in a collective for a dead one would wait for minutes, or fail with a
    message about sockets. The watch makes every pending collective fail with one error that names
    the lost worker.

    Args:
        peers: name of the task ("/job:worker/replica:0/task:1") to its address.
        is_healthy: asks one peer, given its task name and a time-out in seconds.
        abort: makes pending collectives fail with a message.
        interval_seconds: time between two rounds, in seconds.
        num_failures: rounds a peer may miss in a row before it counts as lost.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        is_healthy: Callable[[str, float], bool],
        abort: Callable[[str], None],
        interval_seconds: float = 2.0,
        num_failures: int = 2,
    ) -> None:
        self._peers = dict(peers)
        self._is_healthy = is_healthy
        self._abort = abort
        self._interval = interval_seconds
        self._num_failures = num_failures
        self._missed = dict.fromkeys(self._peers, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_het-peers", daemon=True)

    def start(self) -> None:
        """Starts watching in a background thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
        self._stop.set()

    def check(self) -> str | None:
        """Asks every peer once and returns the message about the first lost one, if any."""
        for task, address in self._peers.items():
            if self._is_healthy(task, self._interval):
                self._missed[task] = 0
                continue
            self._missed[task] += 1
            if self._missed[task] >= self._num_failures:
                return _message(task, address)
        return None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            message = self.check()
            if message is not None:
                _logger.debug(message)
                self._abort(message)
                return


def _message(task: str, address: str) -> str:
    job, index = task.split("/job:")[1].split("/")[0], task.rsplit(":", 1)[1]
    return (
        f"Lost {job} {index} at {address}: it no longer answers, so the synchronous step cannot "
        "finish. See that worker's own output for the reason. Restart all workers; with "
        "keras_het.callbacks.BackupAndRestore training goes on where it was saved."
    )
