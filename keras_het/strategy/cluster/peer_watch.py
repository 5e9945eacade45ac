"""Detection of lost workers, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, cast

from keras_het.planning.argument_checks import check_number
from keras_het.strategy.cluster.arrival import has_left
from keras_het.strategy.cluster.stop_signals import stop_signals

_logger = logging.getLogger(__name__)

PEER_TIMEOUT = "KERAS_HET_PEER_TIMEOUT_SECONDS"
_DEFAULT_PATIENCE_SECONDS = 30.0
# Asking holds the interpreter's lock. A silent peer must not stop this worker as well.
_ANSWER_SECONDS = 0.25
# Of one peer: it does not answer in time, and then a connection tells nothing in time.
_LONGEST_CHECK_SECONDS = 2.0
# How long a survivor needs to hear of a loss that another one has found.
_SECONDS_FOR_NEWS = 5.0

# A worker's cost of watching does not grow with the cluster.
_MOST_WATCHED = 3


def neighbours(place: int, number: int, most: int = _MOST_WATCHED) -> tuple[int, ...]:
    """Return the workers that one of `number` watches: worker 0, and those after it in a ring."""
    # Worker 0 carries the news of any lost worker, so every worker watches it.
    watched = {0, *((place + offset) % number for offset in range(1, most + 1))}
    return tuple(sorted(watched - {place}))


def read_peer_timeout(given: float | None) -> float:
    name, value = "peer_timeout_seconds", cast(Any, given)
    if given is None:
        name, value = PEER_TIMEOUT, os.environ.get(PEER_TIMEOUT, "").strip()
        if not value:
            return _DEFAULT_PATIENCE_SECONDS
        with contextlib.suppress(ValueError):
            value = float(value)
    check_number(name, value, above=0)
    return float(value)


class WorkerLostError(RuntimeError):
    """Another worker of the cluster died or no longer answers; the message names it."""


@dataclasses.dataclass
class _Peer:
    address: str
    is_healthy: Callable[[str, float], bool]
    silence: float = 0.0
    is_gone: bool = False


# A process that has ended refuses connections, or another start greets from its place: noticed at
# once. A silent one, as during a migration of its machine, has time to come back.
class PeerWatch:
    """Watch over some other workers, which aborts pending collectives if one is gone."""

    def __init__(
        self,
        peers: Mapping[str, str],
        is_healthy: Callable[[str, float], bool],
        abort: Callable[[str], None],
        patience_seconds: float = _DEFAULT_PATIENCE_SECONDS,
        has_left: Callable[[str], bool] = has_left,
        interval_seconds: float = 0.5,
    ) -> None:
        self._patience = patience_seconds
        self._has_left = has_left
        self._interval = interval_seconds
        self._tell: Callable[[str], None] = lambda message: None
        self._peers: dict[str, _Peer] = {}
        self._aborts: list[Callable[[str], None]] = []
        self.watch_too(peers, is_healthy, abort)
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._stop = threading.Event()
        self._found = threading.Event()
        self._message: str | None = None
        self._thread = threading.Thread(target=self._run, name="keras_het-peers", daemon=True)

    def watch_too(
        self,
        peers: Mapping[str, str],
        is_healthy: Callable[[str, float], bool],
        abort: Callable[[str], None],
    ) -> None:
        """Watch more peers, probed in a different way; takes the arguments of the class."""
        self._aborts.append(abort)
        self._peers |= {task: _Peer(address, is_healthy) for task, address in peers.items()}

    def start(self) -> None:
        self._thread.start()

    def share_news(
        self,
        tell: Callable[[str], None],
        wait_for_news: Callable[[], str | None],
        is_asked_to_end: Callable[[str], bool] = lambda message: False,
    ) -> None:
        """Tell all other workers what this one finds, and hear what they have found."""

        def hear() -> None:
            message = wait_for_news()
            if message is not None and not is_asked_to_end(message):
                self._lose(message)

        self._tell = lambda message: _in_background(lambda: tell(message))
        _in_background(hear)

    def stop(self) -> None:
        self._stop.set()

    def wait_for_loss(self, timeout_seconds: float | None = None) -> str | None:
        if timeout_seconds is None:
            timeout_seconds = self._patience + _SECONDS_FOR_NEWS
        self._found.wait(timeout_seconds)
        return self._message

    def raise_if_lost(self) -> None:
        if self._message is not None:
            raise WorkerLostError(self._message)

    def check(self) -> str | None:
        """Ask every peer once and return the message about the lost ones, if any."""
        now = time.monotonic()
        # Not more than this takes: the process may have been the one that stood still.
        longest = self._interval + _LONGEST_CHECK_SECONDS * len(self._peers)
        self._since_last_check = min(now - self._checked_at, longest)
        self._checked_at = now
        peers = list(self._peers.items())
        lost = {task: peer.address for task, peer in peers if self._is_lost(task, peer)}
        return _message(lost) if lost else None

    def _is_lost(self, task: str, peer: _Peer) -> bool:
        try:
            is_healthy = peer.is_healthy(task, _ANSWER_SECONDS)
        except ProcessLookupError:
            return True
        if is_healthy:
            peer.silence, peer.is_gone = 0.0, False
            return False
        peer.silence += self._since_last_check
        # Twice, so that news of the lost worker arrives before that of workers it takes down.
        was_gone, peer.is_gone = peer.is_gone, self._has_left(peer.address)
        return (was_gone and peer.is_gone) or peer.silence > self._patience

    def _run(self) -> None:
        while not self._stop.wait(self._interval) and self._message is None:
            message = self.check()
            if message is not None:
                self._lose(message)

    def _lose(self, message: str) -> None:
        with self._lock:
            if self._message is not None:
                return
            self._message = message
        _logger.debug("%s", message)
        self._found.set()
        self._tell(message)
        for abort in self._aborts:
            abort(message)


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="keras_het-news", daemon=True).start()


def _message(lost: Mapping[str, str]) -> str:
    names = ", ".join(f"{short_name(task)} ({address})" for task, address in lost.items())
    return (
        f"Lost {names}: it no longer answers, so the step of all workers cannot finish. See that "
        "worker's own output for the reason. Restart all workers; with "
        "keras_het.callbacks.BackupAndRestore training continues where it was saved."
    )


def short_name(task: str) -> str:
    """Turn "/job:worker/replica:0/task:1" into "worker 1"."""
    job = task.split("/job:")[1].split("/")[0]
    return f"{job} {task.rsplit(':', 1)[1]}"


@contextlib.contextmanager
def naming_lost_workers(watch: PeerWatch | None) -> Iterator[None]:
    """Let a lost worker cause one error that names it."""
    try:
        yield
    except Exception as error:
        if watch is None or not may_be_a_lost_connection(error) or message_in(error):
            raise
        started = time.monotonic()
        message = watch.wait_for_loss()
        _logger.debug("waited %.1f s after %s", time.monotonic() - started, error)
        if message is None:
            raise
        # TensorFlow's error is pages of graph nodes and says nothing about the worker.
        raise WorkerLostError(message) from None


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
    """Tell whether an error is of a kind that TensorFlow raises when another process is gone."""
    return type(error).__name__ in _CONNECTION_ERRORS


def message_in(error: BaseException) -> str | None:
    """Return what another worker sent through TensorFlow's error, or None."""
    found = re.search(r"\[\[(The workers.*?)\]\]", str(error), re.DOTALL)
    return found.group(1) if found else None


def install_report(watch: PeerWatch) -> None:
    """Make an uncaught error about a broken connection end with the name of the lost worker."""
    # `fit` raises `WorkerLostError` itself; a custom loop gets TensorFlow's error, which names
    # sockets.
    show = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        message = None
        if may_be_a_lost_connection(error):
            code = stop_signals.exit_code_in_place_of_error()
            if code is not None:
                raise SystemExit(code)  # Python ends with it
            message = watch.wait_for_loss()
        if message is None:
            show(kind, error, traceback)
        else:
            show(WorkerLostError, WorkerLostError(message), traceback)

    sys.excepthook = report
