"""Time at which all callbacks of a `fit` were done with a batch."""

from __future__ import annotations

import time
from typing import Any

import keras


# The end of an epoch reaches one callback after the other. Keras appends its History to the user's
# callbacks, so that one knows when a step is over; a subclass may have any position.
class BatchEnds:
    """Record of the time at which the last callback of a `fit` has seen the end of a batch."""

    def __init__(self, model: keras.Model) -> None:
        history = getattr(model, "history", None)
        self._history = history if type(history) is keras.callbacks.History else None
        self._last = (-1, 0.0)
        if self._history is not None:
            self._history.on_train_batch_end = self._note

    def begin_epoch(self) -> None:
        self._last = (-1, 0.0)

    def time_of(self, batch: int) -> float | None:
        """Return when a batch was over, in seconds of `time.perf_counter`; None if unknown."""
        number, seconds = self._last
        return seconds if number >= batch else None

    def release(self) -> None:
        if self._history is not None:
            vars(self._history).pop("on_train_batch_end", None)

    def _note(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras may call this in another thread, and late
        self._last = batch, time.perf_counter()
