"""Times the waits for the elements of any iterator."""

from __future__ import annotations

import time
from typing import Any


class MeteredIterator:
    """Passes for another iterator in one execution of a step function.

    Args:
        iterator: the iterator.

    Attributes:
        steps: elements that it gave.
        input_wait_seconds: time that they were waited for.
    """

    def __init__(self, iterator: Any) -> None:
        self._given = iterator
        self._iterator: Any = None
        self.steps = 0
        self.input_wait_seconds = 0.0

    def __iter__(self) -> MeteredIterator:
        self._iterator = iter(self._given)
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            element = next(self._iterator)
        finally:
            self.input_wait_seconds += time.perf_counter() - start
        self.steps += 1
        return element
