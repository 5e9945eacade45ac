"""Passes over the data: counted as tf.data counts iterators, and skipped."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter

Pass = bool | int
"""Whether a pass was iterated; the number of its steps if it was left before its end."""


class PassCounter:
    """Counter of the passes over one dataset, or over all that read from one shuffle."""

    # A reshuffling `shuffle` has a new order for each iterator that is made, used or not, and Keras
    # makes one at the end of each epoch that it does not use: on one device epochs have the orders
    # 0, 2, 4, ... So a pass is numbered when its iterator is made, and those that were never
    # iterated are skipped. Datasets that read from one `shuffle` take its orders in turn on one
    # device; here each may have a copy of it, which has to skip the passes of the others.

    def __init__(self) -> None:
        self.gone_by: list[Pass] = []
        self.unfinished: set[int] = set()
        self._reserved = 0
        self._places: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()

    def reserve(self) -> int:
        self._reserved += 1
        return self._reserved - 1

    def give_back(self, number: int) -> None:
        """Take back a number, if it is the latest, so that the next iterator gets it."""
        if self._reserved == number + 1:
            self._reserved = number

    def start(self, number: int) -> int:
        self.gone_by += [False] * max(0, number - len(self.gone_by)) + [True]
        self._reserved = max(self._reserved, len(self.gone_by))
        self.unfinished.add(len(self.gone_by) - 1)
        return len(self.gone_by) - 1

    def catch_up(self, shuffle: tf.data.Dataset, number: int) -> list[Pass]:
        """Bring a copy of the shuffle to the pass `number`, which starts now."""
        place = self._places.get(shuffle, 0)
        self._places[shuffle] = max(place, number + 1)
        return self.gone_by[place:number]

    def is_at(self, shuffle: tf.data.Dataset, number: int) -> None:
        """Record that the next pass of a copy of the shuffle is the one with this number."""
        self._places[shuffle] = number

    def finish(self, number: int) -> None:
        self.unfinished.discard(number)

    def leave(self, number: int, steps: int) -> None:
        """Record the number of steps done in a pass that is abandoned."""
        if number in self.unfinished and number < len(self.gone_by):
            self.gone_by[number] = steps

    def before(self, number: int | None) -> tuple[Pass, ...]:
        """Return the passes before one, or before the next iterator if it is None."""
        if number is not None:
            return tuple(self.gone_by[:number])
        return (*self.gone_by, *[False] * (self._reserved - len(self.gone_by)))

    def set_to(self, gone_by: Iterable[Pass]) -> None:
        self.gone_by = list(gone_by)
        self.unfinished = set()
        self._reserved = len(self.gone_by)


def fresh_copy(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the same pipeline with every reshuffling `shuffle` back at its first iteration."""
    if not any(adapter.is_reshuffled(node) for node in adapter.upstream_of(dataset)):
        return dataset
    if not (
        adapter.is_map(dataset) or adapter.is_batch(dataset) or adapter.commutes_with_map(dataset)
    ):
        raise ValueError(
            "Cannot go back to an earlier order of this pipeline: a shuffle with "
            f"reshuffle_each_iteration is below {type(dataset).__name__}. Resume in a new process "
            "before the first iteration, or shuffle after that operation."
        )
    return adapter.rebuild_on(dataset, fresh_copy(adapter.inputs_of(dataset)[0]))


def advance(dataset: tf.data.Dataset, passes: Iterable[Pass]) -> None:
    """Skip passes over the data, as cheaply as the pipeline allows."""
    # A shuffle's order depends on how often it was started. If a pass starts each shuffle once,
    # starting is enough; a shuffle that reads from another starts that with its first element;
    # under anything else (`repeat` starts its source several times) the passes are run as far as
    # they went.
    if adapter.first_reshuffled(dataset) is None:
        return
    options = tf.data.Options()
    options.autotune.enabled = False  # its threads would delay the end of the iterator
    quiet = dataset.with_options(options)
    for iterated in passes:
        iterator = iter(quiet)
        if not iterated:
            continue
        if not starts_once(dataset):
            # how far a pass over infinite data got that still runs is unknown
            is_known = iterated is not True or dataset.cardinality() != tf.data.INFINITE_CARDINALITY
            steps = None if iterated is True and is_known else int(iterated)
            for _ in itertools.islice(iterator, steps):
                pass
        elif nests_shuffles(dataset):
            next(iterator, None)


def starts_once(node: tf.data.Dataset) -> bool:
    """Tell whether one pass over a pipeline starts every reshuffling shuffle exactly once."""
    while adapter.inputs_of(node) and adapter.first_reshuffled(node) is not None:
        if adapter.is_repeat(node) or not (
            adapter.is_map(node) or adapter.is_batch(node) or adapter.commutes_with_map(node)
        ):
            return False
        node = adapter.inputs_of(node)[0]
    return True


def nests_shuffles(node: tf.data.Dataset) -> bool:
    return sum(map(adapter.is_shuffle, adapter.upstream_of(node))) > 1
