"""Values of finished steps, read without waiting for the device.

A device that works ahead of its host would have to stop for a value to be read between two steps.
So a thread reads the value of step i, and the host acts on it before step i + lag: by then it is
there, and all workers act at the same step.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

LAG = 2
"""Steps for which a device may have work while its host waits for a value."""


class Read(NamedTuple):
    """A value of a step, and when its device had computed it."""

    value: np.ndarray
    seconds: float
    """Of `time.perf_counter`."""


_Work: TypeAlias = tuple[tf.Tensor, Callable[[], None], "Future[Read]"]
"""A value, what to wait for before it is read, and where it goes."""


# `lag` is 0 where a device computes no step before its host has called it. `until_computed` gives a
# function that waits for emulated devices; real ones make a reader wait.
class LateReads:
    """A queue of values, one for each step."""

    def __init__(
        self, lag: int, until_computed: Callable[[], Callable[[], None]] = lambda: lambda: None
    ) -> None:
        self._lag, self._until_computed = lag, until_computed
        self._pending: deque[Future[Read]] = deque()
        self._todo: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, value: tf.Tensor) -> None:
        """Begin to read the value of the step that was called last."""
        future: Future[Read] = Future()
        self._pending.append(future)
        if not self._lag:
            future.set_result(Read(value.numpy(), time.perf_counter()))
            return
        if self._thread is None:
            # a daemon: after a lost worker it may wait for ever
            self._thread = threading.Thread(
                target=_read, args=(self._todo,), name="keras_het-reads", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._todo.put, None)
        self._todo.put((value, self._until_computed(), future))

    def take(self, all_of_them: bool = False) -> list[Read]:
        """Return the values that are due, oldest first, or all; wait for those not read yet."""
        number = len(self._pending) - (0 if all_of_them else self._lag)
        return [self._pending.popleft().result() for _ in range(number)]

    @property
    def are_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(future.done() for future in self._pending)

    def clear(self) -> None:
        """Forget what is not taken."""
        self._pending.clear()


def _read(todo: queue.SimpleQueue[_Work | None]) -> None:
    """Read values until there is nobody who wants them."""
    while (work := todo.get()) is not None:
        value, wait, future = work
        try:
            wait()
            future.set_result(Read(value.numpy(), time.perf_counter()))
        except Exception as error:
            future.set_exception(error)
        del work, value, wait, future
