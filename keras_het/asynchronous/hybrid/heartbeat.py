"""Tell the ledger that a worker is alive, regardless of the length of its steps."""

from __future__ import annotations

import threading

from keras_het.asynchronous.parameter_service.ledger_connection import (
    LedgerConnection,
    ServiceLostError,
)
from keras_het.asynchronous.parameter_service.sample_ledger import Presence


class Heartbeat:
    """A thread that reports until it is stopped."""

    def __init__(self, ledger: LedgerConnection, interval_seconds: float) -> None:
        self._ledger, self._interval_seconds = ledger, interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="keras_het-alive", daemon=True)
        self._thread.start()

    def stop(self, longest_wait_seconds: float | None = None) -> None:
        """Stop reporting; return once no report is in flight, or sooner."""
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
