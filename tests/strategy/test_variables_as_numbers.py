"""What callbacks write about variables means the same as on one device."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import create_logical_devices

import keras_het

ONES = np.ones([2, 1], "float32")
# Of iterations, a learning rate and a kernel of [3, 2].
EXPRESSIONS = {
    "int": lambda steps, rate, kernel: int(steps),
    "float": lambda steps, rate, kernel: float(rate),
    "complex": lambda steps, rate, kernel: complex(rate.value),
    "array": lambda steps, rate, kernel: (np.asarray(steps.value), np.array(rate.value, "float64")),
    "mean": lambda steps, rate, kernel: (np.mean(rate.value), np.mean(kernel.value)),
    "every fifth": lambda steps, rate, kernel: bool(steps % 5 == 0),
    "math": lambda steps, rate, kernel: (math.sqrt(rate), math.isnan(rate), math.floor(rate)),
    "decay": lambda steps, rate, kernel: 0.5 ** int(steps) * rate,
    "least": lambda steps, rate, kernel: min(float(rate), 1.0),
    "text": lambda steps, rate, kernel: f"{float(rate):.3f}",
    "compared": lambda steps, rate, kernel: bool(rate > 0.05),
    "negative": lambda steps, rate, kernel: -rate,
    "rounded": lambda steps, rate, kernel: np.round(rate, 1),
    "numpy": lambda steps, rate, kernel: np.float32(rate) * np.ones(3, "float32"),
    "rows": lambda steps, rate, kernel: [np.asarray(row) for row in kernel.value],
    "slice": lambda steps, rate, kernel: kernel[:1],
    "product": lambda steps, rate, kernel: kernel @ ONES,
    "norms": lambda steps, rate, kernel: (np.linalg.norm(kernel), tf.norm(kernel)),
    "histogram": lambda steps, rate, kernel: np.histogram(kernel)[0],
    "a vector is no number": lambda steps, rate, kernel: _error(float, kernel),
    "nor is its value": lambda steps, rate, kernel: _error(int, kernel.value),
}


def _error(function, value):
    with pytest.raises(TypeError) as error:
        function(value)
    return type(error.value).__name__


def variables():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10)
    return model.optimizer.iterations, model.optimizer.learning_rate, model.layers[-1].kernel


@pytest.fixture(scope="module")
def both():
    devices = create_logical_devices()[:2]
    alone = variables()
    with keras_het.HeterogeneousStrategy(devices, share_weights=[3, 1]).scope():
        return alone, variables()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_is_that_of_one_device(both, name):
    alone, replicated = (EXPRESSIONS[name](*each) for each in both)
    for one, other in zip(tf.nest.flatten(alone), tf.nest.flatten(replicated), strict=True):
        np.testing.assert_array_equal(np.asarray(other), np.asarray(one))


def test_a_metric_is_a_number_of_all_replicas(logical_devices):
    with keras_het.HeterogeneousStrategy(logical_devices[:2], share_weights=[3, 1]).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError(name="errors")])
    model.fit(np.ones([8, 1]), np.ones([8, 1]), batch_size=8, verbose=0)
    count = next(each for each in model.metrics[-1].variables if each.name == "count")
    assert float(count) == float(count.value) == 8.0
