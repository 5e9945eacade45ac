"""EASGD of all workers at once: the paper's equations, the bound, bit-identical centers."""

import numpy as np
import pytest
from rule_checks import SIZE, Group, start_vector

from keras_het.asynchronous.rules import SyncEASGD
from keras_het.asynchronous.rules.elastic_averaging import largest_moving_rate

WORKERS = 4


def test_overlapped_exchange_is_equations_1_and_2(logical_devices):
    alpha, rate, starts = 0.2, 0.1, [start_vector(i) for i in range(WORKERS)]
    group = Group(SyncEASGD(WORKERS, alpha, period=2, overlap=1), starts)
    x, c = np.float64(starts), np.float64(start_vector(0))
    targets = np.random.default_rng(9).normal(size=(WORKERS, SIZE))
    for _ in range(20):
        sent = group.weights
        stepped = [w - np.float32(rate * (w - t)) for w, t in zip(sent, targets, strict=True)]
        group.exchange([1.0] * WORKERS)
        group.receive(stepped, sent)
        gradients = x - targets
        x, c = (  # both from the same old values
            x - rate * gradients - alpha * (x - c),
            c + alpha * (x - c).sum(0),
        )
        np.testing.assert_allclose(group.weights, x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(group.states[0]["center"], c, rtol=1e-4, atol=1e-5)


def test_bound_is_checked():
    bound = largest_moving_rate(0.5, WORKERS)
    SyncEASGD(WORKERS, bound, 0.5)
    with pytest.raises(ValueError, match=r"\(2 \+ n \(2 - eta\)\) = 0.375 for eta = 0.5 and n = 4"):
        SyncEASGD(WORKERS, bound * 1.01, 0.5)
    # a moving rate that is fine in turns is too much for eight at once
    assert largest_moving_rate(0.0, 8) < 0.3 < largest_moving_rate(0.0, 1)
