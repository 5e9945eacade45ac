"""Gradient descent and Keras optimizers on the center, rates of large and stale mini-batches."""

import copy
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from rule_checks import SIZE, Center, Equations, follow, run_in_threads, start_vector

from keras_het.asynchronous.rules import AsyncSGD, PushMeta
from keras_het.asynchronous.rules.server_optimizer import ELEMENTWISE


class SGDEquations(Equations):
    def __init__(self, start, rate, momentum=0.0, samples=None, damps=False, warm_up=0):
        super().__init__(start)
        self.rate, self.momentum, self.u = rate, momentum, 0.0
        self.samples, self.damps, self.warm_up = samples, damps, warm_up

    def factor(self, samples, staleness):
        """Linear scaling and warm-up (Goyal et al. 2017), damping (Zhang et al. 2016)."""
        scale = samples / (self.samples or samples)
        if scale > 1 and self.version < self.warm_up:
            scale = 1.0 + (scale - 1.0) * self.version / self.warm_up
        return scale / max(1.0, staleness if self.damps else 0)

    def update(self, i, g, samples, staleness):
        self.u = self.momentum * self.u + self.factor(samples, staleness) * g
        self.c = self.c - self.rate * self.u
        return self.c


class AdamEquations(SGDEquations):
    m = v = 0.0

    def update(self, i, g, samples, staleness):
        t = self.version + 1
        rate = self.rate * self.factor(samples, staleness)
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        rate *= np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        self.c = self.c - rate * self.m / (np.sqrt(self.v) + 1e-7)
        return self.c


SCALED = {"samples": 16, "damps": True, "warm_up": 20}
SCALED_RULE = {"reference_samples": 16, "damps_staleness": True, "warm_up_pushes": 20}
CASES = {
    "plain": (SGDEquations, {"rate": 0.3}, {"learning_rate": 0.3}),
    "momentum": (
        SGDEquations,
        {"rate": 0.1, "momentum": 0.7, **SCALED},
        {"learning_rate": 0.1, "momentum": 0.7, **SCALED_RULE},
    ),
    "keras sgd": (
        SGDEquations,
        {"rate": 0.3, **SCALED},
        {"optimizer": ("SGD", {"learning_rate": 0.3}), **SCALED_RULE},
    ),
    "keras momentum": (
        SGDEquations,
        {"rate": 0.1, "momentum": 0.7, **SCALED},
        {"optimizer": ("SGD", {"learning_rate": 0.1, "momentum": 0.7}), **SCALED_RULE},
    ),
    "adam": (AdamEquations, {"rate": 0.02}, {"optimizer": ("Adam", {"learning_rate": 0.02})}),
    "adam with all": (
        AdamEquations,
        {"rate": 0.02, **SCALED},
        {"optimizer": ("Adam", {"learning_rate": 0.02}), **SCALED_RULE},
    ),
}


def make(settings):
    settings = dict(settings)
    if "optimizer" in settings:
        name, options = settings["optimizer"]
        settings["optimizer"] = getattr(keras.optimizers, name)(**options)
    return AsyncSGD(**settings)


@pytest.mark.parametrize("name", CASES)
def test_equations(logical_devices, name):
    equations, options, settings = CASES[name]
    start = start_vector()
    follow(make(settings), equations(start, **options), start)


@pytest.mark.quick("SGD", "Adam", "Adagrad")
@pytest.mark.parametrize("name", [kind.__name__ for kind in ELEMENTWISE])
def test_one_worker_is_the_local_optimizer(logical_devices, name):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7, staircase=True)
    local = getattr(keras.optimizers, name)(schedule)
    center = Center(AsyncSGD(optimizer=getattr(keras.optimizers, name)(schedule)), start_vector())
    weights = tf.Variable(start_vector())
    for step in range(12):
        gradient = np.random.default_rng(step).normal(size=SIZE).astype("float32")
        local.apply([tf.constant(gradient)], [weights])
        center.push(0, 8, center.version, gradient)
        np.testing.assert_allclose(center.values, weights, rtol=2e-6, atol=1e-6)
    assert np.abs(center.values - start_vector()).max() > 1e-4


def test_schedule_follows_the_version(logical_devices):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.1])
    center = Center(AsyncSGD(optimizer=keras.optimizers.SGD(schedule)), np.zeros(SIZE))
    for version, expected in [(0, -1.0), (1, -2.0), (2, -3.0), (3, -3.1), (4, -3.2)]:
        assert center.version == version
        center.push(0, 8, version, np.ones(SIZE))
        np.testing.assert_allclose(center.values, np.full(SIZE, expected), rtol=1e-5)
    center.version = 0  # as of a service that begins again
    center.push(0, 8, 0, np.ones(SIZE))
    np.testing.assert_allclose(center.values, np.full(SIZE, -4.2), rtol=1e-5)


def test_centers_of_one_size_step_at_the_same_time(logical_devices):
    rule, meta = AsyncSGD(optimizer=keras.optimizers.SGD(0.1, momentum=0.5)), PushMeta(0, 1.0, 0)

    def work(number):
        center, velocity = np.float32([number]), 0.0
        slots, expected = rule.create_slots(center), number
        for version in range(50):
            center, slots, _ = rule.update(
                center, slots, np.float32([number]), meta._replace(version=version)
            )
            velocity = 0.5 * velocity - 0.1 * number
            expected += velocity
            np.testing.assert_allclose(center, [expected], rtol=1e-4)
        assert {int(slot) for slot in slots.values() if slot.dtype == np.int64} == {50}

    run_in_threads(work, 4)


def test_the_scope_of_a_strategy_changes_nothing(logical_devices):
    rule = AsyncSGD(optimizer=keras.optimizers.SGD(0.1))
    with tf.distribute.MirroredStrategy(list(logical_devices[:2])).scope():
        center = Center(rule, np.zeros(SIZE))
        center.push(0, 1, 0, np.ones(SIZE))
    np.testing.assert_allclose(center.values, np.full(SIZE, -0.1), rtol=1e-6)


def test_a_rule_that_is_in_use_can_be_copied(logical_devices):
    rule = AsyncSGD(optimizer=keras.optimizers.Adam(0.02))
    copies = [rule, copy.deepcopy(rule)]
    centers = [Center(own, np.zeros(SIZE)) for own in copies]
    for center in centers:
        center.push(0, 1, 0, np.ones(SIZE))
    copies.append(copy.deepcopy(rule))
    assert copies[2].get_config() == rule.get_config()
    np.testing.assert_array_equal(centers[0].values, centers[1].values)


def elementwise_probe(optimizer):
    """Largest difference that it makes to give a matrix whole, or as parts of a vector."""
    random = np.random.default_rng(0)
    start = random.normal(size=(4, 6)).astype("float32")
    whole = keras.Variable(start)
    parts = [keras.Variable(part) for part in np.split(start.ravel(), [5, 14])]
    copies = [type(optimizer).from_config(optimizer.get_config()) for _ in parts]
    for _ in range(3):
        gradient = random.normal(size=(4, 6)).astype("float32") * np.float32([[1], [3], [9], [27]])
        optimizer.apply([tf.constant(gradient)], [whole])
        for part, own, cut in zip(parts, copies, np.split(gradient.ravel(), [5, 14]), strict=True):
            own.apply([tf.constant(cut)], [part])
    joined = np.concatenate([part.numpy() for part in parts]).reshape(4, 6)
    return np.abs(joined - whole.numpy()).max()


@pytest.mark.parametrize("name", [kind.__name__ for kind in ELEMENTWISE])
def test_accepted_optimizers_are_elementwise(logical_devices, name):
    assert elementwise_probe(getattr(keras.optimizers, name)(0.1)) < 1e-6


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("Lamb", {}, "Lamb, which needs whole variables"),
        ("Muon", {}, "Muon, which needs whole variables"),
        ("Adafactor", {}, "Adafactor, which needs whole variables"),
        ("SGD", {"clipnorm": 1.0}, "norm of a whole variable"),
        ("Adam", {"global_clipnorm": 1.0}, "norm of all variables"),
    ],
)
def test_optimizers_that_need_whole_variables_are_refused(logical_devices, name, settings, match):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    optimizer = getattr(keras.optimizers, name)(learning_rate=0.1, **settings)
    with pytest.raises(ValueError, match=match):
        AsyncSGD(optimizer=optimizer)
    assert elementwise_probe(optimizer) > 1e-4  # rightly so


@pytest.mark.parametrize(
    "settings", [{"use_ema": True}, {"gradient_accumulation_steps": 2}, {"loss_scale_factor": 8.0}]
)
def test_settings_without_a_meaning_on_the_center_are_refused(logical_devices, settings):
    with pytest.raises(ValueError, match=f"cannot have {next(iter(settings))}"):
        AsyncSGD(optimizer=keras.optimizers.Adam(**settings))


def test_weight_decay_of_named_variables_is_refused(logical_devices):
    optimizer = keras.optimizers.AdamW(0.1)
    AsyncSGD(optimizer=optimizer)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ValueError, match="exclude_from_weight_decay"):
        AsyncSGD(optimizer=optimizer)


def test_own_elementwise_optimizer(logical_devices):
    class SignDescent(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, tf.sign(gradient) * tf.cast(learning_rate, tf.float32))

    with pytest.raises(ValueError, match="is_elementwise = True"):
        AsyncSGD(optimizer=SignDescent(0.1))
    SignDescent.is_elementwise = True
    center = Center(AsyncSGD(optimizer=SignDescent(0.1)), np.zeros(SIZE))
    center.push(0, 1, 0, np.linspace(-3, 3, SIZE))
    np.testing.assert_allclose(np.abs(center.values), np.full(SIZE, 0.1), rtol=1e-6)


def constant_rate():
    return 0.1


@pytest.mark.parametrize("rate", [lambda: 0.1, constant_rate, functools.partial(float, 0.1)])
def test_a_rate_that_is_a_function_is_refused(logical_devices, rate):
    with pytest.raises(ValueError, match="a function that cannot be copied"):
        AsyncSGD(optimizer=keras.optimizers.SGD(rate))
