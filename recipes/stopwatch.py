"""Timing of every training step."""

import time
from typing import Any

import keras


class Stopwatch(keras.callbacks.Callback):
    """Timer from the end of a step to the end of the next one within an epoch.

    Attributes:
        seconds: time by (epoch, batch). The first steps of the first epoch are excluded: tracing
            and the first fill of the pipelines are not part of the cost of training. So is the
            first step of every other epoch.
    """

    skipped_steps = 5

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[tuple[int, int], float] = {}
        self._epoch = 0
        self._last = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if batch >= (self.skipped_steps if self._epoch == 0 else 1):
            self.seconds[self._epoch, batch] = now - self._last
        self._last = now
