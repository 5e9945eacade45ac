"""The thread that samples hardware and writes the log while a model trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger("keras_het")


class Background:
    """A thread that calls a function again and again until it is stopped.

    An error in it ends the calls with one warning, not the training.
    """

    def __init__(self, work: Callable[[], None], interval_seconds: float) -> None:
        self._work, self._interval_seconds = work, interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_het-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once the function does not run any more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self._work()
            except Exception as error:  # whatever it is, training goes on
                _logger.warning("Telemetry stops after an error: %r. Training goes on.", error)
                return
