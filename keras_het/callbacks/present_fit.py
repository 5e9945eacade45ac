"""Tells the steps of one `fit` from those of a later one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras

_FILE_OF_CALLBACK_LISTS = keras.callbacks.CallbackList.__init__.__code__.co_filename


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
        """Takes note of the list of epochs, which all callbacks have begun by now.

        Call it where Keras calls a callback of this `fit`. If another callback has called `fit` of
        the same model within this one, the model has the `History` of that.
        """
        self._history = getattr(self._model, "history", None)
        self._epochs = getattr(self._history, "epoch", None)

    @property
    def is_running(self) -> bool:
        """Whether no other `fit` of the model has begun since."""
        history = getattr(self._model, "history", None)
        if history is not self._history:
            return False
        return self._epochs is None or getattr(history, "epoch", None) is self._epochs


def is_within_callbacks_of(callback: Any) -> bool:
    """Whether Keras is calling this callback, or another one of the same `fit`.

    A step that is trained meanwhile is one of a `fit` within that `fit`.

    Args:
        callback: a `keras.callbacks.Callback`.
    """
    return bool(_lists_that_call(callback))


def is_in_fit_within_its_fit(callback: Any) -> bool:
    """Whether Keras is calling this callback in a `fit` within another one that has it too.

    Args:
        callback: a `keras.callbacks.Callback`.
    """
    return len(_lists_that_call(callback)) > 1


def callbacks_beside(callback: Any) -> list[Any]:
    """The other callbacks of the `fit` in which Keras is calling this one.

    Args:
        callback: a `keras.callbacks.Callback`.
    """
    lists = _lists_that_call(callback)
    return [each for each in lists[0].callbacks if each is not callback] if lists else []


def _lists_that_call(callback: Any) -> list[Any]:
    """Keras's lists of callbacks that have this one and are being called, each once."""
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE_OF_CALLBACK_LISTS:
            called = frame.f_locals.get("self")
            if any(each is callback for each in getattr(called, "callbacks", ())):
                found[id(called)] = called
        frame = frame.f_back
    return list(found.values())
