"""Puts a function between Keras's loops and their compiled steps, and takes it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Replacement:
    """A function in the place of one of a model's step functions.

    It has no `__dict__`, which `functools.wraps` would copy to what others put around it.

    Args:
        function: what is called.
        original: what is called in its place once it has retired.
    """

    __slots__ = ("__weakref__", "_call", "original")

    def __init__(self, function: Callable[[Any], Any], original: Callable[[Any], Any]) -> None:
        self._call = function
        self.original = original

    def __call__(self, iterator: Any) -> Any:
        """Runs one execution."""
        return self._call(iterator)

    def retire(self) -> None:
        """Becomes the original: others may have put their functions around it."""
        self._call = self.original


class StepFunction:
    """One of a model's step functions while it is replaced.

    Args:
        name: "train_function", "test_function" or "predict_function".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._place: tuple[Any, str] | None = None
        self._replacement: Replacement | None = None
        self._seen: Any = None

    def replace(self, model: Any, make: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Replaces the model's function.

        Functions that say so (`stays_outermost`) remain around the new one.

        Args:
            model: a `keras.Model` whose loop has made its function already.
            make: makes the new function of the one that is there.
        """
        self.restore()
        place = place_of(model, self._name)
        original = getattr(*place)
        if original is None:
            return
        # left by a training that ended in an error
        original = original_of(original)
        self._place, self._replacement = place, Replacement(make(original), original)
        setattr(*place, self._replacement)

    def is_in(self, model: Any) -> bool:
        """Whether a call of the model's function comes to ours; called before every step.

        Another callback may have replaced the model's function (`make_train_function`).

        Args:
            model: a `keras.Model`.
        """
        function = getattr(model, self._name)
        if function is not self._seen or function is None:
            if not any(each is self._replacement for each in functions_in(function)):
                return False
            self._seen = function
        return True

    def restore(self) -> None:
        """Puts the original back; where somebody has replaced ours meanwhile, it retires."""
        if self._place is not None and self._replacement is not None:
            if getattr(*self._place) is self._replacement:
                setattr(*self._place, self._replacement.original)
            self._replacement.retire()
        self._place = self._replacement = self._seen = None


def place_of(model: Any, name: str) -> tuple[Any, str]:
    """Where a function goes around a model's step function: object and name of its attribute.

    Args:
        model: the `keras.Model`.
        name: as for `StepFunction`.
    """
    place = (model, name)
    while getattr(getattr(*place), "stays_outermost", False):
        place = (getattr(*place), "original")
    return place


def original_of(function: Any) -> Any:
    """The function that was replaced, or the function itself."""
    return function.original if isinstance(function, Replacement) else function


def functions_in(function: Any) -> Iterator[Any]:
    """A step function and those around which it was put, the outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None) or getattr(function, "original", None)
