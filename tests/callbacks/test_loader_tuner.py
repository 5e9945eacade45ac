"""LoaderTuner within fit: the same training, whatever it changes; exact waits; clear refusals."""

import logging
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from loader_training import (
    BATCH,
    ROWS,
    STEPS,
    Eager,
    EveryStep,
    build,
    dense,
    done,
    long,
    long_slices,
    moving,
    noting_load,
    shuffled,
    train,
    train_either,
    train_under_strategy,
)

from keras_het.callbacks import LoaderTuner
from keras_het.loader import Knobs, tunable_pipeline
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import threads_of
from keras_het.planning.loader import LoaderController, LoaderPlan

KNOBS = Knobs(2, 2, 2)


@pytest.mark.quick("True-1")
@pytest.mark.parametrize(("is_built", "steps_per_execution"), [(True, 1), (True, 4), (False, 1)])
def test_moves_change_nothing_in_the_training(is_built, steps_per_execution):
    tuner = moving()
    assert isinstance(EveryStep(LoaderPlan(1, 1), 2.0), LoaderController)
    options = {"steps_per_execution": steps_per_execution}
    tuned = train(lambda: tunable_pipeline(build) if is_built else build(KNOBS), [tuner], **options)
    untuned = train(lambda: build(KNOBS), [], **options)
    assert len(done(tuner)) >= 2
    assert tuned.seen == untuned.seen
    np.testing.assert_array_equal(tuned.get_weights()[0], untuned.get_weights()[0])
    assert tuner.train_input_wait.steps == 3 * STEPS
    assert tuner.observe_only_reason is None


@pytest.mark.full
def test_an_endless_pipeline_continues_over_epochs():
    def endless(knobs):
        return build(knobs).repeat()

    tuner = moving()
    tuned = train(tunable_pipeline(endless), [tuner], steps_per_epoch=7)
    rows = np.concatenate(tuned.seen)
    assert len(done(tuner)) >= 2
    assert len(rows) == 21 * BATCH
    assert sorted(rows[:ROWS]) == list(range(ROWS))


@pytest.mark.full
@pytest.mark.parametrize(("steps", "measured"), [(7, 3), (3, 1)])
def test_a_validation_is_in_no_window_of_an_endless_pipeline(steps, measured):
    def endless(knobs):
        return build(knobs).repeat()

    windows = []

    class Notes(Eager):
        def observe(self, window):
            windows.append(window.steps)

    tuner = LoaderTuner(Notes, cooperate_with_other_jobs=False)
    options = {"steps_per_epoch": steps, "validation_data": build(Knobs(2, 2, 2))}
    train(tunable_pipeline(endless), [tuner], **options)
    assert tuner.train_input_wait.steps == 3 * steps
    assert tuner.test_input_wait.steps == 3 * STEPS
    assert windows == [1] * (steps + 2 * measured)


@pytest.mark.full
def test_arrays_are_trained_as_without_it():
    x, y = np.arange(30.0).reshape(10, 3) / 30, np.arange(10.0)
    results = []
    for callbacks in ([], [moving()]):
        keras.utils.set_random_seed(1)
        model = dense()
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        results.append(model.get_weights()[0])
    np.testing.assert_array_equal(*results)


def generated():
    def rows():
        for row in range(8):
            yield np.full([3], row, np.float32), np.float32(row)

    signature = (tf.TensorSpec([3]), tf.TensorSpec([]))
    return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(2)


@pytest.mark.quick("alone")
def test_a_generator_is_only_observed(devices, caplog):
    tuner = moving()
    with caplog.at_level(logging.INFO, "keras_het"):
        train_either(devices, generated(), [tuner])
    assert "from_generator" in tuner.observe_only_reason
    assert "only observes" in caplog.text
    assert tuner.moves == []
    assert tuner.train_input_wait.steps == 3 * 4
    assert "from_generator" in tuner.best_settings().code


@pytest.mark.quick("alone")
def test_a_builder_that_fails_is_only_observed(devices):
    def fails_later(knobs):
        if knobs.threads == 5:
            raise RuntimeError("no such file")
        return long(knobs)

    tuner = moving()
    tf.random.set_seed(5)
    weights = []
    for data, callbacks in ((tunable_pipeline(fails_later, KNOBS), [tuner]), (long(KNOBS), [])):
        weights.append(train_either(devices, data, callbacks)[0])
    # the order of the strategy's samples stays that of the first build
    refused = {move.refused for move in tuner.moves}
    assert refused == ({None} if devices else {"no such file"})
    np.testing.assert_array_equal(*weights)


def test_a_builder_of_another_batch_size_is_refused():
    def changes(knobs):
        return build(knobs).unbatch().batch(2 + knobs.threads).prefetch(2)

    tuner = moving()
    tuned = train(tunable_pipeline(changes, Knobs(4, 2, 2)), [tuner], epochs=1)
    assert "batch size" in tuner.moves[0].refused
    assert sorted(np.concatenate(tuned.seen)) == list(range(ROWS))


def in_epochs(model, epochs):
    steps = len(model.seen) // epochs
    return [model.seen[epoch * steps : (epoch + 1) * steps] for epoch in range(epochs)]


@pytest.mark.quick("ordinary")
@pytest.mark.parametrize("kind", ["built", "repeats", "ordinary"])
def test_a_full_cache_is_left_alone(kind):
    calls = []
    load = noting_load(calls)

    def cached(knobs):
        rows = tf.data.Dataset.range(ROWS).map(load, knobs.num_parallel_calls).cache()
        rows = rows.repeat() if kind == "repeats" else rows
        return rows.batch(BATCH).prefetch(knobs.prefetch)

    tuner = moving()
    data = cached(Knobs(2, 2, 2)) if kind == "ordinary" else tunable_pipeline(cached)
    options = {"steps_per_epoch": STEPS} if kind == "repeats" else {}
    tuned = train(data, [tuner], epochs=6, **options)
    assert all(sorted(np.concatenate(epoch)) == list(range(ROWS)) for epoch in in_epochs(tuned, 6))
    assert len(calls) <= 3 * ROWS, "the cache is of use from the third epoch on"
    assert "cache in memory" in tuner.observe_only_reason


@pytest.mark.quick("snapshot-True", "cache in files-False")
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("kind", ["snapshot", "cache in files"])
def test_what_writes_files_is_only_observed(kind, is_built, tmp_path):
    calls = []
    load, path = noting_load(calls), str(tmp_path / "rows")

    def build_kept(knobs):
        rows = tf.data.Dataset.range(ROWS).map(load, knobs.num_parallel_calls)
        rows = rows.snapshot(path) if kind == "snapshot" else rows.cache(path)
        return rows.batch(BATCH).prefetch(knobs.prefetch)

    tuner = moving()
    tuned = train(tunable_pipeline(build_kept, KNOBS) if is_built else build_kept(KNOBS), [tuner])
    assert kind in tuner.observe_only_reason
    assert tuner.moves == []
    assert all(sorted(np.concatenate(epoch)) == list(range(ROWS)) for epoch in in_epochs(tuned, 3))
    known = len(calls)
    assert known <= 2 * ROWS, "what the first epoch wrote is read in the others"
    if kind == "cache in files":
        rows = [row for _, labels in build_kept(KNOBS) for row in labels.numpy()]
        assert sorted(rows) == list(range(ROWS))
        assert len(calls) == known, "the files of the first epoch are complete"


TRAINS = """
import keras, tensorflow as tf
import keras_het

def build(knobs):
    rows = tf.data.Dataset.range(4000).map(
        lambda row: (tf.fill([3], tf.cast(row, tf.float32)), tf.zeros([1])),
        num_parallel_calls=knobs.num_parallel_calls,
    )
    return rows.batch(4).prefetch(knobs.prefetch)

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tuner = keras_het.callbacks.LoaderTuner()
model.fit(keras_het.loader.tunable_pipeline(build), epochs=2, verbose=0, callbacks=[tuner])
print("trained", tuner.train_input_wait.steps)
"""


@pytest.mark.full
def test_a_process_ends_cleanly_right_after_fit():
    run = [sys.executable, "-c", TRAINS]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained 2000" in done.stdout


class Watch(keras.callbacks.Callback):
    """Notes what is read, the priorities of its threads, and whether a change is on its way."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner = tuner
        self.changes = []

    def on_train_batch_end(self, batch, logs=None):
        session = self.tuner._session
        threads = threads_of(session.live.iterator)
        if session.order is not None:
            threads = session.order.threads
        ids = threads.ids if threads is not None else ()
        self.changes += [
            session.live.iterator is not session.live.given,
            session.change is not None,
            any(priority(thread) != priority(0) for thread in ids),
        ]


def priority(thread):
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:  # it ended with its epoch
        return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.quick("alone-True")
@pytest.mark.parametrize("is_built", [True, False])
def test_the_fixed_controller_changes_nothing(is_built, devices):
    tuner = LoaderTuner("fixed", cooperate_with_other_jobs=False)
    watch = Watch(tuner)
    data = tunable_pipeline(long, KNOBS) if is_built else long(KNOBS)
    tf.random.set_seed(5)
    train_either(devices, data, [tuner, watch], epochs=2)
    assert len(watch.changes) == 3 * tuner.train_input_wait.steps > 0
    assert not any(watch.changes)
    assert tuner.moves == []
    assert "fixed" in tuner.observe_only_reason
    assert tuner.best_settings().knobs == (KNOBS if is_built else None)
    assert "nice" not in tuner.best_settings().code


@pytest.mark.full
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize(
    ("build_data", "is_built"), [(long, True), (long, False), (long_slices, True)]
)
def test_moves_under_the_strategy_change_no_bit(
    build_data, is_built, steps_per_execution, logical_devices
):
    results = []
    for tuner in (None, moving()):
        tf.random.set_seed(5)
        data = tunable_pipeline(build_data, KNOBS) if is_built else build_data(KNOBS)
        callbacks = [tuner] if tuner else []
        options = {"steps_per_execution": steps_per_execution, "epochs": 2}
        results.append(train_under_strategy(logical_devices, data, callbacks, **options))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert tuner.observe_only_reason is None
    assert len(done(tuner)) >= 3
    assert all(move.refused is None for move in tuner.moves)
    assert tuner.best_settings().knobs is not None


def samples(knobs):
    return shuffled(ROWS, knobs, None).batch(BATCH).prefetch(knobs.prefetch)


def slices(knobs):
    rows = shuffled(ROWS, knobs, None)
    return rows.padded_batch(BATCH, padded_shapes=([3], [])).prefetch(knobs.prefetch)


def drawn():
    later = tf.data.Dataset.range(50).shuffle(50)
    return [float(tf.random.uniform([])), *map(int, later)]


@pytest.mark.full
@pytest.mark.parametrize(("build", "is_built"), [(samples, True), (slices, True), (samples, False)])
def test_what_is_drawn_after_a_training_does_not_depend_on_its_moves(build, is_built, devices):
    results = []
    for tuner in (None, moving()):
        keras.utils.set_random_seed(5)
        data = tunable_pipeline(build, KNOBS) if is_built else build(KNOBS)
        trained = train_either(devices, data, [tuner] if tuner else [], epochs=2)
        results.append((trained, drawn()))
    assert len(done(tuner)) >= 1
    assert results[0][1] == results[1][1]
    for expected, found in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_shuffle_without_a_seed_gets_that_of_the_first_build():
    def seeds_of(dataset):
        nodes = filter(adapter.is_shuffle, adapter.upstream_of(dataset))
        return [adapter.shuffle_seeds(node) for node in nodes]

    def build(knobs):
        return tf.data.Dataset.range(9).shuffle(9).batch(2).shuffle(4)

    tf.random.set_seed(5)
    first, second = tunable_pipeline(build, KNOBS), tunable_pipeline(build, KNOBS)
    assert seeds_of(first) != seeds_of(second)
    for each in (first, second):
        assert seeds_of(each.build_again(Knobs(4, 4, 4))) == seeds_of(each)
