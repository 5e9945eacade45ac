"""Gradient descent and Keras optimizers on the center, at rates of large and stale mini-batches.

DC-ASGD, too, against the authors' equations.
"""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from rule_checks import SIZE, Center, Equations, follow, start_vector

from keras_het.rules import AsyncSGD, DelayCompensated, PushMeta
from keras_het.rules.server_optimizer import ELEMENTWISE


class SGDEquations(Equations):
    def __init__(self, start, learning_rate, momentum=0.0, **scaling):
        super().__init__(start)
        self.rate, self.momentum, self.scaling, self.u = learning_rate, momentum, scaling, 0.0

    def factor(self, samples, staleness):
        """Linear scaling and warm-up (Goyal et al. 2017), damping (Zhang et al. 2016)."""
        if not self.scaling:
            return 1.0
        scale, warm_up = (
            samples / self.scaling["reference_batch_size"],
            self.scaling["warmup_pushes"],
        )
        if scale > 1 and self.version < warm_up:
            scale = 1.0 + (scale - 1.0) * self.version / warm_up
        return scale / max(1.0, staleness)

    def update(self, i, g, samples, staleness):
        self.u = self.momentum * self.u + self.factor(samples, staleness) * g
        self.c = self.c - self.rate * self.u
        return self.c


class AdamEquations(SGDEquations):
    """A gradient counts by its factor in every step that remembers it."""

    m = v = 0.0

    def __init__(self, start, learning_rate, clipvalue=np.inf, **scaling):
        super().__init__(start, learning_rate, **scaling)
        self.clip = clipvalue

    def update(self, i, g, samples, staleness):
        t = self.version + 1
        g = np.clip(g, -self.clip, self.clip)
        self.m = 0.9 * self.m + 0.1 * self.factor(samples, staleness) * g
        self.divide(g, t)
        return self.c

    def divide(self, g, t):
        self.v = 0.999 * self.v + 0.001 * g * g
        rate = self.rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        self.c = self.c - rate * self.m / (np.sqrt(self.v) + 1e-7)


class AdamaxEquations(AdamEquations):
    def divide(self, g, t):
        self.v = np.maximum(0.999 * self.v, np.abs(g))
        self.c = self.c - self.rate / (1 - 0.9**t) * self.m / (self.v + 1e-7)


EQUATIONS = {"Adam": AdamEquations, "AdamW": AdamEquations, "Adamax": AdamaxEquations}


SCALED = {"reference_batch_size": 16, "staleness_damping": True, "warmup_pushes": 20}


@pytest.mark.parametrize(
    ("optimizer", "settings", "scaling"),
    [
        (None, {"learning_rate": 0.3}, {}),
        (None, {"learning_rate": 0.1, "momentum": 0.7}, SCALED),
        ("SGD", {"learning_rate": 0.3}, SCALED),
        ("SGD", {"learning_rate": 0.1, "momentum": 0.7}, SCALED),
        ("Adam", {"learning_rate": 0.02}, {}),
        ("Adam", {"learning_rate": 0.02}, SCALED),
        ("Adam", {"learning_rate": 0.02, "clipvalue": 0.1}, SCALED),
        ("AdamW", {"learning_rate": 0.02}, SCALED),
        ("Adamax", {"learning_rate": 0.02}, SCALED),
    ],
)
def test_equations(logical_devices, optimizer, settings, scaling):
    equations = EQUATIONS.get(optimizer, SGDEquations)
    if optimizer is None:
        rule = AsyncSGD(**settings, **scaling)
    else:
        decay = {"weight_decay": 0.0} if optimizer == "AdamW" else {}
        kind = getattr(keras.optimizers, optimizer)
        rule = AsyncSGD(optimizer=kind(**settings, **decay), **scaling)
    follow(rule, equations(start_vector(), **settings, **scaling), start_vector())


@pytest.mark.parametrize("name", [kind.__name__ for kind in ELEMENTWISE])
def test_one_worker_is_the_local_optimizer_of_a_whole_matrix(logical_devices, name):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7, staircase=True)
    local = getattr(keras.optimizers, name)(schedule)
    center = Center(AsyncSGD(optimizer=getattr(keras.optimizers, name)(schedule)), start_vector())
    weights = keras.Variable(start_vector().reshape(2, 9))
    for step in range(12):
        gradient = np.random.default_rng(step).normal(size=(2, 9)).astype("float32")
        local.apply([tf.constant(gradient)], [weights])
        center.push(0, 8, center.version, gradient.ravel())
        np.testing.assert_allclose(center.values, np.ravel(weights), rtol=2e-6, atol=1e-6)
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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


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


def constant_rate():
    return 0.1


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("Lamb", {}, "Lamb, which needs whole variables"),
        ("Muon", {}, "Muon, which needs whole variables"),
        ("Adafactor", {}, "Adafactor, which needs whole variables"),
        ("SGD", {"clipnorm": 1.0}, "norm of a whole variable"),
        ("Adam", {"global_clipnorm": 1.0}, "norm of all variables"),
        # without a meaning on the center
        ("Adam", {"use_ema": True}, "cannot have use_ema"),
        ("Adam", {"gradient_accumulation_steps": 2}, "cannot have gradient_accumulation_steps"),
        ("Adam", {"loss_scale_factor": 8.0}, "cannot have loss_scale_factor"),
        ("SGD", {"learning_rate": constant_rate}, "a function that cannot be copied"),
        ("SGD", {"learning_rate": lambda: 0.1}, "a function that cannot be copied"),
        ("SGD", {"learning_rate": functools.partial(float, 0.1)}, "a function that cannot be"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(logical_devices, name, settings, match):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    optimizer = getattr(keras.optimizers, name)(**{"learning_rate": 0.1, **settings})
    with pytest.raises(ValueError, match=match):
        AsyncSGD(optimizer=optimizer)


def test_nadam_has_no_factor(logical_devices):
    AsyncSGD(optimizer="nadam")
    for scaling in ({"reference_batch_size": 8}, {"staleness_damping": True}):
        with pytest.raises(ValueError, match="Use Adam, or leave both out"):
            AsyncSGD(optimizer="nadam", **scaling)


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


class DelayCompensatedEquations(Equations):
    def __init__(self, start, rate, strength, decay):
        super().__init__(start)
        self.rate, self.strength, self.decay = rate, strength, decay
        self.backup, self.mean_square = {}, {}

    def update(self, i, g, samples, staleness):
        moved = self.c - self.backup[i] if i in self.backup else 0.0
        strength = self.strength
        if self.decay is not None:
            previous = self.mean_square.get(i, 0.0)
            self.mean_square[i] = self.decay * previous + (1 - self.decay) * g * g
            strength = strength / np.sqrt(self.mean_square[i] + 1e-7)
        self.c = self.c - self.rate * (g + strength * g * g * moved)
        self.backup[i] = self.c
        return self.c


@pytest.mark.parametrize(("strength", "decay"), [(0.4, None), (2.0, 0.95), (1.0, 0.0)])
def test_equations_of_delay_compensation(strength, decay):
    start = start_vector()
    rule = DelayCompensated(0.3, strength, num_workers=3, decay=decay)
    follow(rule, DelayCompensatedEquations(start, 0.3, strength, decay), start)


def test_a_center_that_was_pulled_again_is_not_taken_for_the_last_answer():
    center = Center(DelayCompensated(0.1, 1.0, num_workers=2), np.ones(1), sizes=(1,))
    center.push(0, 1, 0, np.zeros(1))
    for _ in range(20):  # meanwhile the other worker moves the center far away
        center.push(1, 1, center.version, -np.ones(1))
    before = center.values
    center.push(0, 1, center.version, np.ones(1))  # it came back: its gradient is not stale at all
    np.testing.assert_allclose(center.values, before - 0.1, rtol=1e-6)
    moved = center.values
    center.push(1, 1, center.version - 1, np.ones(1))  # that one is, by one step
    np.testing.assert_allclose(center.values, moved - 0.1 * (1 - 0.1), rtol=1e-5)
