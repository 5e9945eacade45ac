"""What a step copies: no number of samples from a GPU to the host, and no large gradient at all.

A copy to the host waits for all that a GPU has yet to compute. Kernels of a GPU take shapes, bounds
and conditions in the host's memory. Integers of 64 bits that were computed on the GPU are copied
there. Logical CPUs stand for GPUs; the host is CPU:0.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from copies_to_host import conditions
from copies_to_host import graphs_of as collected_graphs
from devices import DEVICES

import keras_het
from keras_het.callbacks import BatchBalancer, Telemetry
from keras_het.launch.benchmark_trial_program import copies_to_host, steps_of
from keras_het.strategy.exact import keras_step
from keras_het.strategy.exact import step as exact_step

CommunicationOptions = tf.distribute.experimental.CommunicationOptions
STEPS, BATCH = 2, 16
x, y = np.ones([STEPS * BATCH, 8], np.float32), np.ones([STEPS * BATCH, 1], np.float32)


def fit(model, *callbacks):
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


MODES = {
    "plain": ({}, {}, fit),
    "micro-batches": ({"micro_batch_size": 4}, {}, fit),
    "measured": ({}, {}, lambda model: fit(model, BatchBalancer())),
    "telemetry": ({"micro_batch_size": 4}, {}, lambda model: fit(model, Telemetry())),
    "executions": ({}, {"steps_per_execution": 2}, fit),
    "compiled": ({}, {"jit_compile": True}, fit),
    "Embedding": ({}, {"first": keras.layers.Embedding}, fit),
    "own step": ({}, {"kind": OwnStep}, fit),
    "buckets": ({"communication_options": CommunicationOptions(bytes_per_pack=64)}, {}, fit),
    "low rank": ({"powersgd_rank": 1}, {}, fit),
    "evaluate": ({"micro_batch_size": 4}, {}, lambda model: model.evaluate(x, y, BATCH, 0)),
    "predict": ({"micro_batch_size": 4}, {}, lambda model: model.predict(x, BATCH, 0)),
    "train_on_batch": ({}, {}, lambda model: model.train_on_batch(x[:BATCH], y[:BATCH])),
}


def dense_model(first=None, kind=keras.Sequential, **options):
    layers = [keras.layers.Dense(4)]
    if first is not None:
        layers = [first(5, 4), keras.layers.Flatten()]
    model = kind([keras.Input([8]), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", **options)
    return model


@pytest.fixture
def graphs_of(monkeypatch):
    """The steps that are traced while a function runs."""
    graphs, traced = [], tf.__internal__.FuncGraph.as_default

    def seen(graph):
        graphs.append(graph)
        return traced(graph)

    def graphs_of(run, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(tf.__internal__.FuncGraph, "as_default", seen)
            run(*arguments)
        steps = {id(graph): graph for graph in graphs if "one_step" in graph.name}
        graphs.clear()
        assert steps
        return list(steps.values())

    return graphs_of


@pytest.fixture
def copies_of(monkeypatch):
    """What the steps that are traced while a function runs copy to the host."""
    monkeypatch.setattr(keras_step, "works_ahead", lambda *_: True)

    def copies_of(run, *arguments):
        steps = steps_of(collected_graphs(lambda: run(*arguments)))
        assert steps
        return copies_to_host(steps)

    return copies_of


@pytest.mark.parametrize(("buffer_bytes", "most"), [(2**25, 4 * 1024 + 1), (8192, 2048)])
def test_large_gradients_are_not_packed(
    logical_devices, graphs_of, monkeypatch, buffer_bytes, most
):
    """Packed, and unpacked, they would need three times their memory for a moment."""
    monkeypatch.setattr(exact_step, "_BYTES_OF_A_BUFFER", buffer_bytes)

    def build():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1024)])
        model.add(keras.layers.Dense(1024, kernel_initializer="identity"))
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        model.compile("sgd", "mse")
        return model

    with keras_het.HeterogeneousStrategy(devices=logical_devices[:2], share_weights=[3, 1]).scope():
        model = build()
    alone = build()
    alone.set_weights(model.get_weights())
    rng = np.random.default_rng(5)
    data = rng.normal(size=[8, 1]), rng.normal(size=[8, 1])
    graphs = graphs_of(lambda: model.fit(*data, batch_size=8, epochs=2, verbose=0))
    alone.fit(*data, batch_size=8, epochs=2, verbose=0)
    for expected, found in zip(alone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    copied = [
        output.shape.num_elements()
        for graph in graphs
        for operation in graph.get_operations()
        if operation.type in ("ConcatV2", "SplitV")
        for output in operation.outputs
    ]
    # Two biases and two kernels; what Keras logs travels with them.
    assert most <= max(copied) < most + 16


@pytest.mark.quick("micro-batches", "train_on_batch")
@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_samples_stay_on_the_host(mode, logical_devices, copies_of):
    of_strategy, of_model, run = MODES[mode]
    with keras_het.HeterogeneousStrategy(devices=logical_devices[1:3], **of_strategy).scope():
        model = dense_model(**of_model)
    copied = copies_of(run, model)
    assert len(copied) <= (mode == "measured"), copied  # that step tells its host the times


@pytest.mark.full
def test_what_keras_copies_is_copied_once_for_each_replica(logical_devices, copies_of):
    """Dropout reads its seed, accuracy compares classes, and a loss scale looks for overflows."""

    def build():
        layers = [keras.layers.Dense(4), keras.layers.Dropout(0.1), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input([8]), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        return model

    with tf.distribute.OneDeviceStrategy(logical_devices[1]).scope():
        alone = build()
    with keras_het.HeterogeneousStrategy(devices=logical_devices[1:3]).scope():
        replicated = build()
    expected = copies_of(fit, alone)
    assert expected and len(copies_of(fit, replicated)) <= 2 * len(expected)


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_copy_nothing_to_the_host(num_devices):
    strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[1 : 1 + num_devices])
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.1)(hidden)))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    loops = {
        "fit": lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0),
        "evaluate": lambda: model.evaluate(x, x[:, :1], batch_size=8, verbose=0),
        "predict": lambda: model.predict(x, batch_size=8, verbose=0),
    }
    for name, loop in loops.items():
        graphs = collected_graphs(loop)
        steps = steps_of(graphs)
        assert steps
        assert not copies_to_host(steps), name
        decided = list(conditions(graphs))
        assert bool(decided) == (num_devices > 1)
        for branch, decision in decided:
            # a GPU compares these on its host, and others on itself
            assert decision.attr["T"].type == tf.int32.as_datatype_enum, (name, branch)
