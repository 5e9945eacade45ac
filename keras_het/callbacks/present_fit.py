"""Tells the steps of one `fit` from those of a later one."""

from __future__ import annotations

from typing import Any


class PresentFit:
    """The `fit` in whose `on_train_begin` this is made.

    After an error or Ctrl-C Keras calls no `on_train_end` and keeps the model's step functions:
    what a callback has put there is called by the next `fit` too, also if that has no such
    callback.

    Every `fit` has another `History`, or lets the user's own one begin another list of epochs.

    Args:
        model: the `keras.Model` that is trained.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._history = getattr(model, "history", None)
        self._epochs: list[int] | None = None

    def begin_epoch(self) -> None:
        """Takes note of the list of epochs, which all callbacks have begun by now."""
        self._epochs = getattr(self._history, "epoch", None)

    @property
    def is_running(self) -> bool:
        """Whether no other `fit` of the model has begun since."""
        history = getattr(self._model, "history", None)
        if history is not self._history:
            return False
        return self._epochs is None or getattr(history, "epoch", None) is self._epochs
