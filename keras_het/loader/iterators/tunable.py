"""A dataset that can be rebuilt with other knobs while it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import start
from keras_het.loader.iterators.handover import hand_over, has_memory_cache, hold_functions_of
from keras_het.planning.argument_checks import check_number, expect
from keras_het.planning.loader import LoaderPlan
from keras_het.usable_cpus import usable_cpus


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Settings of a pipeline that `build(knobs)` reads; elements and their order are the same.

    Args:
        num_parallel_calls: for every `map`, `interleave` and `batch` that runs in parallel.
        prefetch: batches of the last `prefetch`.
        threads: size of the pipeline's private thread pool; `num_parallel_calls` beyond it lets
            finished samples wait for their turn without a thread.

    Raises:
        ValueError: if a number is less than 1.
    """

    num_parallel_calls: int
    prefetch: int
    threads: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_number(name, value, least=1, whole=True)

    @classmethod
    def for_host(cls) -> Knobs:
        """Return initial settings: one thread per CPU that this process may use."""
        return cls.of_plan(LoaderPlan(max(math.ceil(usable_cpus()), 1), 2))

    @classmethod
    def of_plan(cls, plan: LoaderPlan) -> Knobs:
        """Return settings that put a plan into effect.

        Args:
            plan: loaders become threads; a thread has two calls, so it need not wait until its
                finished sample is taken in order.
        """
        return cls(2 * plan.loaders, plan.prefetch, plan.loaders)

    @property
    def plan(self) -> LoaderPlan:
        """The plan to which these settings correspond."""
        return LoaderPlan(self.threads, self.prefetch)

    def options(self) -> tf.data.Options:
        """The settings that are options of a dataset."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = self.threads
        return options


Build: TypeAlias = "Callable[[Knobs], tf.data.Dataset]"
"""Builds a `tf.data.Dataset`; the same elements and operations whatever the knobs are."""


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
        super().__init__(dataset, iterator_adapter.data_set_variant(dataset))

    @property
    def current(self) -> tf.data.Dataset:
        """The dataset that is iterated with the present knobs."""
        return self._current

    def build_again(self, knobs: Knobs) -> tf.data.Dataset:
        """Build the dataset with other knobs; works in any thread."""
        # Shuffles without a seed get those of the first build under the same global seed. The
        # program's sequence of seeds does not advance: workers that switch at different times would
        # differ later.
        with iterator_adapter.separate_operation_seeds(self._seeds):
            return build_tuned(self.build, knobs)

    def to_look_at(self) -> tf.data.Dataset:
        """Return the pipeline with the present knobs, for an iterator outside of training."""
        # A separate build takes no order from the sequence of a shuffle, and need not be handed
        # over.
        return self._current if self._is_direct else self.build_again(self.knobs)

    def adopt(self, knobs: Knobs, dataset: tf.data.Dataset) -> None:
        """Make iterators of another build from now on."""
        # The sequence of orders of a shuffle is that of the original dataset: every iterator begins
        # there and is handed over before its first element. Pipelines without a shuffle, those with
        # a cache in memory, which belongs to one build, and those with a `repeat`, which takes
        # several orders in one epoch, are iterated directly: later epochs have each element once,
        # but possibly in another order.
        is_first = knobs == self._first_knobs and not self._is_direct
        self.knobs, self._current = knobs, self._original if is_first else dataset

    def __iter__(self) -> tf.data.Iterator:
        if not tf.executing_eagerly():
            return super().__iter__()
        if self._current is self._original or self._is_direct:
            iterator = start(self._current)
        else:
            iterator = hand_over(iter(self._original), self._current)
        hold_functions_of(iterator, self._current)
        iterator.keras_het_pipeline = self
        return iterator


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


_SHUFFLE_OPERATIONS = frozenset(
    {"RandomShuffle", "ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"}
)
_DRAWING_OPERATIONS = adapter.RANDOM_VALUE_OPERATIONS | _SHUFFLE_OPERATIONS


def shares_a_shuffle(one: adapter.Dataset, other: adapter.Dataset) -> bool:
    """Tell whether two pipelines read from the same reshuffling shuffle: they share its orders."""
    nodes = {id(node) for node in adapter.upstream_of(one)}
    shuffles = (node for node in adapter.upstream_of(other) if adapter.is_reshuffled(node))
    return any(id(node) in nodes for node in shuffles)


def draws_an_order(dataset: adapter.Dataset) -> bool:
    """Tell whether a new iterator starts in a state that another build may not have."""
    return any(
        adapter.is_shuffle(node)
        or "Random" in type(node).__name__
        or adapter.operations_in_functions(node) & _DRAWING_OPERATIONS
        for node in adapter.upstream_of(dataset)
    )


def takes_a_place(dataset: adapter.Dataset) -> bool:
    """Tell whether one more iterator would change the orders of later ones, given seeds."""
    for node in adapter.upstream_of(dataset):
        kind = type(node).__name__
        if adapter.is_shuffle(node):
            if adapter.is_reshuffled(node) and adapter.shuffle_seeds(node) != (0, 0):
                return True
        elif "Shuffle" in kind or "Random" in kind:
            return True
    return False


def has_one_order_a_pass(stream: adapter.Dataset) -> bool:
    """Tell whether a pass left half-way, to continue elsewhere, does not affect later orders."""
    nodes = list(adapter.upstream_of(stream))
    shuffles = [node for node in nodes if adapter.is_reshuffled(node)]
    if not shuffles:
        return True
    # everything except `repeat` starts its source once
    return len(shuffles) == 1 and not any(
        adapter.is_repeat(node) and any(map(adapter.is_reshuffled, adapter.upstream_of(node)))
        for node in nodes
    )
