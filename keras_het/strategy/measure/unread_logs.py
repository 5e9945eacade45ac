"""Logs of a step that are read from its device when a callback looks at them.

Keras turns the logs of each step into numbers as soon as one callback has a method for batches, and
a device that works ahead of its host would have to stop in each step for that.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_het import private_api
from keras_het.fit.session import Batches, StepFunction
from keras_het.strategy.measure.emulated_device import until_computed
from keras_het.strategy.measure.late_reads import LateReads
from keras_het.value_types import Nest

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


# All that look at values. With an iterator of its own, `dict(logs)` calls that and `__getitem__`.
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
