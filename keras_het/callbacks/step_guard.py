"""Ends what a callback has begun where the training ends in an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_het.callbacks.present_fit import PresentFit, is_within_callbacks_of
from keras_het.callbacks.step_functions import functions_in, place_of

_END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


class StepGuard:
    """Calls back once if a step of the present `fit` fails, or another `fit` begins without it.

    After an error or Ctrl-C Keras calls no `on_train_end`.

    Args:
        model: the `keras.Model` that is trained; its train function has been made.
        abandon: ends what was begun.
        callback: the one that has begun it.
        around_steps: makes the context in which each call of the train function runs, from what
            it is called with.
    """

    def __init__(
        self,
        model: Any,
        abandon: Callable[[], None],
        callback: Any,
        around_steps: Callable[[Any], AbstractContextManager[None]],
    ) -> None:
        self._model, self._abandon, self._callback = model, abandon, callback
        self._around_steps = around_steps
        self._fit = PresentFit(model)
        self._is_over = False
        self._place: tuple[Any, str] = (model, "train_function")
        self._compiled: Any = None
        self._watched: Any = None

    def enter(self) -> None:
        """Watches the steps of the model's present train function, unless it does already.

        Another callback may have replaced that. Functions that say so (`stays_outermost`) remain
        around this one.
        """
        if any(each is self._watched for each in functions_in(self._model.train_function)):
            return
        self._place = place_of(self._model, "train_function")
        self._compiled = compiled = getattr(*self._place)

        def train_function(iterator: Any) -> Any:
            # another one may be around it where functions of others hide it
            if self._is_over or train_function is not self._watched:
                return compiled(iterator)
            if not self._fit.is_running:
                is_within = is_within_callbacks_of(self._callback)
                self._end()
                if is_within:
                    _refuse_fit_within(self._callback)
                return self._model.train_function(iterator)
            with self.watching(), self._around_steps(iterator):
                return compiled(iterator)

        train_function.ends_failed_fit = self._end  # type: ignore[attr-defined]
        train_function.__wrapped__ = compiled  # type: ignore[attr-defined]
        self._watched = train_function
        setattr(*self._place, train_function)

    def begin_epoch(self) -> None:
        """Takes note that the present `fit` has begun an epoch."""
        self._fit.begin_epoch()

    def leave(self) -> None:
        """Watches no more: training has ended."""
        self._is_over = True
        # else somebody has put another around it; what was around it may be gone
        for place in (self._place, (self._model, "train_function")):
            if getattr(*place) is self._watched:
                setattr(*place, self._compiled)

    @staticmethod
    def end_failed_fit(model: Any) -> None:
        """Ends what an earlier `fit` has begun that failed; before a new one looks at the model.

        Args:
            model: the `keras.Model`.
        """
        for function in list(functions_in(model.train_function)):  # ends change what is there
            getattr(function, "ends_failed_fit", lambda: None)()

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


def _refuse_fit_within(callback: Any) -> None:
    name = type(callback).__name__
    raise RuntimeError(
        f"{name} exchanges weights while the model trains, and steps on other data would be part "
        "of it. Received: a fit of the same model within a callback. Train another model there, "
        "such as keras.models.clone_model gives in the scope of a tf.distribute.OneDeviceStrategy, "
        f"or call fit after that with {name} has ended."
    )
