"""Gradients that are summed up between two exchanges, against numpy."""

import keras
import numpy as np
import pytest

import keras_het
from keras_het.asynchronous.exchange.participant import MeanGradient

FEATURES, SAMPLES = 3, 24
PARTITION_BYTES = 12  # the four weights of the model travel as two parts


def make_model(strategy, optimizer="sgd", **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", **compiled)
    return model


def data():
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, random.normal(size=(SAMPLES, 1)).astype("float32")


def gradient(weights, x, y):
    """Of the mean squared error, as one vector: the kernel's, then the bias's."""
    kernel, bias = weights
    errors = x @ kernel + bias - y
    return np.append(2 * x.T @ errors / len(x), 2 * errors.mean())


def replace_optimizer(model, user_optimizer=None):
    strategy = model.distribute_strategy
    mean = MeanGradient(model.trainable_variables, strategy, PARTITION_BYTES, user_optimizer)
    model.optimizer = mean.optimizer
    model.make_train_function(force=True)
    return mean


@pytest.fixture
def strategy(logical_devices):
    return keras_het.HeterogeneousStrategy(logical_devices[:1])


def assert_is_gradient(parts, weights, x, y):
    expected = gradient(weights, x, y)
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("2-shares1")
@pytest.mark.parametrize("shares", [None, [2, 1]])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_any_number_of_steps_is_one_large_batch(logical_devices, shares, steps_per_execution):
    devices = logical_devices[: len(shares or [1])]
    strategy = keras_het.HeterogeneousStrategy(devices, share_weights=shares)
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    mean = replace_optimizer(model)
    weights, (x, y) = model.get_weights(), data()
    for first, last in ((0, 12), (12, 24), (0, 24)):  # of 6 samples: 2, 2 and 4 steps
        model.fit(x[first:last], y[first:last], batch_size=6, verbose=0, shuffle=False)
        parts = mean.take()
        assert [len(part) for part in parts] == [2, 2]
        assert_is_gradient(parts, weights, x[first:last], y[first:last])
    for after, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(after, before)


def test_what_a_backup_brought_back_is_forgotten(strategy):
    model = make_model(strategy)
    mean = replace_optimizer(model)
    weights, (x, y) = model.get_weights(), data()
    model.fit(x, y, batch_size=6, verbose=0)
    mean.forget()
    model.fit(x[:6], y[:6], batch_size=6, verbose=0)
    assert_is_gradient(mean.take(), weights, x[:6], y[:6])


def test_a_gradient_that_is_not_finite_does_not_stay(strategy):
    model = make_model(strategy)
    mean = replace_optimizer(model)
    x, y = data()
    model.fit(np.full_like(x, np.inf), y, batch_size=SAMPLES, verbose=0)
    assert not np.isfinite(np.concatenate(mean.take())).all()
    model.fit(x, y, batch_size=SAMPLES, verbose=0)
    assert np.isfinite(np.concatenate(mean.take())).all()


def test_a_rate_that_a_callback_sets_is_refused_and_scales_nothing(strategy):
    model = make_model(strategy)
    mean = replace_optimizer(model)
    weights, (x, y) = model.get_weights(), data()
    mean.check_rate("async_sgd")
    model.optimizer.learning_rate = 0.5
    model.fit(x, y, batch_size=SAMPLES, verbose=0)
    with pytest.raises(ValueError, match=r"'async_sgd' .* Received: 0\.5"):
        mean.check_rate("async_sgd")
    assert_is_gradient(mean.take(), weights, x, y)


def test_float16_gradients_are_scaled(strategy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(strategy)
    finally:
        keras.config.set_dtype_policy(before)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    mean = replace_optimizer(model, model.optimizer)
    # the gradient 2e-8 is 0 in float16
    x = np.full((SAMPLES, FEATURES), 1e-3, np.float32)
    model.fit(x, np.full((SAMPLES, 1), -1e-5), batch_size=SAMPLES, verbose=0, epochs=3)
    assert isinstance(mean.optimizer, keras.optimizers.LossScaleOptimizer)
    np.testing.assert_allclose(np.concatenate(mean.take())[:FEATURES], 2e-8, rtol=0.01)


def state_of(optimizer):
    return [np.array(variable) for variable in optimizer.variables]


@pytest.mark.quick("True")
@pytest.mark.parametrize("scales_loss", [False, True])
def test_files_have_the_state_of_the_users_optimizer(strategy, tmp_path, scales_loss):
    with strategy.scope():
        user = keras.optimizers.SGD(0.1, momentum=0.9)
        if scales_loss:
            user = keras.optimizers.LossScaleOptimizer(user, initial_scale=256.0)
    model = make_model(strategy, user)
    model.fit(*data(), batch_size=6, verbose=0)
    model.save_weights(tmp_path / "before.weights.h5")
    before = state_of(user)
    mean = replace_optimizer(model, user)
    model.fit(*data(), batch_size=6, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(user)
    for found, expected in zip(state_of(loaded.optimizer), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    user.learning_rate = 0.5
    model.load_weights(tmp_path / "before.weights.h5")
    np.testing.assert_allclose(np.array(user.learning_rate), 0.1, rtol=1e-6)
    assert np.array(mean.optimizer.learning_rate) == 1.0
    assert not all((part == 0).all() for part in mean.take())
