"""A dataset that can be rebuilt with other knobs while it runs."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from keras_het.ignored_errors import ignore_errors
from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host.threads import start
from keras_het.loader.iterators.handover import hand_over, has_memory_cache
from keras_het.loader.iterators.held_iterator import hold_functions_of
from keras_het.loader.iterators.knobs import Build, Knobs
from keras_het.loader.iterators.replayable import draws_an_order
from keras_het.planning.argument_checks import expect

_Spare: TypeAlias = "tuple[tf.data.Dataset, tf.data.Iterator]"
"""An iterator, after the dataset that it iterates."""


class SpareIterators:
    """Iterators handed out in the order in which they were begun, which is that of their orders."""

    def __init__(self) -> None:
        self._waiting: collections.deque[concurrent.futures.Future[_Spare]] = collections.deque()

    def begin(
        self, make: Callable[[], _Spare], count: int, executor: concurrent.futures.Executor
    ) -> None:
        while len(self._waiting) < count:
            self._waiting.append(executor.submit(make))

    def clear(self) -> None:
        while self._waiting:
            self._waiting.popleft().cancel()

    def take(self) -> _Spare | None:
        """Return the next spare, waiting for one that is being made; None if there is none."""
        while self._waiting:
            future = self._waiting.popleft()
            # queued behind other work: the caller makes it sooner
            if not future.cancel():
                with ignore_errors("looking ahead"):  # the caller meets the error again
                    return future.result()
        return None


def tunable_pipeline(build: Build, knobs: Knobs | None = None) -> TunablePipeline:
    """Make a dataset whose parallelism can change while it is iterated.

        def build(knobs):
            files = tf.data.Dataset.list_files("images/*.jpg", seed=1)
            images = files.map(decode, num_parallel_calls=knobs.num_parallel_calls)
            return images.batch(64).prefetch(knobs.prefetch)

        model.fit(keras_het.loader.tunable_pipeline(build),
        callbacks=[keras_het.callbacks.LoaderTuner()])

    Args:
        build: builds a `tf.data.Dataset`. It must consist of the same operations with the same
            arguments whatever the knobs are; only numbers of parallel calls and the size of
            `prefetch` may depend on them. For a reproducible order, give shuffles a seed or set a
            global one.
        knobs: initial settings; one thread per CPU by default. They stay without a `LoaderTuner`.

    Returns:
        A `tf.data.Dataset` with the elements of `build(knobs)`.

    Raises:
        TypeError: if `build` does not return a `tf.data.Dataset`.
    """
    expect(callable(build), "a function of knobs that returns a dataset", build=build)
    is_right = knobs is None or isinstance(knobs, Knobs)
    expect(is_right, "keras_het.loader.Knobs(...)", knobs=knobs)
    knobs = knobs or Knobs.for_host()
    seeds = iterator_adapter.operation_seed_state()
    return TunablePipeline(build, knobs, build_tuned(build, knobs), seeds)


def build_tuned(build: Build, knobs: Knobs) -> tf.data.Dataset:
    dataset = build(knobs)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "build must return a tf.data.Dataset. Received: "
            f"{dataset!r} of type {type(dataset)} from {build}."
        )
    return dataset.with_options(knobs.options())


class TunablePipeline(iterator_adapter.UnchangedElementsDataset):
    """A dataset made by `pipeline`.

    Args:
        build: builds the dataset.
        knobs: settings of `dataset`.
        dataset: the result of `build` for them.
        seeds: state of the sequence of operation seeds before `build` made it.

    Attributes:
        build: builds the dataset.
        knobs: settings of the iterators made from now on.
    """

    def __init__(
        self,
        build: Build,
        knobs: Knobs,
        dataset: tf.data.Dataset,
        seeds: iterator_adapter.SeedState | None = None,
    ) -> None:
        self.build = build
        self._seeds = seeds
        self.knobs = self._first_knobs = knobs
        self._original = self._current = dataset
        has_cache, draws = has_memory_cache(dataset), draws_an_order(dataset)
        repeats = any(adapter.is_repeat(node) for node in adapter.upstream_of(dataset))
        self._is_direct = has_cache or repeats or not draws
        # an iterator made while a cache fills would fill it again, and one made before the later
        # rounds of a `repeat` would take the order of one of them
        self._can_have_spares = not has_cache and not (repeats and draws)
        self._spares = SpareIterators()
        super().__init__(dataset, iterator_adapter.data_set_variant(dataset))

    @property
    def current(self) -> tf.data.Dataset:
        """The dataset that is iterated with the present knobs."""
        return self._current

    def build_again(self, knobs: Knobs) -> tf.data.Dataset:
        """Build the dataset with other knobs; works in any thread.

        Shuffles without a seed get those of the first build under the same global seed. The
        program's sequence of seeds does not advance: workers that switch at different times would
        draw different numbers later on.
        """
        with iterator_adapter.separate_operation_seeds(self._seeds):
            return build_tuned(self.build, knobs)

    def to_look_at(self) -> tf.data.Dataset:
        """Return the pipeline with the present knobs, for an iterator outside of training.

        It is a separate build, so it takes no order from the sequence of a shuffle, and need not be
        handed over. With a cache in memory or a `repeat`, it is the pipeline that is trained on.
        """
        return self._current if self._is_direct else self.build_again(self.knobs)

    def adopt(self, knobs: Knobs, dataset: tf.data.Dataset) -> None:
        """Make iterators from now on those of another build.

        The sequence of orders of a shuffle is that of the original dataset: every iterator begins
        there and is handed over before its first element. Pipelines without a shuffle, those with a
        cache in memory, which belongs to one build, and those with a `repeat`, which takes several
        orders from the sequence in one epoch, are iterated directly instead. If a pipeline has such
        a part or several shuffles, later epochs, and later rounds of a `repeat`, have each element
        once, but possibly in a different order than without a handover.
        """
        is_first = knobs == self._first_knobs and not self._is_direct
        self.knobs, self._current = knobs, self._original if is_first else dataset
        if self._is_direct:
            self._spares.clear()

    def __iter__(self) -> tf.data.Iterator:
        if not tf.executing_eagerly():
            return super().__iter__()
        dataset, iterator = self._spares.take() or (None, None)
        if iterator is None or (dataset is not self._current and self._is_direct):
            iterator = self._make()[1]
        elif dataset is not self._current:
            iterator = hand_over(iterator, self._current)
        hold_functions_of(iterator, self._current)
        iterator.keras_het_pipeline = self
        return iterator

    def make_spares(self, count: int, executor: concurrent.futures.Executor) -> None:
        """Start making the next iterators, which the next calls of `iter` then return.

        Orders are unaffected: a shuffle assigns them to its iterators as these are made. Pipelines
        whose orders would change get no spares.
        """
        if self._can_have_spares:
            self._spares.begin(self._make, count, executor)

    def _make(self) -> _Spare:
        dataset = self._current
        if dataset is self._original or self._is_direct:
            return dataset, start(dataset)
        return dataset, hand_over(iter(self._original), dataset)


def pipeline_of(iterator: object) -> TunablePipeline | None:
    return getattr(iterator, "keras_het_pipeline", None)


def plain_pipeline(dataset: tf.data.Dataset) -> TunablePipeline:
    """Wrap an ordinary dataset, whose thread pool and final `prefetch` of a number can change."""
    options = dataset.options()
    node = dataset
    while adapter.is_options(node):
        (node,) = adapter.inputs_of(node)
    size = prefetch_size(dataset)

    def build(knobs: Knobs) -> tf.data.Dataset:
        if size is None:
            return dataset
        (source,) = adapter.inputs_of(node)
        return source.prefetch(knobs.prefetch).with_options(options)

    first = Knobs.for_host()
    threads = options.threading.private_threadpool_size or first.threads
    knobs = Knobs(2 * threads, size or first.prefetch, threads)
    return TunablePipeline(build, knobs, build_tuned(build, knobs))


def prefetch_size(dataset: tf.data.Dataset) -> int | None:
    node = dataset
    while adapter.is_options(node):
        (node,) = adapter.inputs_of(node)
    if not adapter.is_prefetch_or_options(node):
        return None
    size = adapter.constant(node._buffer_size)
    return int(size) if size is not None and size > 0 else None
