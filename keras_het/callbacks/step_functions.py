"""Puts a function between Keras's loops and their compiled steps, and takes it out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepFunction:
    """One of a model's step functions while it is replaced.

    Args:
        name: "train_function", "test_function" or "predict_function".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._model: Any = None
        self._original: Callable[[Any], Any] | None = None
        self._replacement: Callable[[Any], Any] | None = None

    def replace(self, model: Any, make: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Replaces the model's function.

        Args:
            model: a `keras.Model` whose loop has made its function already.
            make: makes the new function of the one that is there.
        """
        self.restore()
        original = getattr(model, self._name)
        if original is None:
            return
        # left by a training that ended in an error
        original = getattr(original, "keras_het_original", original)
        replacement = make(original)
        replacement.keras_het_original = original
        self._model, self._original, self._replacement = model, original, replacement
        setattr(model, self._name, replacement)

    def restore(self) -> None:
        """Puts the original back, unless somebody has replaced ours meanwhile."""
        if self._model is not None and getattr(self._model, self._name) is self._replacement:
            setattr(self._model, self._name, self._original)
        self._model = self._original = self._replacement = None
