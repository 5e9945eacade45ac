"""Squared norms of the replicas' gradients and of the whole one, which tell how noisy they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy
from keras_het.planning.noise_scale import noise_scale_estimate

FEATURES = 5


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


@pytest.mark.parametrize("own_step", [False, True])
def test_measured_norms_are_those_of_the_shares(logical_devices, own_step):
    strategy = HeterogeneousStrategy(devices=DEVICES[:3], shares=[4, 2, 1])
    x = np.random.default_rng(0).normal(size=(14, FEATURES)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(1)]
        model = OwnStep() if own_step else keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        model(x)
    weights = [np.array(weight, np.float64) for weight in model.get_weights()]
    strategy.measure_compute_times(gradients=True)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(14), verbose=0)
    (step,) = strategy.compute_times.read_new()

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
