"""Timing of the waits for the elements of any iterator."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import tensorflow as tf

from keras_het.loader.nested import StepInput


class MeteredIterator:
    """Stand-in for another iterator in one execution of a step function.

    An execution that got nothing ends with `OutOfRangeError`: after StopIteration Keras would
    continue with a result that it does not have.
    """

    def __init__(self, iterator: Iterable[StepInput]) -> None:
        self._given = iterator
        self._iterator: Iterator[StepInput]
        self.steps = 0
        self.input_wait_seconds = 0.0

    def __iter__(self) -> MeteredIterator:
        self._iterator = iter(self._given)
        return self

    def __next__(self) -> StepInput:
        start = time.perf_counter()
        try:
            element = next(self._iterator)
        except StopIteration:
            if not self.steps:
                raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None
            raise
        finally:
            self.input_wait_seconds += time.perf_counter() - start
        self.steps += 1
        return element
