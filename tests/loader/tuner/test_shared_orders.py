"""Moves under the strategy where several inputs take orders of one dataset."""

import pytest
import tensorflow as tf
from test_order_tuning import COUNTS, FIRST, in_effect, repeated, row, shuffled
from test_order_tuning import executor as executor  # a fixture
from workers import Schedule, _one_step, collect

from keras_het.loader import GlobalOrderDataset, Knobs, tunable_pipeline
from keras_het.planning import ReplicaLayout

EPOCHS, ROWS = 3, 47


def inputs(build, is_built):
    """For each worker its own dataset, and two inputs of that: one to train, one to evaluate."""
    made = []
    for index in range(len(COUNTS)):
        dataset = tunable_pipeline(build, FIRST) if is_built else build(FIRST)
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


def shuffled_twice(knobs):
    rows = tf.data.Dataset.range(ROWS).shuffle(11, seed=4).shuffle(7, seed=5)
    return rows.map(row, knobs.num_parallel_calls).batch(5).prefetch(knobs.prefetch)


@pytest.mark.full
@pytest.mark.parametrize("evaluates_at", [(1,), (6,), (0, 4, 9)])
@pytest.mark.parametrize("steps_evaluated", [None, 2])
@pytest.mark.parametrize("build", [shuffled, repeated, shuffled_twice])
@pytest.mark.parametrize("is_built", [True, False])
def test_an_evaluation_of_the_same_data_leaves_all_orders(
    is_built, build, steps_evaluated, evaluates_at, executor
):
    options = (evaluates_at, steps_evaluated)
    expected, _ = train(inputs(build, is_built), executor, False, *options)
    seen, done = train(inputs(build, is_built), executor, True, *options)
    assert seen == expected
    assert done >= EPOCHS


def test_moves_write_no_warning(executor, caplog):
    ((worker, _), _) = inputs(shuffled, True)
    iterator = iter(worker)
    next(iterator)
    for threads in (3, 4):
        assert in_effect(worker.tuning.prepare(Knobs(1, 1, threads), executor))
        next(iterator)
    assert "private_threadpool_size" not in caplog.text
