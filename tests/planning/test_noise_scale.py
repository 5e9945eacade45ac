"""Gradient noise scale of unequal replicas, and the batch size that follows from it."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.global_batch import (
    candidate_batch_sizes,
    choose_global_batch,
    gain,
    goodput,
    rate_factor_of_batch,
)
from keras_het.planning.noise_scale import (
    NoiseScaleEstimate,
    SmoothedNoiseScale,
    noise_scale_estimate,
    replica_estimates,
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
    single = [replica_estimates(SHARES, a, b) for a, b in zip(local, whole, strict=True)]
    assert (standard_errors([norm for norm, _ in single], SQUARED_NORM) < 4).all()
    assert (standard_errors([variance for _, variance in single], VARIANCE) < 4).all()
    combined = [noise_scale_estimate(SHARES, a, b) for a, b in zip(local, whole, strict=True)]
    assert standard_errors([one.squared_norm for one in combined], SQUARED_NORM) < 4
    assert standard_errors([one.variance for one in combined], VARIANCE) < 4
    plain = [equal_batch_formula(a, b, SHARES.sum()) for a, b in zip(local, whole, strict=True)]
    assert (standard_errors(plain, [SQUARED_NORM, VARIANCE]) > 20).all()


def test_combining_is_no_worse_than_any_single_replica():
    local, whole = draws(5000)
    combined, norms, variances = [], [], []
    for a, b in zip(local, whole, strict=True):
        one = noise_scale_estimate(SHARES, a, b)
        combined.append((one.squared_norm, one.variance))
        norm, variance = replica_estimates(SHARES, a, b)
        norms.append(norm)
        variances.append(variance)
    spread = np.std(combined, axis=0)
    assert spread[1] <= np.std(variances, axis=0).min() * 1.05
    assert spread[0] <= np.std(norms, axis=0).max()


def test_equal_shares_give_the_known_formula():
    shares = np.full(4, 8)
    local, whole = draws(10, shares)
    for a, b in zip(local, whole, strict=True):
        one = noise_scale_estimate(shares, a, b)
        expected = equal_batch_formula(a, b, 32)
        assert (one.squared_norm, one.variance) == pytest.approx(expected)


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
    smoothed = SmoothedNoiseScale(decay=0.9)
    assert smoothed.value is None
    for _ in range(3):
        smoothed.add(NoiseScaleEstimate(2.0, 6.0))
    assert smoothed.value.squared_norm == pytest.approx(2.0)
    assert smoothed.value.noise_scale == pytest.approx(3.0)
    with pytest.raises(ValueError, match="below 1"):
        SmoothedNoiseScale(1.0)


def test_noise_scale_of_nothing():
    assert NoiseScaleEstimate(0.0, 1.0).noise_scale == math.inf
    assert NoiseScaleEstimate(1.0, -1.0).noise_scale == 0.0


@example(scale=2.0, norm=0.0, variance=5e-324)
@given(scale=st.floats(1, 1e4), norm=st.floats(0, 1e3), variance=st.floats(0, 1e3))
def test_gain_is_between_one_and_the_scale(scale, norm, variance):
    assert 1 - 1e-9 <= gain(scale, NoiseScaleEstimate(norm, variance)) <= scale * (1 + 1e-9)


def test_gain_at_its_ends():
    assert gain(8, NoiseScaleEstimate(1.0, 0.0)) == 1
    assert gain(8, NoiseScaleEstimate(0.0, 1.0)) == 8
    assert gain(2, NoiseScaleEstimate(1.0, 1.0)) == pytest.approx(4 / 3)
    assert gain(2, NoiseScaleEstimate(0.0, 0.0)) == 1
    with pytest.raises(ValueError, match="scale must be positive"):
        gain(0, NoiseScaleEstimate(1.0, 1.0))


def test_learning_rate_factor_uses_the_noise_at_the_base_batch():
    estimate = NoiseScaleEstimate(1.0, 32.0)  # noise scale 32 samples
    assert rate_factor_of_batch(64, 32, estimate) == pytest.approx(4 / 3)
    assert rate_factor_of_batch(64, 32, estimate, True) == pytest.approx(math.sqrt(4 / 3))
    with pytest.raises(ValueError, match="at least 1"):
        rate_factor_of_batch(0, 32, estimate)


def test_candidates_are_a_geometric_grid():
    sizes = candidate_batch_sizes(32, 1024, 6)
    assert sizes == (32, 64, 128, 256, 512, 1024)
    assert candidate_batch_sizes(7, 7) == (7,)
    with pytest.raises(ValueError, match="1 <= smallest <= largest"):
        candidate_batch_sizes(8, 4)


def seconds_of(batch):
    """A 2:1 cluster with a fixed cost of 50 ms, shared out optimally."""
    fixed, slope = np.array([0.05, 0.05]), np.array([1e-3, 2e-3])
    shares = min_max_shares_linear(fixed, slope, batch)
    return float(np.where(shares > 0, fixed + slope * shares, 0).max())


def test_the_chosen_batch_has_the_best_goodput_and_grows_with_the_noise():
    chosen = []
    for noise in (1.0, 100.0, 1e6):
        estimate = NoiseScaleEstimate(1.0, noise)
        best = choose_global_batch(seconds_of, 32, 2048, estimate)
        rates = {
            size: goodput(size, 32, seconds_of(size), estimate)
            for size in candidate_batch_sizes(32, 2048)
        }
        assert rates[best] == max(rates.values())
        chosen.append(best)
    assert chosen == sorted(chosen)
    assert chosen[0] == 32 and chosen[-1] == 2048
    assert 32 < chosen[1] < 2048


def test_the_present_batch_stays_unless_another_is_clearly_better():
    estimate = NoiseScaleEstimate(1.0, 100.0)
    best = choose_global_batch(seconds_of, 32, 2048, estimate)
    assert choose_global_batch(seconds_of, 32, 2048, estimate, present=best + 5) == best + 5
    assert choose_global_batch(seconds_of, 32, 2048, estimate, present=2048) == best
    with pytest.raises(ValueError, match="step_seconds must be positive"):
        choose_global_batch(lambda _: 0.0, 32, 64, estimate)
