"""DiLoCo and its streaming form against the authors' equations."""

import numpy as np
from rule_checks import SIZE, Group, start_vector

from keras_het.rules import DiLoCo, StreamingDiLoCo

WORKERS = 3


def moves(step):
    return np.random.default_rng(step).normal(size=(WORKERS, SIZE))


def test_equations_with_unequal_samples(logical_devices):
    group = Group(DiLoCo(5), [start_vector()] * WORKERS)
    c, u = np.float64(start_vector()), 0.0
    for step in range(15):
        samples = np.random.default_rng(100 + step).integers(0, 64, WORKERS).astype(float)
        group.move(moves(step))
        group.exchange(samples)
        x = c + moves(step)
        gradient = (samples[:, None] * (c - x)).sum(0) / samples.sum()
        u = 0.9 * u + gradient
        c = c - 0.7 * (gradient + 0.9 * u)
        for weights in group.weights:
            np.testing.assert_allclose(weights, c, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(group.weights[1], group.states[1]["center"])


def test_nobody_used_a_sample(logical_devices):
    group = Group(DiLoCo(5), [start_vector()] * WORKERS)
    group.exchange([0.0] * WORKERS)
    np.testing.assert_array_equal(group.weights[0], start_vector())


def test_fragments_are_strided_and_their_exchanges_spread_evenly():
    rule = StreamingDiLoCo(period=12, num_fragments=3, overlap=2)
    fragments = rule.fragments([10, 20, 30, 40, 50, 60, 70])
    assert fragments == ((0, 3, 6), (1, 4), (2, 5))
    assert StreamingDiLoCo().fragments([5, 5]) == ((0,), (1,))
    assert DiLoCo().fragments([5, 5, 5]) == ((0, 1, 2),)
    due = {p: [t for t in range(1, 37) if rule.is_due(t, p, 3)] for p in range(3)}
    assert due == {0: [12, 24, 36], 1: [4, 16, 28], 2: [8, 20, 32]}
    assert not rule.is_due(0)


def test_streaming_equations_over_time(logical_devices):
    # two fragments, steps while the sums travel; the reference is written from the paper
    period, overlap, mixing, rate, momentum = 6, 2, 0.3, 0.4, 0.9
    rule = StreamingDiLoCo(period, 2, rate, momentum, overlap, mixing)
    cut = [slice(0, SIZE // 2), slice(SIZE // 2, SIZE)]
    start = start_vector()
    groups = [Group(rule, [start[part]] * WORKERS) for part in cut]
    x = np.tile(np.float64(start), (WORKERS, 1))
    old, u = np.float64(start), np.zeros(SIZE)
    pending, combined, sent, exchanges = {}, {}, {}, 0
    for t in range(1, 31):
        step = 0.1 * moves(t)
        x = x + step
        for p, (group, part) in enumerate(zip(groups, cut, strict=True)):
            group.move(step[:, part])
            if rule.is_due(t, p, 2):
                sent[p] = group.weights
                group.exchange([1.0] * WORKERS)
                combined[p, t + overlap], group.weights = group.weights, sent[p]
                exchanges += 1
            if (p, t) in combined:
                now, group.weights = group.weights, combined[p, t]
                group.receive(now, sent[p])
            offset = p * period // 2
            if (t - offset) % period == 0:
                pending[p] = (old[part] - x[:, part]).mean(0)
            if p in pending and (t - overlap - offset) % period == 0:
                gradient = pending.pop(p)
                u[part] = momentum * u[part] + gradient
                old[part] -= rate * (gradient + momentum * u[part])
                x[:, part] = mixing * x[:, part] + (1 - mixing) * old[part]
            np.testing.assert_allclose(group.weights, x[:, part], rtol=1e-4, atol=1e-4)
    assert exchanges == 10
