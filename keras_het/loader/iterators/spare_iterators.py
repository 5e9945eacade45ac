"""Iterators that are made before they are asked for, off the training thread."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any


class SpareIterators:
    """Gives iterators in the order in which they were begun, as one thread would make them.

    A shuffle takes the order of a pass when its iterator is made, so that spares which are left
    over must be the next ones to be used: they are kept.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

    def begin(
        self, make: Callable[[], Any], count: int, executor: concurrent.futures.Executor
    ) -> None:
        """Begins to make iterators until there are `count`.

        Args:
            make: makes one.
            count: how many may wait.
            executor: one thread that works in the background.
        """
        while len(self._waiting) < count:
            self._waiting.append(executor.submit(make))

    def clear(self) -> None:
        """Drops them."""
        while self._waiting:
            self._waiting.popleft().cancel()

    def take(self) -> Any:
        """The next spare, waiting for one that is being made; None if there is none."""
        while self._waiting:
            future = self._waiting.popleft()
            # behind other work: whoever asks makes it sooner
            if not future.cancel():
                with contextlib.suppress(Exception):  # whoever asks meets the error again
                    return future.result()
        return None
