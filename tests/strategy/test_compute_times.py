"""What the steps of a training measure: waits, and squared norms of gradients, for their noise."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy
from keras_het.asynchronous.exchange.role_choice import waited
from keras_het.planning.noise_scale import noise_scale_estimate

FEATURES = 5
SLOWER = 0.2  # seconds


class OwnStep(keras.Model):
    """A train step of one's own, whose gradients are reduced by a collective of their own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.quick("True")
@pytest.mark.parametrize("own_step", [False, True])
def test_measured_norms_belong_to_the_shares(logical_devices, own_step):
    strategy = HeterogeneousStrategy(devices=DEVICES[:3], share_weights=[4, 2, 1])
    x = np.random.default_rng(0).normal(size=(14, FEATURES)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(1)]
        model = OwnStep() if own_step else keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        model(x)
    weights = [np.array(weight, np.float64) for weight in model.get_weights()]
    strategy.extended.compute_times.begin(gradients=True)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(14), verbose=0)
    (step,) = strategy.extended.compute_times.read_new()

    def gradient(rows):
        error = x[rows] @ weights[0] + weights[1] - y[rows]
        return np.append(2 * x[rows].T @ error / len(error), 2 * error.mean())

    parts = [slice(0, 8), slice(8, 12), slice(12, 14)]
    assert step.shares.tolist() == [8, 4, 2]
    expected = [(gradient(rows) ** 2).sum() for rows in parts]
    np.testing.assert_allclose(step.gradient_squares, expected, rtol=1e-4)
    whole = (gradient(slice(0, 14)) ** 2).sum()
    np.testing.assert_allclose(step.global_gradient_square, whole, rtol=1e-4)
    assert noise_scale_estimate(step.shares, expected, whole).variance > 0


@pytest.mark.quick("order0")
@pytest.mark.parametrize("order", [(0.0, SLOWER), (SLOWER, 0.0)])
def test_who_computes_longer_waits_less(logical_devices, monkeypatch, order):
    devices = [{"speed": 1.0, "fixed_seconds": f, "seconds_per_sample": 0.0} for f in order]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    strategy = HeterogeneousStrategy(logical_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((16, 3), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    strategy.extended.compute_times.begin()
    model.fit(data, verbose=0)
    steps = strategy.extended.compute_times.read_new()
    assert len(steps) == 4
    waits = [step.collective_seconds for step in steps]  # those of the first replica are kept
    assert all(step.seconds.max() > 0.9 * SLOWER for step in steps)
    # In some step: on a busy machine the faster replica may come late, or both wait for a core.
    assert max(waits) > SLOWER / 2 or order[0] > 0
    assert min(waits) < SLOWER / 2 or order[0] == 0
    assert min(waited(step, range(2)) for step in steps) < SLOWER / 2


def test_compute_times_belong_to_the_dataset(logical_devices):
    strategy = HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[1, 2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    strategy.extended.compute_times.begin(model)
    x, y = np.ones((6, 2), "float32"), np.ones((6, 1), "float32")
    model.train_on_batch(x, y)
    assert strategy.extended.compute_times.latest(4) == []
    model.fit(x, y, batch_size=6, verbose=0)
    assert len(strategy.extended.compute_times.latest(4)) == 1
