"""Ends what a callback has begun where the training ends in an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_het.callbacks.present_fit import PresentFit

_END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


class StepGuard:
    """Calls back once if a step of the present `fit` fails, or another `fit` begins without it.

    After an error or Ctrl-C Keras calls no `on_train_end`.

    Args:
        model: the `keras.Model` that is trained; its train function has been made.
        abandon: ends what was begun.
    """

    def __init__(self, model: Any, abandon: Callable[[], None]) -> None:
        self._model, self._abandon = model, abandon
        self._fit = PresentFit(model)
        self._is_over = False
        self._compiled: Any = None
        self._watched: Any = None

    def enter(self) -> None:
        """Watches the steps of the model's present train function."""
        self._compiled = compiled = self._model.train_function

        def train_function(iterator: Any) -> Any:
            if self._is_over:
                return compiled(iterator)
            if not self._fit.is_running:
                self._end()
                return self._model.train_function(iterator)
            with self.watching():
                return compiled(iterator)

        train_function.ends_failed_fit = self._end  # type: ignore[attr-defined]
        self._model.train_function = self._watched = train_function

    def begin_epoch(self) -> None:
        """Takes note that the present `fit` has begun an epoch."""
        self._fit.begin_epoch()

    def leave(self) -> None:
        """Watches no more: training has ended."""
        self._is_over = True
        if self._model.train_function is self._watched:  # else somebody has put another around it
            self._model.train_function = self._compiled

    @staticmethod
    def end_failed_fit(model: Any) -> None:
        """Ends what an earlier `fit` has begun that failed; before a new one looks at the model.

        Args:
            model: the `keras.Model`.
        """
        function = model.train_function
        while function is not None:  # others may have put theirs around
            getattr(function, "ends_failed_fit", lambda: None)()
            inner = getattr(function, "__wrapped__", None)
            function = getattr(function, "keras_het_original", inner)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around what may fail."""
        try:
            yield
        except _END_OF_DATA:
            raise
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if not self._is_over:
            self.leave()
            self._abandon()
