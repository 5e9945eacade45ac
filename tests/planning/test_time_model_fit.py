"""Lines fitted online: exact on lines, deaf to outliers, quick at changes."""

import numpy as np
import pytest
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st

from keras_het.planning.time_model_fit import (
    Measurement,
    NoiseLevel,
    TimeModelFit,
    fit_line,
    measurements,
)

FIXED, SLOPE = np.array([0.02, 0.0, 0.005]), np.array([1e-3, 2e-3, 5e-4])


def feed(fit, shares, steps, factor=1.0):
    """Observes true lines; returns the step at which each replica was found to have changed."""
    found = {}
    for step in range(steps):
        changed = fit.observe(shares, (FIXED + SLOPE * shares) * factor)
        for replica in np.flatnonzero(changed).tolist():
            found.setdefault(replica, step)
    return found


def test_two_shares_identify_the_lines():
    fit = TimeModelFit(3)
    assert not feed(fit, np.array([30, 30, 30]), 3)
    assert not fit.identified.any()
    assert fit.fixed_seconds.tolist() == [0, 0, 0]  # proportional through the origin
    assert not feed(fit, np.array([40, 15, 35]), 3)
    assert fit.identified.all()
    assert fit.fixed_seconds == pytest.approx(FIXED, abs=1e-3)
    assert fit.seconds_per_sample == pytest.approx(SLOPE, rel=0.05)


def test_the_fixed_part_outlives_the_window():
    fit = TimeModelFit(3, window=16)
    feed(fit, np.array([30, 30, 30]), 8)
    feed(fit, np.array([40, 15, 60]), 200)
    assert fit.fixed_seconds == pytest.approx(FIXED, abs=1e-3)


@pytest.mark.parametrize(
    ("factor", "within"), [(3.0, 2), (1 / 3, 1), (1.5, 2), (0.8, 1), (1.1, 4), (0.9, 3)]
)
def test_a_change_of_speed_is_found_and_the_line_rescaled(factor, within):
    fit = TimeModelFit(3)
    feed(fit, np.array([30, 30, 30]), 5)
    feed(fit, np.array([40, 15, 35]), 20)
    factors = np.array([1.0, factor, 1.0])
    found = feed(fit, np.array([40, 15, 35]), 10, factors)
    assert found == {1: within - 1}
    assert fit.seconds_per_sample == pytest.approx(SLOPE * factors, rel=0.1)


@examples(60)
@given(
    position=st.integers(0, 60),
    replica=st.integers(0, 2),
    factor=st.sampled_from([0.0, 0.01, 10.0, 1e6, np.nan, np.inf, -1.0]),
)
def test_one_outlier_is_not_a_change_and_moves_no_line(position, replica, factor):
    fit, clean = TimeModelFit(3), TimeModelFit(3)
    shares = np.array([30, 30, 30])
    for step in range(80):
        if step == 40:
            shares = np.array([40, 15, 35])
        seconds = FIXED + SLOPE * shares
        clean.observe(shares, seconds)
        if step == position:
            seconds[replica] *= factor
        assert not fit.observe(shares, seconds).any()
    assert fit.seconds_per_sample == pytest.approx(clean.seconds_per_sample, rel=0.02)
    assert fit.fixed_seconds == pytest.approx(clean.fixed_seconds, abs=1e-3)


def test_noise_alone_is_no_change():
    random = np.random.default_rng(1)
    fit = TimeModelFit(3)
    shares = np.array([40, 15, 35])
    changes = 0
    for _ in range(5000):
        seconds = (FIXED + SLOPE * shares) * (1 + 0.05 * random.standard_normal(3))
        seconds *= np.where(random.random(3) < 0.01, 5, 1)
        changes += (fit.observe(shares, seconds) > 0).sum()
    assert changes <= 2
    assert 0.04 < fit.noise < 0.065


def test_times_without_samples_do_not_count():
    fit = TimeModelFit(2)
    for _ in range(5):
        fit.observe([10, 0], [0.01, 0.5])
    assert fit.known.tolist() == [True, False]
    assert fit.models()[1] is None
    assert fit.latest()[0] == Measurement(10, 0.01, 5)
    assert fit.latest()[1] is None
    assert fit.counts([10, 0]).tolist() == [5, 0]
    assert fit.counts([11, 0]).tolist() == [0, 0]


def test_forgotten_replicas_keep_their_model_until_new_times_come():
    fit = TimeModelFit(3)
    feed(fit, np.array([30, 30, 30]), 5)
    feed(fit, np.array([40, 15, 35]), 5)
    fit.forget(0)
    assert fit.known[0]
    assert fit.counts([40, 15, 35]).tolist() == [0, 5, 5]
    feed(fit, np.array([4, 15, 35]), 2, factor=np.array([10.0, 1, 1]))
    assert fit.fixed_seconds[0] == pytest.approx(10 * FIXED[0], rel=0.05)
    assert fit.seconds_per_sample[0] == pytest.approx(10 * SLOPE[0], rel=0.05)


def test_measurements_are_lower_medians():
    assert measurements([3, 5, 3], [9.0, 1.0, 2.0]) == [
        Measurement(3, 2.0, 2),
        Measurement(5, 1, 1),
    ]


@example(points=[(1, 158.0, 2), (227, 1.0000000000000003e-05, 42)], before=0.0, noise=0.375)
@given(
    points=st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-5, 1e3), st.integers(1, 60)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    ),
    before=st.floats(0, 10),
    noise=st.floats(0, 1),
)
def test_fitted_lines_are_never_negative_and_rise(points, before, noise):
    fixed, slope, _ = fit_line([Measurement(*point) for point in points], before, noise)
    assert fixed >= 0 and slope > 0
    assert np.isfinite([fixed, slope]).all()


def test_a_share_measured_once_does_not_bend_a_line():
    often = [Measurement(10, 1.0, 9), Measurement(20, 2.0, 9)]
    assert fit_line([*often, Measurement(5, 50.0, 1)], 0.0, 0.05) == fit_line(often, 0.0, 0.05)


def test_noise_level_of_known_noise():
    random = np.random.default_rng(2)
    level, before = NoiseLevel(), np.ones(4)
    for _ in range(500):
        after = 1 + 0.1 * random.standard_normal(4)
        level.add(after, before)
        before = after
    assert level.value == pytest.approx(0.1, rel=0.15)
