"""Moves under the strategy where several inputs take orders of one dataset."""

import numpy as np
import pytest
import tensorflow as tf
from test_order_tuning import COUNTS, FIRST, go_on_until_moved, in_effect, repeated, row, shuffled
from test_order_tuning import executor as executor  # a fixture
from workers import Schedule, _one_step, collect

from keras_het.loader import GlobalOrderDataset, HandoverError, Knobs, pipeline
from keras_het.planning import ReplicaLayout

EPOCHS, ROWS = 3, 47


def inputs(build, is_built):
    """For each worker its own dataset, and two inputs of that: one to train, one to evaluate."""
    made = []
    for index in range(len(COUNTS)):
        dataset = pipeline(build, FIRST) if is_built else build(FIRST)
        layout = ReplicaLayout(COUNTS, index)
        made.append(
            [
                GlobalOrderDataset(dataset, layout, Schedule([[1, 2, 1]]), lambda *pair: pair)
                for _ in range(2)
            ]
        )
    return made


def train(made, executor, moves, evaluates_at, steps_evaluated=None):
    """Rows of each step of all workers together, of which only the first one moves."""
    workers, others = zip(*made, strict=True)
    seen, done = [], 0
    for epoch in range(EPOCHS):
        iterators, running = [iter(worker) for worker in workers], None
        for step in range(1000):
            elements = [next(iterator, None) for iterator in iterators]
            if None in elements:
                assert elements == [None] * len(workers), "workers end at different steps"
                break
            seen.append(_one_step(elements, COUNTS))
            if moves and running is None and step % 3 == 0:
                running = workers[0].tuning.prepare(Knobs(1 + step, 1, 1 + epoch), executor)
            if running is not None and in_effect(running):
                running, done = None, done + 1
            if step in evaluates_at:
                seen.append(collect([iter(other) for other in others], COUNTS, steps_evaluated))
        if running is not None:
            running.cancel()
        seen.append("end of an epoch")
    return seen, done


@pytest.mark.full
@pytest.mark.parametrize("evaluates_at", [(1,), (6,), (0, 4, 9)])
@pytest.mark.parametrize("steps_evaluated", [None, 2])
@pytest.mark.parametrize("is_built", [True, False])
def test_an_evaluation_of_the_same_data_leaves_all_orders(
    is_built, steps_evaluated, evaluates_at, executor
):
    options = (evaluates_at, steps_evaluated)
    expected, _ = train(inputs(shuffled, is_built), executor, False, *options)
    seen, done = train(inputs(shuffled, is_built), executor, True, *options)
    assert seen == expected
    assert done >= EPOCHS


@pytest.mark.full
def test_an_iterator_that_starts_late_has_the_number_of_its_order(executor):
    """Keras makes the iterator of the next epoch before it evaluates, if it is told the steps."""
    ((worker, other), _) = inputs(shuffled, True)
    first = collect([iter(worker)], (COUNTS[0],))[1]
    late = iter(worker)
    collect([iter(other)], (COUNTS[0],))
    assert next(late) is not None
    assert late.pass_number == 3  # the evaluation had the order after its own
    steps = 1 + go_on_until_moved(worker, late, Knobs(1, 1, 3), executor)
    rest = collect([late], (COUNTS[0],))[1]
    assert steps + len(rest) == len(first)


@pytest.mark.full
def test_every_sample_comes_once_where_an_iterator_starts_late(executor):
    made = inputs(shuffled, True)
    iterators = None
    for _ in range(EPOCHS):
        iterators = iterators or [iter(worker) for worker, _ in made]
        rows, running = [], None
        for step in range(len(made[0][0])):
            rows += _one_step([next(iterator) for iterator in iterators], COUNTS)
            if running is None:
                running = made[0][0].tuning.prepare(Knobs(1 + step, 1, 2), executor)
            running = None if in_effect(running) else running
        assert len(set(rows)) == len(rows) == ROWS
        if running is not None:
            running.cancel()
        iterators = [iter(worker) for worker, _ in made]  # and only then
        collect([iter(other) for _, other in made], COUNTS)


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_built", [True, False])
def test_orders_that_are_not_known_are_refused(is_built, executor):
    """A `repeat` takes several orders of a shuffle in a pass: how many, if it is left half-way?"""
    ((worker, _), _) = inputs(repeated, is_built)
    iterator = iter(worker)
    next(iterator), next(iterator)
    go_on_until_moved(worker, iterator, Knobs(1, 1, 3), executor)
    later = iter(worker)  # the one before is left half-way
    next(later), next(later)
    running = worker.tuning.prepare(Knobs(1, 1, 2), executor)
    with pytest.raises(HandoverError, match="several orders of a shuffle"):
        in_effect(running)
    numbers = [each[0][0][1].numpy() for each in later]
    assert np.concatenate(numbers).size > 0


@pytest.mark.full
def test_an_evaluation_within_the_epoch_is_refused_too(executor):
    ((worker, other), _) = inputs(repeated, True)
    iterator = iter(worker)
    next(iterator), next(iterator)
    collect([iter(other)], (COUNTS[0],))
    running = worker.tuning.prepare(Knobs(1, 1, 2), executor)
    with pytest.raises(HandoverError, match="several orders of a shuffle"):
        in_effect(running)


@pytest.mark.full
def test_a_move_writes_no_warning(executor, caplog):
    ((worker, _), _) = inputs(shuffled, False)
    iterator = iter(worker)
    next(iterator)
    for threads in (3, 4):
        go_on_until_moved(worker, iterator, Knobs(1, 1, threads), executor)
        assert worker.form.options.threading.private_threadpool_size == threads
    assert "private_threadpool_size" not in caplog.text


def shuffled_twice(knobs):
    rows = tf.data.Dataset.range(ROWS).shuffle(11, seed=4).shuffle(7, seed=5)
    return rows.map(row, knobs.num_parallel_calls).batch(5).prefetch(knobs.prefetch)


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_built", [True, False])
def test_two_shuffles_are_left_alone_where_another_input_reads_them(is_built, executor):
    """The first one takes its order with a first element, the second with the iterator."""
    ((worker, other), _) = inputs(shuffled_twice, is_built)
    iterator = iter(worker)
    next(iterator)
    preparation = worker.tuning.prepare(Knobs(1, 1, 3), executor)
    with pytest.raises(HandoverError, match="several shuffles"):
        in_effect(preparation)
    assert other.cardinality == len(list(iterator)) + 1
