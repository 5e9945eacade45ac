"""Actual source of a training loop: the iterator it was given, or the next pipeline's."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

import numpy as np
import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import start, threads_of
from keras_het.loader.iterators.handover import hand_over, hold_functions_of, release
from keras_het.loader.iterators.tunable import TunablePipeline, pipeline_of
from keras_het.loader.nested import StepInput
from keras_het.loader.order.rows import count_bytes
from keras_het.planning.argument_checks import check_number
from keras_het.planning.shares import FloatArray

_Result = TypeVar("_Result")


class MeteredIterator:
    """Stand-in for another iterator in one execution of a step function."""

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
            if not self.steps:  # after StopIteration Keras continues with a result it does not have
                raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None
            raise
        finally:
            self.input_wait_seconds += time.perf_counter() - start
        self.steps += 1
        return element


class LiveIterator:
    """Timed reader of batches, whose pipeline may change between two of them."""

    def __init__(self, given: Iterator[StepInput], nice: int = 0) -> None:
        self.given: Iterator[StepInput] | None = given
        self.iterator: Iterator[StepInput] | None = given
        self.input_wait_seconds = 0.0
        self.batch_bytes: int | None = None
        self._nice = nice
        self._read: Callable[[], StepInput]
        self._use(given)

    @property
    def is_tf_data(self) -> bool:
        return isinstance(self.given, tf.data.Iterator)

    @property
    def pipeline(self) -> TunablePipeline | None:
        """The adjustable pipeline that the given iterator was made from, or None."""
        return pipeline_of(self.given)

    def take(self, count: int) -> list[StepInput]:
        batches: list[StepInput] = []
        start = time.perf_counter()
        try:
            for _ in range(count):
                batches.append(self._read())
        except (StopIteration, tf.errors.OutOfRangeError):
            if not batches:
                raise StopIteration from None
        finally:
            self.input_wait_seconds = time.perf_counter() - start
        if self.batch_bytes is None:
            self.batch_bytes = count_bytes(batches[0])
        return batches

    def run(
        self, step: Callable[[Iterator[StepInput] | list[StepInput]], _Result], count: int
    ) -> tuple[_Result, float, int]:
        """Run one execution; return its result, its input wait in seconds, and its steps."""
        if self.is_tf_data or self.given is None:
            batches = self.take(count)
            return step(batches), self.input_wait_seconds, len(batches)
        metered = MeteredIterator(self.given)
        return step(metered), metered.input_wait_seconds, metered.steps

    def move_to(self, dataset: tf.data.Dataset, prepared: tf.data.Iterator | None = None) -> None:
        self._go_on_in(hand_over(self.iterator, dataset, prepared), dataset)

    def begin_in(self, dataset: tf.data.Dataset) -> None:
        """Switch to another pipeline, whose model TensorFlow then shows."""
        self._go_on_in(start(dataset), dataset)

    def _go_on_in(self, new: tf.data.Iterator, dataset: tf.data.Dataset) -> None:
        old = self.iterator
        hold_functions_of(new, dataset)
        self.iterator = new
        self._use(new)
        release(old)

    def release(self) -> None:
        """End the pipeline in the background; the loop may still hold its iterator, unused."""
        if self.is_tf_data and self.iterator is not None:
            iterator, self.iterator, self.given = self.iterator, None, None
            self._read = _ended
            release(iterator)

    def lower_priority(self, nice: int) -> bool:
        self._nice = nice
        return threads_of(self.iterator).lower_priority(nice)

    def _use(self, iterator: Iterator[StepInput]) -> None:
        self._read = adapter.element_reader(iterator) if self.is_tf_data else iterator.__next__
        self.lower_priority(self._nice)


def _ended() -> NoReturn:
    raise StopIteration


class InputWaitMeter:
    """Time and input wait of the latest steps, and their sums.

    The wait is exact: it is the time between requesting a batch and receiving it. On a device that
    works asynchronously it is an upper bound of the device's idle time.

    Args:
        memory: number of steps to keep.

    Attributes:
        steps: number of steps so far.
        seconds: their time.
        input_wait_seconds: part of that time in which they waited for data.
    """

    def __init__(self, memory: int = 4096) -> None:
        check_number("memory", memory, least=1, whole=True)
        self._latest: collections.deque[tuple[float, float]] = collections.deque(maxlen=memory)
        self.steps = 0
        self.seconds = self.input_wait_seconds = 0.0

    def add(self, seconds: float, input_wait_seconds: float, steps: int = 1) -> None:
        """Add one step, or several that ran at once.

        Args:
            seconds: from the request for their batches to the request for the next ones.
            input_wait_seconds: part of that time in which they waited.
            steps: number of steps.
        """
        self._latest.append((seconds, input_wait_seconds))
        self.steps += steps
        self.seconds += seconds
        self.input_wait_seconds += input_wait_seconds

    @property
    def idle_fraction(self) -> float:
        """Part of the time in which the device waited for data."""
        return self.input_wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def input_waits(self) -> FloatArray:
        """Wait of the latest executions in seconds, the oldest first, float64."""
        return np.array([wait for _, wait in self._latest])

    @property
    def step_times(self) -> FloatArray:
        """Times of the latest executions in seconds, waits included, the oldest first, float64."""
        return np.array([seconds for seconds, _ in self._latest])

    def to_dict(self) -> dict[str, float]:
        """The sums and the quantiles of the latest waits, for JSON."""
        waits = self.input_waits
        median, high = np.quantile(waits, [0.5, 0.95]) if len(waits) else (0.0, 0.0)
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "input_wait_seconds": self.input_wait_seconds,
            "idle_fraction": self.idle_fraction,
            "median_wait_seconds": float(median),
            "p95_wait_seconds": float(high),
        }
