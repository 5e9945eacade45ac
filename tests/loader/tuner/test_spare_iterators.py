"""Iterators that are made before the epoch that uses them begins."""

import concurrent.futures
import threading

import keras
import pytest
import tensorflow as tf
from handover_pipelines import FIRST_ROUND, ORDERED, cached, plain, repeated, shuffled
from loader_training import dense, numbered

from keras_het.callbacks import LoaderTuner
from keras_het.loader import Knobs
from keras_het.loader.iterators import tunable
from keras_het.loader.iterators.live_iterator import LiveIterator
from keras_het.loader.iterators.tunable import (
    SpareIterators,
    build_tuned,
    tunable_pipeline,
)
from keras_het.loader.order.pass_counter import PassEnd
from keras_het.planning.loader import TunerController

FIRST, OTHER, EPOCHS = Knobs(2, 2, 2), Knobs(5, 3, 4), 4


@pytest.fixture
def executor():
    with concurrent.futures.ThreadPoolExecutor(1, "loader_tuner") as threads:
        yield threads


def values(iterator):
    return [tf.nest.map_structure(lambda leaf: leaf.numpy().tolist(), one) for one in iterator]


def epochs_of(build, executor=None, moves=False):
    """Elements of some epochs: with spares if there is an executor, and with moves around them."""
    source, result = tunable_pipeline(build, FIRST), []
    other = build_tuned(build, OTHER) if moves else None
    for epoch in range(EPOCHS):
        live = LiveIterator(iter(source))
        elements = [*live.take(2)]
        if executor is not None:
            source.make_spares(2, executor)
            concurrent.futures.wait(source._spares._waiting, timeout=60)
        if moves and epoch == 1:
            live.move_to(other)
            source.adopt(OTHER, other)
        result.append(values(elements) + values(live.iterator))
        iter(source)  # Keras makes one that it does not use
        live.release()
    return result


@pytest.mark.quick("shuffled-True", "plain-False", "mapped_batches-True")
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", ORDERED)
def test_spares_change_nothing(name, moves, executor):
    assert epochs_of(ORDERED[name], executor, moves) == epochs_of(ORDERED[name])


@pytest.mark.quick("cached")
@pytest.mark.parametrize("name", FIRST_ROUND)
def test_without_a_move_they_change_nothing_anywhere(name, executor):
    assert epochs_of(FIRST_ROUND[name], executor) == epochs_of(FIRST_ROUND[name])


def test_orders_that_were_taken_are_not_lost(executor):
    source, untouched = tunable_pipeline(shuffled, FIRST), tunable_pipeline(shuffled, FIRST)
    source.make_spares(2, executor)
    concurrent.futures.wait(source._spares._waiting, timeout=60)
    assert [values(source) for _ in range(3)] == [values(untouched) for _ in range(3)]


def test_a_move_drops_spares_of_a_pipeline_that_is_iterated_as_it_is(executor):
    source = tunable_pipeline(plain, FIRST)
    source.make_spares(2, executor)
    concurrent.futures.wait(source._spares._waiting, timeout=60)
    other = build_tuned(plain, OTHER)
    source.adopt(OTHER, other)
    assert iter(source)._dataset is other


@pytest.mark.parametrize("build", [cached, repeated])
def test_where_one_would_change_the_running_epoch_there_is_none(build, executor):
    source = tunable_pipeline(build, FIRST)
    source.make_spares(2, executor)
    assert source._spares.take() is None


def test_they_come_in_the_order_in_which_they_were_begun(executor):
    spares, numbers = SpareIterators(), iter(range(10))
    spares.begin(lambda: next(numbers), 3, executor)
    spares.begin(lambda: next(numbers), 3, executor)
    concurrent.futures.wait(spares._waiting, timeout=60)
    assert [spares.take() for _ in range(4)] == [0, 1, 2, None]


def test_nobody_waits_for_one_that_is_behind_other_work(executor):
    free = threading.Event()
    executor.submit(free.wait, 60)
    spares = SpareIterators()
    spares.begin(lambda: 1, 2, executor)
    try:
        assert spares.take() is None
    finally:
        free.set()


def test_who_asks_while_one_is_made_gets_it(executor):
    begun, free = threading.Event(), threading.Event()

    def make():
        begun.set()
        assert free.wait(60)
        return "made"

    spares = SpareIterators()
    spares.begin(make, 1, executor)
    assert begun.wait(60)
    threading.Timer(0.05, free.set).start()
    assert spares.take() == "made"


def test_an_error_is_left_to_who_asks(executor):
    spares = SpareIterators()
    spares.begin(lambda: 1 // 0, 1, executor)
    concurrent.futures.wait(spares._waiting, timeout=60)
    assert spares.take() is None


def test_the_end_is_near_half_a_second_or_four_steps_before_it():
    end = PassEnd()
    assert not end.is_near(1.0, 1)
    end.begin(100)
    assert next(step for step in range(1, 101) if end.is_near(0.02, 1)) == 75
    end.begin(100)
    assert next(step for step in range(1, 101) if end.is_near(10.0, 1)) == 96
    end.begin(None)
    assert not any(end.is_near(0.0, 1) for _ in range(100))


class Waiting(keras.callbacks.Callback):
    """Lets no step begin while a spare is being made."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def on_train_batch_end(self, batch, logs=None):
        concurrent.futures.wait(self.source._spares._waiting, timeout=60)


def test_in_fit_epochs_begin_with_iterators_that_were_made_before(monkeypatch):
    made, start = [], tunable.start

    def noting(dataset):
        made.append(threading.current_thread().name.split("_0")[0])
        return start(dataset)

    monkeypatch.setattr(tunable, "start", noting)
    source = tunable_pipeline(numbered(40), FIRST)
    tuner = LoaderTuner(
        lambda plan, cpus: TunerController(plan, cpus), cooperate_with_other_jobs=False
    )
    dense().fit(source, epochs=3, verbose=0, callbacks=[tuner, Waiting(source)])
    # the first epoch, two for each of the others, and one that Keras makes after the last
    assert made == ["MainThread", *["loader_tuner"] * 4, "MainThread"]
