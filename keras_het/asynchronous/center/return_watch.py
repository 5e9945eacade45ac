"""Poll a lost service in the background until it answers again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from keras_het.asynchronous.parameter_service.ledger_connection import ServiceLostError

_QUESTIONS_IN_TIMEOUT = 4
_LARGEST_PAUSE = 16.0  # in time-outs
_LONGEST_WAIT_SECONDS = 0.5  # for a question whose answer is no longer needed


class ReturnWatch:
    """A thread that polls after each loss until there is an answer.

    A silent service (stopped, behind a dead link) delays every question for the entire time-out.
    Between two training steps that would hold up the whole sync group again and again; here no step
    waits for it. If the questions are answered but the messages that follow are not (a link that
    carries only small messages), each further loss doubles the pause before the next question.
    """

    def __init__(self, ask: Callable[[], object], timeout_seconds: float) -> None:
        self._ask = ask
        self._first_pause = timeout_seconds / _QUESTIONS_IN_TIMEOUT
        self._largest_pause = _LARGEST_PAUSE * timeout_seconds
        self._pause = self._first_pause
        self._lock = threading.Lock()
        self._answered, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_answered(self) -> bool:
        """Whether the service has answered since the latest loss."""
        return self._answered.is_set()

    def start(self) -> None:
        """Start polling, unless it is already in progress; call this at each loss."""
        with self._lock:  # a thread other than that of the steps may claim batches
            is_asking = self._thread is not None and not self._answered.is_set()
            if is_asking or self._stopped.is_set():
                return
            self._answered.clear()
            pause, self._pause = self._pause, min(2 * self._pause, self._largest_pause)
            self._thread = threading.Thread(
                target=self._ask_until_answered, args=(pause,), name="keras_het-lost", daemon=True
            )
            self._thread.start()

    def attached(self) -> None:
        """Record that the service is in use again: the next loss is a new one."""
        self._pause = self._first_pause

    def stop(self) -> None:
        """Stop polling and return soon; the result of a pending question does not count."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_LONGEST_WAIT_SECONDS)

    def _ask_until_answered(self, pause: float) -> None:
        while not self._stopped.wait(pause):
            try:
                self._ask()
            except (ServiceLostError, ConnectionError):
                continue
            except Exception:
                pass  # such as a refusal: it recurs when the training attaches
            if not self._stopped.is_set():
                self._answered.set()
            return
