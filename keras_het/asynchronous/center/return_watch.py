"""Asks a lost service, beside the training, whether it answers again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_het.asynchronous.parameter_service.ledger_client import ServiceLostError

_QUESTIONS_IN_TIMEOUT = 4
_LARGEST_PAUSE = 16.0  # in time-outs
_LONGEST_WAIT_SECONDS = 0.5  # for a question that nobody wants the answer of


class ReturnWatch:
    """Asks from a thread after each loss until there is an answer.

    A service that is silent (stopped, behind a dead link) lets every question last for the whole
    time-out. Between two training steps that would hold up the whole sync group again and again;
    here nobody waits for it. Where the questions are answered and what follows is not (a link that
    carries small messages only), each further loss doubles the pause before the next question.

    Args:
        ask: returns when all of the service has answered. It raises `ServiceLostError` or
            `ConnectionError` if it does not; whatever else comes is an answer, which the training
            itself then hears.
        timeout_seconds: of a message.
    """

    def __init__(self, ask: Callable[[], Any], timeout_seconds: float) -> None:
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
        """Begins to ask, unless that is under way; to be called at each loss."""
        with self._lock:  # batches may be claimed by another thread than that of the steps
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
        """The service is in use again: the next loss is a new one."""
        self._pause = self._first_pause

    def stop(self) -> None:
        """Asks no more; returns soon, and what a question under way finds does not count."""
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
                pass  # such as a refusal: it comes again where the training attaches
            if not self._stopped.is_set():
                self._answered.set()
            return
