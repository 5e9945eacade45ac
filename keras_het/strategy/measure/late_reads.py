"""Values of finished steps, read without waiting for the device.

A device that works ahead of its host would have to stop for a value to be read between two steps.
So a thread reads the value of step i, and the host acts on it before step i + lag: by then it is
there, and all workers act at the same step.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.session import Batches, StepFunction
from keras_het.strategy.measure.emulated_device import until_computed
from keras_het.value_types import Nest

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


Logs = dict[str, Any]
_LATE = "_keras_het_late_logs"
_as_numbers: Callable[[Any], Logs] = private_api.keras_python_utils.pythonify_logs


class StepLogs(Logs):
    """What a step on a device that works ahead returns: tensors."""


class UnreadLogs(Logs):
    """The same for callbacks: numbers, all read where one of them is needed first."""

    def __init__(self, logs: StepLogs) -> None:
        super().__init__(logs)
        self._are_read, self._until_computed = False, until_computed()

    def read(self) -> None:
        """Wait for the device."""
        if not self._are_read:
            self._until_computed()
            self.update(self.numpy())
            self._are_read = True

    def numpy(self) -> Logs:
        """Return the numbers, as tensors do for `LateReads`."""
        return _as_numbers(self.tensors())

    def tensors(self) -> Logs:
        """Return what the step returned, or numbers if they are read already."""
        return dict(dict.items(self))


def _reading(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def reading(logs: UnreadLogs, *args: Any) -> Any:
        logs.read()
        return method(logs, *args)

    return reading


# All that look at values. With its own iterator, `dict(logs)` calls that and `__getitem__`.
for _name in (
    *("__getitem__", "__iter__", "__repr__", "__eq__", "__ne__", "__or__", "__ror__"),
    *("get", "items", "values", "copy", "pop", "popitem", "setdefault"),
):
    setattr(UnreadLogs, _name, _reading(_name))


def keep_unread(step: StepFunction, batches: Batches) -> Nest:
    """Keep Keras from reading the logs of a step; a layer around it."""
    logs = step(batches)
    return StepLogs(logs) if isinstance(logs, dict) else logs


class LateLogs:
    """What a progress bar shows: numbers of a step some time ago, for which no host waits."""

    def __init__(self) -> None:
        self._reads, self._known, self._latest = LateReads(1, until_computed), Logs(), 0.0

    def known_at(self, logs: UnreadLogs, interval_seconds: float) -> Logs:
        """Return the latest known numbers, and begin to read these if no others are being read."""
        if self._reads.are_done:
            self._known.update(*(read.value for read in self._reads.take(all_of_them=True)))
            if time.monotonic() > self._latest + interval_seconds:
                self._latest = time.monotonic()
                self._reads.add(logs)
        return self._known


def _late_logs(bar: keras.callbacks.ProgbarLogger, logs: UnreadLogs) -> Logs:
    progbar = bar.progbar  # a new one in each epoch
    if bar.verbose != 1 or progbar is None:
        return Logs()
    late: LateLogs = vars(progbar).setdefault(_LATE, LateLogs())
    return late.known_at(logs, progbar.interval)


def _given(original: Callable[..., None], choose: Callable[..., Logs]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_batch_end(
        callback: keras.callbacks.Callback, batch: int, logs: Logs | None = None
    ) -> None:
        logs = choose(callback, logs) if isinstance(logs, UnreadLogs) else logs
        original(callback, batch, logs)

    return on_batch_end


def _unless_unread(logs: Any) -> Logs:
    return UnreadLogs(logs) if isinstance(logs, StepLogs) else _as_numbers(logs)


@contextlib.contextmanager
def keras_passes_unread_logs() -> Iterator[None]:
    """Replace what reads them, during a training on a device that works ahead."""
    replaced: list[tuple[Any, str, Any]] = [
        (private_api.keras_python_utils, "pythonify_logs", _unless_unread)
    ]
    for owner, method, choose in (
        (keras.callbacks.ProgbarLogger, "on_train_batch_end", _late_logs),
        (keras.callbacks.ProgbarLogger, "on_test_batch_end", _late_logs),
        # goes through the logs of all steps, and reads those that it writes
        (keras.callbacks.TensorBoard, "on_train_batch_end", lambda _, logs: logs.tensors()),
    ):
        replaced.append((owner, method, _given(getattr(owner, method), choose)))
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield
