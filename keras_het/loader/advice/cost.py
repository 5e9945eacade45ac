"""Cost of a part of a pipeline, measured by running it for a while."""

from __future__ import annotations

import dataclasses
import time

import tensorflow as tf

from keras_het.loader.iterators.held_iterator import release
from keras_het.loader.nested import Batch

_WARM_PART = 0.25
_SIZED_ELEMENTS = 32
_CHUNK = 16
_COUNTED_AT_ONCE = 64
_PROBE_PART = 0.1
_CHUNKED_BELOW = 2e-3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of an element.

    Args:
        seconds: time per element when the pipeline runs as fast as it can; 0 if it has none.
        bytes: mean memory per element.
    """

    seconds: float
    bytes: float


class _Run:
    """Repeated run of a data set; timing starts at the first element.

    Buffers fill before that; elements that follow soon may come out of them, and do not count.
    """

    def __init__(self, dataset: tf.data.Dataset, seconds: float) -> None:
        self.sizes: list[int] = []
        self.elements = self._counted_from = 0
        now = first = self._since = time.perf_counter()
        # a new iterator for each pass would optimise its functions again
        iterator = iter(dataset.repeat())
        for element in iterator:
            now = time.perf_counter()
            first = first if self.elements else now
            self.elements += 1
            if len(self.sizes) < _SIZED_ELEMENTS:
                self.sizes.append(_size_of(element))
            if self._counted_from == 0 and now >= first + _WARM_PART * seconds:
                self._since, self._counted_from = now, self.elements
            if now >= first + seconds and self.elements > self._counted_from:
                break
        self._stopped = now
        release(iterator)

    @property
    def seconds_per_element(self) -> float:
        counted = self.elements - self._counted_from
        return (self._stopped - self._since) / counted if counted else 0.0


def measure(
    dataset: tf.data.Dataset,
    seconds: float,
    options: tf.data.Options | None = None,
    in_chunks: bool = False,
) -> Cost:
    """Run a data set as fast as possible.

    Args:
        dataset: the data set to run; it is repeated if it ends early.
        seconds: how long to run.
        options: `tf.data.Options` to run it with.
        in_chunks: whether to pass only every 16th element to Python, which takes 0.1 ms for each
            element it receives, if they are quick.

    Returns:
        The cost per element.
    """
    if options is not None:
        dataset = dataset.with_options(options)
    if in_chunks and _Run(dataset, _PROBE_PART * seconds).seconds_per_element < _CHUNKED_BELOW:
        run = _Run(_every(dataset, _CHUNK), seconds)
        if run.elements:
            return Cost(run.seconds_per_element / _CHUNK, sum(run.sizes) / len(run.sizes))
    run = _Run(dataset, seconds)
    return Cost(run.seconds_per_element, sum(run.sizes) / max(len(run.sizes), 1))


def count(dataset: tf.data.Dataset, most: int, seconds: float) -> int | None:
    """Count the elements of a data set.

    Args:
        dataset: the data set to count.
        most: maximum number of elements to read.
        seconds: longest time to read.

    Returns:
        The number, or None if it is still unknown after that; -1 if it has no end.
    """
    known = int(dataset.cardinality())
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known
    iterator, end, found = iter(dataset), time.perf_counter() + seconds, 0
    for _ in iterator:
        found += 1
        if found > most or time.perf_counter() > end:
            release(iterator)
            return None
    return found


def has_more_than(dataset: tf.data.Dataset, most: int, seconds: float) -> bool | None:
    """Tell whether a data set has more elements than `most`; None if unknown in time.

    Args:
        dataset: the data set to count.
        most: the number to compare with.
        seconds: longest time to read.
    """
    known = int(dataset.cardinality())
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known < 0 or known > most
    # counted within TensorFlow: Python takes 0.1 ms for each element that it receives
    iterator = iter(dataset.map(lambda *_: 0).batch(_COUNTED_AT_ONCE))
    end, found = time.perf_counter() + seconds, 0
    for part in iterator:
        found += int(tf.shape(part)[0])
        if found > most or time.perf_counter() > end:
            release(iterator)
            return True if found > most else None
    return False


def is_read_within(
    dataset: tf.data.Dataset, seconds: float, options: tf.data.Options | None = None
) -> bool:
    """Read a data set once, and tell whether that took no longer than `seconds`."""
    iterator = iter(dataset if options is None else dataset.with_options(options))
    end = time.perf_counter() + seconds
    for _ in iterator:
        if time.perf_counter() > end:
            release(iterator)
            return False
    return True


def gives_any_within(
    dataset: tf.data.Dataset, seconds: float, options: tf.data.Options | None = None
) -> bool:
    """Tell whether a data set yields an element, tolerating errors for a limited time.

    Args:
        dataset: the data set to read.
        seconds: how long to keep reading after errors.
        options: `tf.data.Options` to read it with.
    """
    iterator = iter(dataset if options is None else dataset.with_options(options))
    end = time.perf_counter() + seconds
    try:
        while True:
            try:
                return next(iterator, None) is not None
            except tf.errors.OpError:
                if time.perf_counter() > end:
                    return False
    finally:
        release(iterator)


def _every(dataset: tf.data.Dataset, chunk: int) -> tf.data.Dataset:
    numbered = dataset.enumerate().filter(lambda number, _: number % chunk == chunk - 1)
    return numbered.map(lambda _, element: element)


def _size_of(element: Batch) -> int:
    total = 0
    for part in tf.nest.flatten(element, expand_composites=True):
        if isinstance(part, tf.Tensor):
            value = part.numpy()
            if part.dtype == tf.string:
                total += sum(len(text) for text in getattr(value, "flat", [value]))
            else:
                total += value.nbytes
    return total
