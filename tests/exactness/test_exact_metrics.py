"""Metrics: state summed over replicas, results of the whole batch in every step."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    Trial,
    arrays,
    assert_equivalent,
    batches,
    dense_model,
    three_replicas,
)

sgd = functools.partial(keras.optimizers.SGD, 0.1)


class RelativeDeviation(keras.metrics.Metric):
    """A result that is no mean: a ratio of sums, and it looks at the previous state."""

    def __init__(self, name="relative_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.error = self.add_variable((), "zeros", name="error")
        self.size = self.add_variable((), "zeros", name="size")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.error.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))
        self.size.assign_add(keras.ops.sum(keras.ops.abs(y_true)))

    def result(self):
        return keras.ops.sqrt(self.error / self.size)


class DictResult(RelativeDeviation):
    def result(self):
        return {"error": self.error / self.size, "size": self.size}


@pytest.mark.full
def test_regression_metrics():
    def build():
        m = keras.metrics
        metrics = [
            "mae",
            m.R2Score(name="r2"),
            m.RootMeanSquaredError(name="rmse"),
            m.PearsonCorrelation(name="pearson"),
            m.MeanMetricWrapper(lambda a, b: keras.ops.abs(a - b)[:, 0], name="wrapped"),
            RelativeDeviation(),
            DictResult(name="dict"),
            lambda a, b: keras.ops.mean(keras.ops.square(a - b), axis=-1),
        ]
        return dense_model("mse", sgd, metrics=metrics, weighted_metrics=["mse"])

    assert_equivalent(Trial(build, infer_always=True), ALL_SHARES)


def test_classes():
    def build():
        m = keras.metrics
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])
        metrics = [
            "accuracy",
            m.MeanIoU(3, sparse_y_pred=False, name="miou"),
            m.SparseTopKCategoricalAccuracy(2, name="top2"),
        ]
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=metrics)
        return model

    def data():
        x, _ = arrays()
        classes = np.random.default_rng(0).integers(0, 3, len(x))
        return tf.data.Dataset.from_tensor_slices((x, classes)).batch(8)

    assert_equivalent(Trial(build, data), ALL_SHARES)


class Tracked(keras.layers.Layer):
    """A layer that keeps metrics of what it sees."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="activity")
        self.sum = keras.metrics.Sum(name="total")

    def call(self, x):
        self.mean.update_state(keras.ops.mean(x, axis=-1))
        self.sum.update_state(keras.ops.sum(x, axis=-1))
        return x


@pytest.mark.full
def test_mean_and_sum_inside_a_layer():
    def layers():
        return [keras.layers.Dense(4), Tracked()]

    # Keras itself shows them in the logs of the functional model; predict would change them
    build = functools.partial(dense_model, "mse", sgd, layers)
    assert_equivalent(Trial(build, predict=False), ALL_SHARES)


@pytest.mark.full
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_masked_time_steps(weighted):
    def build():
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(9, 3, mask_zero=True),
                keras.layers.Dense(2, "softmax"),
            ]
        )
        metrics = {"weighted_metrics" if weighted else "metrics": ["accuracy"]}
        model.compile(sgd(), "sparse_categorical_crossentropy", **metrics)
        return model

    def data():
        random = np.random.default_rng(4)
        words = random.integers(0, 9, (22, 5)).astype("int32")
        return tf.data.Dataset.from_tensor_slices((words, random.integers(0, 2, (22, 5)))).batch(8)

    assert_equivalent(Trial(build, data))


class KernelNorm(keras.metrics.Metric):
    """Looks at a weight when its result is computed."""

    def __init__(self, kernel, **options):
        super().__init__(**options)
        self.kernel = lambda: kernel  # not a state of the metric

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return keras.ops.norm(self.kernel())


class RateInLogs(keras.Sequential):
    def get_metrics_result(self):
        rate = keras.ops.convert_to_tensor(self.optimizer.learning_rate)
        return {**super().get_metrics_result(), "rate": rate}


def decaying():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))


def deep_model(model=keras.Sequential, metrics=lambda model: None):
    layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = model(layers)
    model.compile(decaying(), "mse", metrics=metrics(model))
    return model


def rate_and_norm(model):
    def rate(y_true, y_pred):
        return model.optimizer.learning_rate

    return [rate, KernelNorm(model.layers[0].kernel, name="norm"), "mae"]


@pytest.mark.full
def test_metrics_that_look_at_weights_and_the_rate():
    build = functools.partial(deep_model, metrics=rate_and_norm)
    assert_equivalent(Trial(build, predict=False))


@pytest.mark.full
def test_results_that_look_at_the_rate():
    build = functools.partial(deep_model, RateInLogs)
    assert_equivalent(Trial(build, evaluate=False, predict=False))


@pytest.mark.quick("of Keras")
@pytest.mark.parametrize("name", ["of Keras", "of one's own"])
def test_gradients_travel_with_the_metrics_of_keras(name, monkeypatch):
    collectives = []
    extended = three_replicas().extended
    original = extended.all_reduce_in_replica

    def counting(*arguments):
        collectives.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(extended, "all_reduce_in_replica", counting)
    own = ["mae", lambda y, p: keras.ops.abs(y - p)]
    metrics = {"of Keras": ["mae", keras.metrics.R2Score, "acc"], "of one's own": own}[name]
    with three_replicas().scope():
        made = [metric() if isinstance(metric, type) else metric for metric in metrics]
        model = dense_model("mse", sgd, metrics=made)
    model.fit(three_replicas().distribute(batches(8)), verbose=0)
    assert len(collectives) == 3 * (1 if name == "of Keras" else 2)
