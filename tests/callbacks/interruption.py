"""A training that ends in an error on its way."""

from typing import Any

import keras


class OfThisProcess(keras.callbacks.Callback):
    """What it counts is not continued by the next process."""

    def get_state(self) -> None:
        """Nothing that a backup holds."""

    def set_state(self, state: None) -> None:
        pass


class Interruption(OfThisProcess):
    """The power goes out after some steps."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps_left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            raise InterruptedError("the power went out")
