"""`steps_per_execution`: k steps are one call from Python, with the numbers of k calls."""

import contextlib
import functools
import itertools
import os
import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

import keras_het
from keras_het import HeterogeneousStrategy
from keras_het.loader.input import step_iterator
from keras_het.strategy.executions import Execution
from keras_het.strategy.measure import compute_times

ROWS, BATCH, K = 44, 6, 3  # 8 batches, the last one of 2 rows: executions of 3, 3 and 2 steps
SHARES = {"one device": (1,), "uneven": (5, 2), "empty": (0, 1)}


def arrays(rows=ROWS, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 4))
    return x, x.sum(axis=1, keepdims=True) ** 2


def batches(rows=ROWS, seed=0):
    return tf.data.Dataset.from_tensor_slices(arrays(rows, seed)).batch(BATCH)


def unknown(dataset):
    return dataset.filter(lambda *_: True)


class Traced(keras.layers.Layer):
    """Counts how often its models are traced for training."""

    traces = 0

    def call(self, inputs, training=False):
        self.traces += bool(training) and tf.inside_function()
        return inputs


def small_model(steps_per_execution, inputs=None, **compiled):
    keras.utils.set_random_seed(5)
    dense = functools.partial(keras.layers.Dense, dtype="float64")
    first = [keras.Input((4,), dtype="float64")] if inputs is None else inputs
    normalization = keras.layers.BatchNormalization(synchronized=True, dtype="float64")
    layers = [*first, Traced(dtype="float64"), dense(5, "tanh"), normalization, dense(1)]
    model = keras.Sequential(layers)
    compiled = {"metrics": ["mae"], "jit_compile": False, **compiled}
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution, **compiled)
    return model


def built(shares, steps_per_execution=K, **options):
    """The model on one device, or under a strategy."""
    strategy = None
    if shares is not None:
        strategy = HeterogeneousStrategy(devices=DEVICES[: len(shares)], share_weights=shares)
    with strategy.scope() if strategy else contextlib.nullcontext():
        return small_model(steps_per_execution, **options)


class Events(keras.callbacks.Callback):
    """Everything that Keras tells a callback."""

    def __init__(self):
        super().__init__()
        self.seen = []
        for loop, what in itertools.product(("train", "test", "predict"), ("begin", "end")):
            for name in (f"on_{loop}_{what}", f"on_{loop}_batch_{what}", f"on_epoch_{what}"):
                setattr(self, name, functools.partial(self._note, name))

    def _note(self, name, *arguments, logs=None):
        *numbers, logs = (*arguments, logs)[: 2 if "batch" in name or "epoch" in name else 1]
        logs = {k: np.array(v) for k, v in (logs or {}).items() if k != "outputs"}
        self.seen.append((name, *numbers, logs))


def assert_same_events(ours, expected):
    assert [event[:-1] for event in ours.seen] == [event[:-1] for event in expected.seen]
    for (*_, own), (*_, others) in zip(ours.seen, expected.seen, strict=True):
        assert own.keys() == others.keys()
        for name, value in others.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-6)  # losses are float32


def assert_same_weights(model, expected):
    for own, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-9, atol=1e-9)


def every_loop(model, data, **options):
    events = Events()
    data = data()
    model.fit(data, epochs=2, verbose=0, callbacks=[events], **options)
    model.evaluate(data, verbose=0, callbacks=[events])
    return events, model.predict(data, verbose=0, callbacks=[events])


WAYS = {
    "known": (batches, {}),
    "unknown": (lambda: unknown(batches()), {}),
    "validation": (batches, {"validation_data": arrays(20, 1), "validation_batch_size": 6}),
    "steps of an epoch": (batches, {"steps_per_epoch": 4}),
    "steps beyond a pass": (lambda: batches().repeat(3), {"steps_per_epoch": 5}),
}


CASES = [*(("uneven", way) for way in WAYS), ("one device", "unknown"), ("empty", "validation")]


@pytest.mark.full
@pytest.mark.parametrize(("shares", "way"), CASES)
def test_callbacks_and_numbers_equal_keras(shares, way):
    data, options = WAYS[way]
    expected, model = built(None), built(SHARES[shares])
    events, predicted = every_loop(model, data, **options)
    events_of_keras, expected_predictions = every_loop(expected, data, **options)
    assert_same_events(events, events_of_keras)
    assert_same_weights(model, expected)
    np.testing.assert_allclose(predicted, expected_predictions, rtol=1e-6)


@pytest.fixture
def calls(monkeypatch):
    """Calls of a graph from Python, and steps that are started from Python."""
    counted = types.SimpleNamespace(executions=0, steps=0)
    find, one_by_one = Execution._function_for, Execution.__init__

    def found(self, *arguments):
        counted.executions += 1
        return find(self, *arguments)

    def watching(self, data_path, model, function):
        def step(batches):
            counted.steps += not tf.inside_function()
            return function(batches)

        one_by_one(self, data_path, model, step)

    monkeypatch.setattr(Execution, "_function_for", found)
    monkeypatch.setattr(Execution, "__init__", watching)
    return counted


@pytest.mark.full
@pytest.mark.parametrize("shares", [(1,), (5, 2)])
def test_an_execution_is_one_call(shares, calls):
    model = built(shares)
    model.fit(batches(), epochs=2, verbose=0)
    assert (calls.executions, calls.steps) == (6, 0)
    model.evaluate(unknown(batches()), verbose=0)
    assert (calls.executions, calls.steps) == (6 + 3, 0)
    assert model.optimizer.iterations.numpy() == 16


@pytest.mark.full
def test_eager_steps_are_run_one_by_one(calls):
    built((5, 2), run_eagerly=True).fit(batches(), verbose=0)
    assert calls.executions == 0 and calls.steps > 0


@pytest.mark.full
def test_number_of_steps_shares_and_sizes_make_no_trace(calls):
    model = built((5, 2))
    strategy = model.distribute_strategy
    traced = model.layers[0]

    def change(epoch, _):
        strategy.set_share_weights([(1, 3), (1, 0), (2, 2)][epoch])

    changes = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    model.fit(batches(), epochs=3, verbose=0, callbacks=[changes])
    before = traced.traces
    model.fit(batches(9), epochs=2, verbose=0)
    model.steps_per_execution = 5
    model.fit(batches(), verbose=0)
    assert traced.traces == before == 2  # one for each replica
    assert calls.steps == 0


def of_lengths(lengths):
    def rows():
        for length in lengths:
            yield np.full([3, length], 0.1 * length), np.ones([3, 1])

    specs = tf.TensorSpec([3, None], tf.float64), tf.TensorSpec([3, 1], tf.float64)
    return tf.data.Dataset.from_generator(rows, output_signature=specs)


def model_of_lengths(steps_per_execution):
    keras.utils.set_random_seed(5)
    x = keras.Input((None,), dtype="float64")
    rows = keras.layers.Reshape((-1, 1), dtype="float64")(Traced(dtype="float64")(x))
    pooled = keras.layers.GlobalAveragePooling1D(dtype="float64")(rows)
    model = keras.Model(x, keras.layers.Dense(1, dtype="float64")(pooled))
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=steps_per_execution)
    return model


@pytest.mark.full
def test_other_lengths_make_one_more_trace():
    lengths = [4, 4, 4, 4, 6, 5, 7, 7, 7, 4, 4]
    strategy = HeterogeneousStrategy(devices=DEVICES[:2], share_weights=(2, 1))
    with strategy.scope():
        model = model_of_lengths(K)
    expected = model_of_lengths(1)
    model.fit(of_lengths(lengths), epochs=2, verbose=0)
    expected.fit(of_lengths(lengths), epochs=2, verbose=0)
    assert_same_weights(model, expected)
    assert model.layers[1].traces == 2 * 2


@pytest.mark.full
def test_a_generator_without_sample_weights(calls):
    x, y = arrays(30)

    def rows():
        for first in range(0, 30, 6):
            yield x[first : first + 6], y[first : first + 6], None

    models = [built((5, 2)), built(None)]
    losses = [model.fit(rows(), verbose=0).history["loss"] for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert_same_weights(*models)
    assert (calls.executions, calls.steps) == (2, 0)


class Twice(keras.Model):
    """A step of the user's own, with logs in a structure and a branch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="float64")

    def call(self, inputs):
        return self.dense(inputs["a"]) + self.dense(inputs["b"])

    def train_step(self, data):
        logs = super().train_step(data)
        return {"all": {"loss": logs["loss"]}, "steps": self.optimizer.iterations, "none": 1.0}


@pytest.mark.full
def test_own_steps_and_composite_inputs():
    x, y = arrays()
    sparse = tf.sparse.from_dense(np.where(x > 0, x, 0))
    data = tf.data.Dataset.from_tensor_slices(({"a": x, "b": sparse}, y)).batch(BATCH)
    models, kept = [], []
    for shares in ((5, 2), None):
        keras.utils.set_random_seed(5)
        strategy = shares and HeterogeneousStrategy(devices=DEVICES[:2], share_weights=shares)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Twice()
            model.compile("sgd", "mse", jit_compile=False, steps_per_execution=K if shares else 1)
        keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: kept.append(logs))
        model.fit(data, verbose=0, callbacks=[keep])
        models.append(model)
    assert_same_weights(*models)
    assert [logs["steps"] for logs in kept] == [3, 6, 8, *range(1, 9)]
    np.testing.assert_allclose(kept[2]["loss"], kept[-1]["loss"], rtol=1e-6)


@pytest.mark.full
def test_train_on_batch_is_one_step(calls):
    model = built((5, 2))
    model.train_on_batch(*arrays(6))
    assert (calls.executions, calls.steps) == (0, 1)
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.full
def test_data_of_a_call_is_prepared_an_execution_ahead():
    model = built((5, 2), steps_per_execution=7)
    strategy, found = model.distribute_strategy, []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: found.append(strategy.extended.data_path.iterated().lookahead)
    )
    data = strategy.distribute(batches(), lookahead=1)
    for given in (batches(), data, strategy.distribute(batches())):
        model.fit(given, verbose=0, callbacks=[look])
    assert found == [7, 1, 2]


def test_telemetry_has_a_row_for_each_step_and_all_waits(monkeypatch):
    numbers = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(numbers)))
    monkeypatch.setattr(step_iterator, "time", clock)  # each batch is waited for by one second
    telemetry = keras_het.callbacks.Telemetry()
    built((5, 2)).fit(batches(), verbose=0, callbacks=[telemetry])
    recording = telemetry.recording()
    # what the last step of all waited for travels with a step that does not follow
    np.testing.assert_allclose(recording.input[:, 0], [3, 0, 0, 3, 0, 0, 2])
    np.testing.assert_allclose(recording.shares.sum(axis=1), BATCH)


@pytest.mark.full
def test_the_balancer_counts_steps():
    balancer = keras_het.callbacks.BatchBalancer("even")
    model = built((5, 2))
    model.fit(batches(), epochs=2, verbose=0, callbacks=[balancer])
    assert [row["step"] for row in balancer.measurements] == list(range(16))
    expected = built(None)
    expected.fit(batches(), epochs=2, verbose=0)
    assert_same_weights(model, expected)


@pytest.mark.full
def test_an_execution_with_more_steps_than_are_kept(monkeypatch):
    monkeypatch.setattr(compute_times, "CAPACITY", 4)
    balancer = keras_het.callbacks.BatchBalancer("even")
    built((5, 2), 6).fit(batches(), verbose=0, callbacks=[balancer])
    assert [row["step"] for row in balancer.measurements] == [2, 3, 4, 5, 6, 7]


class Signal(keras.layers.Layer):
    """Sends the process a signal in its fifth step, which is within an execution."""

    steps = 0

    def call(self, inputs, training=False):
        if training:
            step = tf.numpy_function(self._step, [], tf.int64)
            with tf.control_dependencies([step]):
                return tf.identity(inputs)
        return inputs

    def _step(self):
        self.steps += 1
        if self.steps == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.steps


@pytest.mark.full
def test_a_signal_ends_after_an_execution_and_training_continues_from_there(tmp_path):
    def train(*callbacks, **options):
        model = built((1,), **options)
        backup = keras_het.callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(batches().shuffle(9, seed=2), epochs=2, verbose=0, callbacks=[backup, *callbacks])
        return model

    with pytest.raises(SystemExit):
        train(inputs=[keras.Input((4,), dtype="float64"), Signal(dtype="float64")])
    events = Events()
    model = train(events)
    ended = [each[1] for each in events.seen if each[0] == "on_train_batch_end"]
    assert ended == [8, 2, 5, 8]  # of the first epoch two steps were left
    expected = built(None)
    expected.fit(batches().shuffle(9, seed=2), epochs=2, verbose=0)
    assert_same_weights(model, expected)
