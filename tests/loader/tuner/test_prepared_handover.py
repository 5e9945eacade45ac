"""Handovers as training makes them: to an iterator that was made in the background before."""

from __future__ import annotations

import pytest
import tensorflow as tf
from handover_pipelines import FIRST_ROUND, ORDERED, UNORDERED, flat, records_of, write_records

from keras_het.loader import Knobs
from keras_het.loader.iterators.adjustable_pipeline import pipeline
from keras_het.loader.iterators.live_iterator import LiveIterator
from keras_het.loader.tuning.session import prepare_iterator

FIRST, EPOCHS = Knobs(2, 2, 2), 2
# epoch, batches taken before, knobs from then on: some come again, also the first ones
MOVES = [
    (0, 0, Knobs(5, 3, 4)),
    (0, 2, FIRST),
    (0, 5, Knobs(5, 3, 4)),
    (0, 9, Knobs(1, 1, 1)),
    (1, 4, FIRST),
]


def epochs_of(build, moves=(), epochs=EPOCHS):
    """The elements of some epochs, with handovers on the way as a tuning session makes them."""
    source = pipeline(build, FIRST)
    built, result = {}, []
    for epoch in range(epochs):
        live, elements = LiveIterator(iter(source)), []
        while True:
            for knobs in [knobs for *place, knobs in moves if place == [epoch, len(elements)]]:
                work = source.build_again, knobs, built.get(knobs), source.current
                built[knobs], prepared = prepare_iterator(*work)
                assert prepared is not None
                live.move_to(built[knobs], prepared)
                assert live.iterator is prepared
                source.adopt(knobs, built[knobs])
            try:
                (element,) = live.take(1)
            except StopIteration:
                break
            elements.append(tf.nest.map_structure(lambda leaf: leaf.numpy().tolist(), element))
        result.append(elements)
        live.release()
    return result


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return records_of(write_records(tmp_path_factory.mktemp("records")))


@pytest.mark.parametrize("name", ORDERED)
def test_the_same_elements_in_the_same_order(name):
    assert epochs_of(ORDERED[name], MOVES) == epochs_of(ORDERED[name])


@pytest.mark.parametrize("name", ["records", *FIRST_ROUND])
def test_the_same_order_in_the_running_epoch(name, records):
    build = FIRST_ROUND.get(name, records)
    assert epochs_of(build, MOVES, 1) == epochs_of(build, (), 1)


@pytest.mark.parametrize("name", ["records", *UNORDERED])
def test_each_element_exactly_once(name, records):
    build = UNORDERED.get(name, records)
    assert flat(epochs_of(build, MOVES)) == flat(epochs_of(build))
