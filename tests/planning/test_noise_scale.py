"""Gradient noise scale of unequal replicas."""

import math

import numpy as np
import pytest

from keras_het.planning.noise_scale import (
    NoiseScaleEstimate,
    SmoothedNoiseScale,
    noise_scale_estimate,
)

SHARES = np.array([1, 3, 8, 20])
TRUE_GRADIENT = np.array([1.0, -0.5, 0.25, 0.0, 2.0])
DEVIATIONS = np.array([3.0, 1.0, 2.0, 0.5, 4.0])
SQUARED_NORM, VARIANCE = (TRUE_GRADIENT**2).sum(), (DEVIATIONS**2).sum()


def draws(count, shares=SHARES):
    """Squared norms of local and global mean gradients of synthetic samples, step by step."""
    random = np.random.default_rng(7)
    samples = TRUE_GRADIENT + DEVIATIONS * random.standard_normal((count, shares.sum(), 5))
    local = np.stack(
        [part.mean(axis=1) for part in np.split(samples, np.cumsum(shares)[:-1], axis=1)], axis=1
    )
    whole = samples.mean(axis=1)
    return (local**2).sum(axis=-1), (whole**2).sum(axis=-1)


def standard_errors(estimates, truth):
    """Distance of the mean from the truth, in standard errors."""
    estimates = np.asarray(estimates)
    error = estimates.std(axis=0, ddof=1) / math.sqrt(len(estimates))
    return np.abs(estimates.mean(axis=0) - truth) / error


def equal_batch_formula(squared_norms, global_squared_norm, total):
    """What is right for equal shares: n |g|^2 and the plain mean of |g_i|^2."""
    n, mean = len(squared_norms), squared_norms.mean()
    norm = (n * global_squared_norm - mean) / (n - 1)
    return norm, (mean - global_squared_norm) * total / (n - 1)


def test_estimates_are_unbiased_for_unequal_shares_and_the_plain_formula_is_not():
    local, whole = draws(20_000)
    combined = [noise_scale_estimate(SHARES, a, b) for a, b in zip(local, whole, strict=True)]
    assert standard_errors([one.squared_norm for one in combined], SQUARED_NORM) < 4
    assert standard_errors([one.variance for one in combined], VARIANCE) < 4
    plain = [equal_batch_formula(a, b, SHARES.sum()) for a, b in zip(local, whole, strict=True)]
    assert (standard_errors(plain, [SQUARED_NORM, VARIANCE]) > 20).all()


def test_the_combination_equals_its_closed_form():
    local, whole = draws(10)
    total, n = SHARES.sum(), len(SHARES)
    for a, b in zip(local, whole, strict=True):
        one = noise_scale_estimate(SHARES, a, b)
        assert one.variance == pytest.approx(((SHARES * a).sum() - total * b) / (n - 1))
        assert one.squared_norm == pytest.approx((n * b - (SHARES / total * a).sum()) / (n - 1))


def test_replicas_without_samples_are_left_out():
    assert noise_scale_estimate([4, 0, 8], [3.0, np.nan, 2.0], 1.5) == noise_scale_estimate(
        [4, 8], [3.0, 2.0], 1.5
    )
    with pytest.raises(ValueError, match="at least two replicas with samples"):
        noise_scale_estimate([4, 0], [3.0, 1.0], 1.5)
    with pytest.raises(ValueError, match="one share and one squared norm a replica"):
        noise_scale_estimate([4, 4], [3.0], 1.5)


def test_smoothing_has_no_bias_at_the_start():
    smoothed = SmoothedNoiseScale()
    assert smoothed.value is None
    for _ in range(3):
        smoothed.add(NoiseScaleEstimate(2.0, 6.0))
    assert smoothed.value.squared_norm == pytest.approx(2.0)
    assert smoothed.value.noise_scale == pytest.approx(3.0)


def test_noise_scale_of_nothing():
    assert NoiseScaleEstimate(0.0, 1.0).noise_scale == math.inf
    assert NoiseScaleEstimate(1.0, -1.0).noise_scale == 0.0
