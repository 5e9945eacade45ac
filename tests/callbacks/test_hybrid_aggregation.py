"""A whole `fit` of a sync group of one worker, in this process; its async worker never comes."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.callbacks import HybridAggregation
from keras_het.strategy.parameter_service.function_server import FunctionServer
from keras_het.strategy.rules import AsyncSGD

SAMPLES, BATCH = 24, 4
NUM_BATCHES = SAMPLES // BATCH


def make_model(strategy, make_optimizer=keras.optimizers.SGD, **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(0.1), "mse", **compiled)
    return model


def arrays():
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, 3)).astype("float32")
    return x, x @ np.ones((3, 1), np.float32)


def data():
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


def mean_gradient(model, batches):
    """Of the mean squared error, as one vector."""
    kernel, bias = (np.array(weight) for weight in model.get_weights())
    x, y = (array[: batches * BATCH] for array in arrays())
    errors = x @ kernel + bias - y
    return np.append(2 * x.T @ errors / len(x), 2 * errors.mean())


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


class Acts(keras.callbacks.Callback):
    """Calls a function after a step."""

    def __init__(self, act, step=1):
        super().__init__()
        self.act, self.step = act, step
        self.used = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.act(self.model)


class Used(keras.callbacks.Callback):
    """Notes what the service counted, and pushed with how many samples."""

    def __init__(self, hybrid):
        super().__init__()
        self.hybrid = hybrid
        self.samples = []

    def on_epoch_begin(self, epoch, logs=None):
        self.host = self.hybrid.participant.host
        exchange = self.host._weights.exchange_locally

        def exchange_and_note(client, samples, changes):
            self.samples.append(samples)
            return exchange(client, samples, changes)

        self.host._weights.exchange_locally = exchange_and_note


@pytest.mark.parametrize("epochs", [1, 2])
def test_gradients_of_a_training_shorter_than_a_period_count(strategy, epochs):
    model = make_model(strategy)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    rule = AsyncSGD(0.1)
    hybrid = HybridAggregation(rule, period=100)
    model.fit(data(), epochs=epochs, verbose=0, callbacks=[hybrid])
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_data_whose_first_pass_cannot_begin_anew_is_refused(strategy):
    """Keras has looked at its first element: everybody would train the whole first epoch."""
    rows = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(SAMPLES, seed=1)
    padded = rows.padded_batch(BATCH, drop_remainder=True)
    with pytest.raises(ValueError, match="reshuffle_each_iteration=False"):
        make_model(strategy).fit(padded, verbose=0, callbacks=[HybridAggregation()])


@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
def test_what_callbacks_predict_is_not_trained(strategy, rule):
    model = make_model(strategy)
    hybrid = HybridAggregation(rule, period=2)
    used = Used(hybrid)
    looks = Acts(lambda model: model.predict(arrays()[0], verbose=0), step=0)
    model.fit(data(), verbose=0, callbacks=[hybrid, used, looks])
    assert used.host.ledger.used.tolist() == [SAMPLES, 0]
    assert [samples for samples in used.samples if samples] == [2 * BATCH] * 3


def ends_with(strategy, error, rule):
    """A model whose training ended in an error, and its optimizer from before."""

    def fail(model):
        raise error

    model = make_model(strategy)
    optimizer = model.optimizer
    hybrid = HybridAggregation(rule, period=2)
    with pytest.raises(type(error)):
        model.fit(data(), verbose=0, callbacks=[hybrid, Acts(fail)])
    return model, optimizer, hybrid


@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("in a callback")])
def test_a_fit_after_one_that_failed_trains(strategy, error, rule):
    model, optimizer, hybrid = ends_with(strategy, error, rule)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    x, y = arrays()
    model.fit(x, y, batch_size=SAMPLES, verbose=0)
    assert model.optimizer is optimizer and hybrid.participant is None
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
def test_a_fit_with_async_workers_after_one_that_failed_trains(strategy, rule):
    model, optimizer, _ = ends_with(strategy, ValueError("in a callback"), rule)
    before = flat(model)
    hybrid = HybridAggregation(rule, period=2)
    model.fit(data(), verbose=0, callbacks=[hybrid])
    assert model.optimizer is optimizer
    assert np.abs(before - flat(model)).min() > 1e-3


def test_a_step_that_fails_ends_the_service(strategy):
    model = make_model(strategy)
    hybrid = HybridAggregation("delta", period=2)

    def interrupt(batch):
        raise KeyboardInterrupt

    class Stopped(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            model.distribute_strategy._data_path.on_step = lambda *step, **new: interrupt(step)

    with pytest.raises(KeyboardInterrupt):
        model.fit(data(), verbose=0, callbacks=[hybrid, Stopped()])
    del model.distribute_strategy._data_path.on_step
    assert hybrid.participant is None
    server = FunctionServer(strategy.cluster_config.service_address())  # nobody listens there
    server.start()
    server.close()
    model.fit(data(), verbose=0, callbacks=[HybridAggregation("delta", period=2)])


def test_shorter_epochs_are_refused(strategy):
    model = make_model(strategy)
    with pytest.raises(ValueError, match=r"steps_per_epoch=2, and data with 6 batches"):
        model.fit(data(), steps_per_epoch=2, verbose=0, callbacks=[HybridAggregation()])


def test_averages_of_weights_are_refused(strategy):
    model = make_model(strategy, functools.partial(keras.optimizers.SGD, use_ema=True))
    with pytest.raises(ValueError, match="use_ema"):
        model.fit(data(), verbose=0, callbacks=[HybridAggregation()])


@pytest.mark.parametrize("period", [1, 2, 4])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_one_worker_alone_takes_every_batch(strategy, period, steps_per_execution):
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    hybrid = HybridAggregation("delta", period=period)
    used = Used(hybrid)
    model.fit(data(), epochs=2, validation_data=data(), verbose=0, callbacks=[hybrid, used])
    assert used.host.ledger.used.tolist() == [2 * SAMPLES, 0]
    alone = make_model(keras_het.HeterogeneousStrategy(), steps_per_execution=steps_per_execution)
    alone.fit(data(), epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model), flat(alone), rtol=1e-4, atol=1e-6)
