"""EASGD of all workers at once: the paper's equations, the bound, bit-identical centers."""

import keras
import numpy as np
import pytest
from rule_checks import SIZE, Group, start_vector

from keras_het.asynchronous.rules import SyncEASGD
from keras_het.asynchronous.rules.elastic_averaging import largest_moving_rate, overlapped_rate

WORKERS = 4


def starts():
    return [start_vector(i) for i in range(WORKERS)]


def test_overlapped_exchange_is_equations_1_and_2(logical_devices):
    alpha, rate = 0.2, 0.1
    rule = SyncEASGD(WORKERS, alpha, period=2, overlap=1)
    group = Group(rule, starts())
    x, c = np.float64(starts()), np.float64(start_vector(0))
    targets = np.random.default_rng(9).normal(size=(WORKERS, SIZE))
    for _ in range(20):
        sent = group.weights
        stepped = [w - np.float32(rate * (w - t)) for w, t in zip(sent, targets, strict=True)]
        group.exchange([1.0] * WORKERS)
        group.weights = [
            rule.receive(now, before, combined)
            for now, before, combined in zip(stepped, sent, group.weights, strict=True)
        ]
        gradients = x - targets
        x, c = (  # both from the same old values
            x - rate * gradients - alpha * (x - c),
            c + alpha * (x - c).sum(0),
        )
        np.testing.assert_allclose(group.weights, x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(group.states[0]["center"], c, rtol=1e-4, atol=1e-5)
        group.assert_states_are_identical()


def test_bound_is_checked(logical_devices):
    bound = largest_moving_rate(0.5, WORKERS)
    SyncEASGD(WORKERS, bound, 0.5)
    with pytest.raises(ValueError, match=r"\(2 \+ n \(2 - eta\)\) = 0.375 for eta = 0.5 and n = 4"):
        SyncEASGD(WORKERS, bound * 1.01, 0.5)
    with pytest.raises(ValueError, match="at most"):
        SyncEASGD(WORKERS, 0.3).check_optimizer(keras.optimizers.SGD(1.5))
    # a moving rate that is fine in turns is too much for eight at once
    assert largest_moving_rate(0.0, 8) < 0.3 < largest_moving_rate(0.0, 1)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9, 1.0, 1.3, 1.9])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_bound_of_overlapped_steps(workers, rate):
    def radius(alpha, curvature, period, overlap):
        step = np.diag([1 - rate * curvature, 1.0])
        alone = step[0, 0] ** (period - overlap) * (step[0, 0] ** overlap - alpha)
        pull = np.array([[-alpha, alpha], [workers * alpha, -workers * alpha]])
        matrix = np.linalg.matrix_power(step, overlap) + pull  # the pull comes after these steps
        matrix = np.linalg.matrix_power(step, period - overlap) @ matrix
        return max(abs(np.linalg.eigvals(matrix)).max(), abs(alone) if workers > 1 else 0)

    for period in (1, 2, 5, 10):
        for overlap in range(period + 1):
            bound = largest_moving_rate(overlapped_rate(rate, overlap), workers)
            SyncEASGD(workers, bound, rate, period, overlap)
            with pytest.raises(ValueError, match="at most"):
                SyncEASGD(workers, bound * 1.01 + 1e-9, rate, period, overlap)
            for curvature in np.linspace(0, 1, 21):
                assert radius(bound, curvature, period, overlap) <= 1 + 1e-9
    # without the overlap in it, the bound would let them swing apart
    if 0.1 < rate < 1:
        assert radius(0.99 * largest_moving_rate(rate, workers), 1.0, 10, 10) > 1
