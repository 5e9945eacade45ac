"""Every update rule against its paper's equations in numpy, and what all rules promise."""

import numpy as np
import pytest
import tensorflow as tf

from keras_het.strategy.rules import (
    AsyncSGD,
    DelayCompensated,
    Delta,
    ElasticAveraging,
    HogwildEASGD,
    PushMeta,
    UpdateRule,
)
from keras_het.strategy.rules.elastic_averaging import largest_moving_rate

SIZE, CLIENTS, PUSHES = 6, 3, 12


class Reference:
    """The equations, one push at a time."""

    def __init__(self, center):
        self.c = center.astype(np.float64)

    def delta(self, scale, i, x, samples, staleness):
        self.c = self.c + scale * x
        return self.c

    def async_sgd(self, rate, momentum, samples_of_reference, damps, i, g, samples, staleness):
        self.u = momentum * getattr(self, "u", 0.0) + g
        scaled = rate * (samples / samples_of_reference if samples_of_reference else 1.0)
        self.c = self.c - scaled / (max(1.0, staleness) if damps else 1.0) * self.u
        return self.c

    def delay_compensated(self, rate, strength, decay, i, g, samples, staleness):
        seen = self.__dict__.setdefault("seen", {})
        moved = self.c - seen[i] if i in seen else 0.0
        if decay is not None:
            squares = self.__dict__.setdefault("squares", {})
            squares[i] = decay * squares.get(i, 0.0) + (1 - decay) * g * g
            strength = strength / np.sqrt(squares[i] + 1e-7)
        self.c = self.c - rate * (g + strength * g * g * moved)
        seen[i] = self.c
        return self.c

    def elastic(self, alpha, i, x, samples, staleness):
        before = self.c
        self.c = self.c + alpha * (x - self.c)
        return before


CASES = {
    "delta": (Delta, {}, lambda r, *push: r.delta(1.0, *push)),
    "delta, averaged": (Delta, {"scale": 0.25}, lambda r, *push: r.delta(0.25, *push)),
    "sgd": (AsyncSGD, {"learning_rate": 0.1}, lambda r, *p: r.async_sgd(0.1, 0, None, False, *p)),
    "sgd with all": (
        AsyncSGD,
        {
            "learning_rate": 0.1,
            "momentum": 0.7,
            "reference_samples": 32,
            "damps_staleness": True,
        },
        lambda r, *push: r.async_sgd(0.1, 0.7, 32, True, *push),
    ),
    "dc-asgd-c": (
        DelayCompensated,
        {"learning_rate": 0.1, "compensation": 0.4, "num_workers": CLIENTS},
        lambda r, *push: r.delay_compensated(0.1, 0.4, None, *push),
    ),
    "dc-asgd-a": (
        DelayCompensated,
        {"learning_rate": 0.1, "compensation": 2.0, "num_workers": CLIENTS, "decay": 0.95},
        lambda r, *push: r.delay_compensated(0.1, 2.0, 0.95, *push),
    ),
    "easgd": (ElasticAveraging, {"alpha": 0.3}, lambda r, *push: r.elastic(0.3, *push)),
    "hogwild": (
        HogwildEASGD,
        {"alpha": 0.3},
        lambda r, *push: r.elastic(0.3, *push),
    ),
}


def variables(rule, start):
    center = tf.Variable(start)
    slots = {name: tf.Variable(tf.zeros(shape)) for name, shape in rule.slots(SIZE).items()}
    return center, slots


@pytest.mark.parametrize("name", CASES)
def test_equations(cpu_devices, name):
    kind, options, expected = CASES[name]
    rule = kind(**options)
    random = np.random.default_rng(3)
    start = random.normal(size=SIZE).astype("float32")
    center, slots = variables(rule, start)
    reference = Reference(start)

    @tf.function
    def push(client, change, samples, staleness):
        return rule.update(center, slots, change, PushMeta(client, samples, staleness))

    for _ in range(PUSHES):
        client = int(random.integers(CLIENTS))
        change = random.normal(size=SIZE).astype("float32")
        samples, staleness = float(random.integers(1, 64)), float(random.integers(0, 5))
        answer = push(tf.constant(client), change, tf.constant(samples), tf.constant(staleness))
        want = expected(reference, client, change.astype(np.float64), samples, staleness)
        np.testing.assert_allclose(answer, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(center, reference.c, rtol=1e-4, atol=1e-5)
    assert np.abs(center.numpy() - start).max() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_what_all_rules_promise(cpu_devices, name):
    kind, options, _ = CASES[name]
    rule = kind(**options)
    assert isinstance(rule, UpdateRule)
    assert rule.name
    assert isinstance(rule.is_atomic, bool)
    # parts are independent: a vector in one part or in two gives the same
    start = np.linspace(-1, 1, SIZE).astype("float32")
    change = np.linspace(2, -3, SIZE).astype("float32")
    meta = PushMeta(tf.constant(1), tf.constant(8.0), tf.constant(2.0))
    whole, slots = variables(rule, start)
    for _ in range(3):
        answer = rule.update(whole, slots, tf.constant(change), meta)
    cut = []
    for part in (slice(0, 2), slice(2, SIZE)):
        center = tf.Variable(start[part])
        own = {n: tf.Variable(tf.zeros(s)) for n, s in rule.slots(len(start[part])).items()}
        for _ in range(3):
            reply = rule.update(center, own, tf.constant(change[part]), meta)
        cut.append((center.numpy(), np.array(reply)))
    np.testing.assert_allclose(whole, np.concatenate([center for center, _ in cut]), rtol=1e-6)
    np.testing.assert_allclose(answer, np.concatenate([reply for _, reply in cut]), rtol=1e-6)


def test_elastic_forces_are_equal_and_opposite(cpu_devices):
    rule = ElasticAveraging(0.4)
    center, slots = variables(rule, np.ones(SIZE, "float32"))
    weights = tf.range(float(SIZE))
    meta = PushMeta(tf.constant(0), tf.constant(1.0), tf.constant(0.0))
    after = rule.receive(weights, weights, rule.update(center, slots, weights, meta))
    np.testing.assert_allclose(after + center, weights + 1, rtol=1e-6)  # the sum is kept
    np.testing.assert_allclose(after - center, 0.2 * (weights - 1), rtol=1e-5)  # 1 - 2 alpha


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 1.9])
def test_bound_of_elastic_averaging(rate):
    bound = largest_moving_rate(rate)
    ElasticAveraging(bound, rate)
    with pytest.raises(ValueError, match=r"\(4 - 2 eta\) / \(4 - eta\) = "):
        ElasticAveraging(bound * 1.01 + 1e-9, rate)


def test_round_robin_elastic_averaging_is_stable_within_the_bound_only():
    # the quadratic x^2 / 2 of the bound's proof, exactly: one worker at a time
    def largest_after(alpha, rate, workers=3, rounds=400):
        center, xs = 1.0, [1.0, -2.0, 0.5][:workers]
        for turn in range(rounds * workers):
            i = turn % workers
            difference = alpha * (xs[i] - center)
            xs[i] = xs[i] - rate * xs[i] - difference
            center += difference
        return max(abs(center), *map(abs, xs))

    for rate in (0.5, 1.0, 1.5):
        bound = largest_moving_rate(rate)
        assert largest_after(0.95 * bound, rate) < 10
        assert largest_after(1.3 * bound, rate) > 1e3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Delta(0), "scale must be positive"),
        (lambda: AsyncSGD(0), "learning_rate must be positive"),
        (lambda: AsyncSGD(0.1, momentum=1), "from 0 to below 1"),
        (lambda: AsyncSGD(0.1, reference_samples=0), "reference_samples"),
        (lambda: DelayCompensated(0.1, -1, 2), "compensation >= 0"),
        (lambda: DelayCompensated(0.1, 1, 2, decay=1), "decay None or"),
        (lambda: ElasticAveraging(0), "alpha must be above 0"),
        (lambda: ElasticAveraging(0.1, 3), "from 0 to 2"),
    ],
)
def test_settings_out_of_range(make, match):
    with pytest.raises(ValueError, match=match):
        make()
