"""Tells the ledger that a worker is alive, however long its steps take."""

from __future__ import annotations

import threading
from typing import Any

from keras_het.asynchronous.parameter_service.ledger_client import ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import Presence


class Heartbeat:
    """Reports from a thread until it is stopped.

    Args:
        ledger: a connection that nobody else uses.
        interval_seconds: from one report to the next.
    """

    def __init__(self, ledger: Any, interval_seconds: float) -> None:
        self._ledger, self._interval_seconds = ledger, interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="keras_het-alive", daemon=True)
        self._thread.start()

    def stop(self, longest_wait_seconds: float | None = None) -> None:
        """Reports no more; returns when no report is under way, or sooner.

        Args:
            longest_wait_seconds: for a report under way, which a lost service leaves without an
                answer for its whole time-out; by default until it is answered.
        """
        self._stopped.set()
        self._thread.join(longest_wait_seconds)

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self._ledger.report(Presence.TRAINING)
            except ServiceLostError:
                continue  # the worker itself notices at its next exchange
            except PermissionError:
                return
