"""The global batch grows where the gradient is noise, and stays where it is not."""

import itertools
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

sys.path.insert(0, str(Path(__file__).parents[1] / "exactness"))

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BatchBalancer, global_batch_growth
from keras_het.callbacks.global_batch_growth import GlobalBatchGrowth
from keras_het.planning.global_batch import rate_factor_of_batch
from keras_het.planning.noise_scale import NoiseScaleEstimate, noise_scale_estimate
from keras_het.strategy.measure import reading_interval

SAMPLES, FEATURES = 768, 5


@pytest.fixture(autouse=True)
def reading_after_every_step(monkeypatch):
    monkeypatch.setattr(reading_interval, "MOST_CALLS", 1)


@pytest.fixture
def strategy(logical_devices):
    return HeterogeneousStrategy(devices=DEVICES[:3], shares=[4, 2, 1])


def data(noise, batch=16, repeat=False):
    """Linear data; `noise` of 0 makes all samples equal, so that batches differ in nothing."""
    random = np.random.default_rng(3)
    x = np.ones((SAMPLES, FEATURES), np.float32)
    x += noise * random.normal(size=x.shape).astype(np.float32)
    y = np.full((SAMPLES, 1), 100.0, np.float32)
    y += 1000 * noise * random.normal(size=y.shape).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=1).batch(batch)
    return dataset.repeat() if repeat else dataset


def linear_model(strategy, optimizer=keras.optimizers.SGD, rate=1e-5):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(optimizer(rate), "mse")
    return model


def train(strategy, noise, epochs=4, optimizer=keras.optimizers.SGD, **options):
    model = linear_model(strategy, optimizer)
    balancer = BatchBalancer(global_batch="adaptive", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Your input ran out of data")
        model.fit(data(noise), epochs=epochs, verbose=0, callbacks=[balancer])
    return model, balancer


def learning_rate(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def epochs_of(balancer):
    """Sizes of the global batches of each epoch: an epoch ends when every sample was used."""
    epochs, used = [[]], 0
    for row in balancer.measurements:
        epochs[-1].append(sum(row["shares"]))
        used += epochs[-1][-1]
        if used == SAMPLES:
            epochs, used = [*epochs, []], 0
    return epochs


def test_noise_makes_it_grow(strategy):
    # beyond four times the batch noise is not alone any more
    model, balancer = train(strategy, noise=1.0, max_global_batch=64)
    *epochs, rest = epochs_of(balancer)
    assert rest == [] and len(epochs) == 4
    largest = [max(epoch) for epoch in epochs]
    # how far it grows depends on how long steps take here
    assert largest[0] == 16 and largest[-1] > 16
    assert all(a <= b <= 2 * a for a, b in itertools.pairwise(largest))
    assert all(set(epoch[:-1]) == {most} for epoch, most in zip(epochs, largest, strict=True))
    # noise alone: AdaScale multiplies the rate by almost as much as the batch
    growth = balancer.global_batch_sizes[-1] / 16
    assert 0.6 * growth < learning_rate(model) / 1e-5 <= 1.0001 * growth


def test_adaptive_optimizers_take_the_square_root(strategy):
    model, balancer = train(strategy, 1.0, epochs=2, optimizer=keras.optimizers.Adam)
    growth = balancer.global_batch_sizes[-1] / 16
    assert growth > 1
    assert 0.75 * growth**0.5 < learning_rate(model) / 1e-5 <= 1.0001 * growth**0.5


def test_without_noise_it_stays(strategy):
    model, balancer = train(strategy, noise=0.0)
    assert {sum(row["shares"]) for row in balancer.measurements} == {16}
    assert learning_rate(model) == pytest.approx(1e-5)


def test_bound(strategy):
    _, balancer = train(strategy, noise=1.0, max_global_batch=24)
    assert [max(epoch) for epoch in epochs_of(balancer)[:4]] == [16, 24, 24, 24]


def test_batches_of_the_validation_stay(strategy):
    model, balancer = linear_model(strategy), BatchBalancer(global_batch="adaptive")
    validation = strategy.distribute(data(1.0))
    model.fit(data(1.0), epochs=3, verbose=0, validation_data=validation, callbacks=[balancer])
    used = {sum(row["shares"]) for row in balancer.measurements}
    assert len(balancer.global_batch_sizes) > 1
    assert set(balancer.global_batch_sizes[:-1]) <= used
    assert validation.global_batch_size == 16


def test_batches_of_what_is_evaluated_before_the_first_step_stay(strategy):
    model, balancer = linear_model(strategy), BatchBalancer(global_batch="adaptive")
    other = strategy.distribute(data(1.0, batch=24))
    evaluates = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: model.evaluate(other, verbose=0)
    )
    model.fit(data(1.0), epochs=3, verbose=0, callbacks=[evaluates, balancer])
    used = {sum(row["shares"]) for row in balancer.measurements}
    assert balancer.global_batch_sizes[0] == 16 and len(balancer.global_batch_sizes) > 1
    assert set(balancer.global_batch_sizes[:-1]) <= used
    assert other.global_batch_size == 24


class BringsBack(keras.callbacks.Callback):
    """What a backup does that comes after the balancer."""

    def __init__(self, strategy, batch):
        super().__init__()
        self._strategy, self._batch = strategy, batch

    def on_train_begin(self, logs=None):
        self._strategy.iterated_data.set_global_batch_size(self._batch)
        self._strategy.resume_data((), 0)


def test_a_batch_that_a_backup_brings_back_is_the_present_one(strategy):
    model = linear_model(strategy)
    balancer = BatchBalancer(global_batch="adaptive", max_global_batch=32)
    callbacks = [balancer, BringsBack(strategy, 32)]
    model.fit(data(1.0), epochs=3, verbose=0, callbacks=callbacks)
    assert {sum(row["shares"]) for row in balancer.measurements} == {32}
    assert balancer.global_batch_sizes == [16, 32]
    assert learning_rate(model) == pytest.approx(1e-5)


def test_bound_and_rate_count_from_the_first_batch(strategy, monkeypatch):
    """Also where a backup, or an earlier fit with the same data, has made it larger."""
    model, given = linear_model(strategy), strategy.distribute(data(1.0))
    monkeypatch.setattr(global_batch_growth, "data_of_fit", lambda *_: given)
    for size in (64, 128):
        given.set_global_batch_size(size)
        growth = GlobalBatchGrowth(strategy, model, None, lambda size: None)
        assert (growth.base, growth.current, growth.largest) == (16, size, 128)


def test_wishes_of_an_earlier_fit_are_forgotten(strategy):
    strategy.compute_times.control.send_batch(128, 5.0)
    model, balancer = linear_model(strategy), BatchBalancer(global_batch="adaptive")
    # so few steps that nothing is decided again
    model.fit(data(1.0, batch=64), epochs=1, verbose=0, callbacks=[balancer])
    assert balancer.global_batch_sizes == [64]
    assert learning_rate(model) == pytest.approx(1e-5)


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
def test_measured_norms_are_those_of_the_shares(strategy, own_step):
    x = np.random.default_rng(0).normal(size=(14, FEATURES)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = OwnStep() if own_step else linear_model(strategy)
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


def test_rate_factor_is_the_one_of_planning():
    estimate = NoiseScaleEstimate(squared_norm=1.0, variance=64.0)
    assert rate_factor_of_batch(32, 16, estimate) == pytest.approx((4 + 1) / (2 + 1))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"global_batch": "growing"}, '"constant" or "adaptive"'),
        ({"max_global_batch": 64}, 'goes with global_batch="adaptive"'),
        ({"global_batch": "adaptive", "policy": "even"}, 'policy "boa"'),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        BatchBalancer(**arguments)


def fit_adaptive(strategy, dataset, rate=1e-5, **options):
    balancer = BatchBalancer(global_batch="adaptive", **options)
    linear_model(strategy, rate=rate).fit(
        dataset, steps_per_epoch=4, epochs=1, verbose=0, callbacks=[balancer]
    )


def test_data_without_end_is_refused(strategy):
    with pytest.raises(ValueError, match="without repeat"):
        fit_adaptive(strategy, data(1.0, repeat=True))


def test_a_schedule_is_refused(strategy):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ValueError, match="LearningRateSchedule"):
        fit_adaptive(strategy, data(1.0), schedule)


def test_a_bound_below_the_batch_is_refused(strategy):
    with pytest.raises(ValueError, match="must not be below"):
        fit_adaptive(strategy, data(1.0), max_global_batch=8)


def test_one_replica_is_refused(logical_devices):
    strategy = HeterogeneousStrategy(devices=DEVICES[:1])
    with pytest.raises(ValueError, match="needs two at least"):
        fit_adaptive(strategy, data(1.0))
    linear_model(strategy).fit(data(1.0), verbose=0, callbacks=[BatchBalancer("even")])


def test_arrays_are_refused(strategy):
    x, y = np.ones((64, FEATURES), np.float32), np.ones((64, 1), np.float32)
    balancer = BatchBalancer(global_batch="adaptive")
    with pytest.raises(ValueError, match="whose last batch"):
        linear_model(strategy).fit(x, y, batch_size=16, verbose=0, callbacks=[balancer])


def test_batches_that_async_workers_take_by_their_number_stay(strategy):
    cluster = SimpleNamespace(num_async_workers=1)
    with pytest.raises(ValueError, match="adaptive global batch in a cluster with 1 async"):
        GlobalBatchGrowth(cluster, None, None, lambda size: None)
