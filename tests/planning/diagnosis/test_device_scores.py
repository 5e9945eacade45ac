"""Scores of devices: their bounds, and what tells an old device from one that fails."""

import numpy as np
import pytest
from step_recordings import Fault, Training, scores_of

from keras_het.planning.diagnosis.situation import Situation


def test_an_old_device_is_slow_and_as_good_as_ever():
    best, own = scores_of(Training(4, slowness=(1, 1, 2.5, 1)).record())
    assert best[2] == pytest.approx(1 / 2.5, rel=0.08)
    assert np.delete(best, 2) == pytest.approx(np.ones(3), abs=0.08)
    assert own == pytest.approx(np.ones(4), abs=0.1)


@pytest.mark.parametrize("shape", ["temporary", "creeping"])
def test_a_failing_device_is_slow_against_itself(shape):
    fault = Fault("compute", shape, 1.5, device=2, begin=150)
    best, own = scores_of(Training(4, faults=(fault,)).record())
    assert own[2] == pytest.approx(1 / 2.5, rel=0.15)
    assert best[2] == pytest.approx(1 / 2.5, rel=0.15)
    assert np.delete(own, 2) == pytest.approx(np.ones(3), abs=0.1)


def test_a_failing_fast_device_is_still_the_fastest():
    fault = Fault("compute", "temporary", 0.5, device=0, begin=150)
    best, own = scores_of(Training(2, slowness=(1, 3), faults=(fault,)).record())
    assert best[0] == 1.0 and own[0] == pytest.approx(1 / 1.5, rel=0.1)


def test_shares_do_not_matter():
    best, own = scores_of(Training(3, slowness=(1, 1, 2), shares=(20, 64, 12)).record())
    assert best == pytest.approx([1, 1, 0.5], rel=0.08)
    assert own == pytest.approx(np.ones(3), abs=0.1)


def test_a_fixed_cost_is_known_once_shares_have_changed():
    """With half of a step fixed, a device with a small share looks slow for each sample."""
    shares = np.tile([32] * 4, (300, 1))
    shares[100:] = (40, 40, 40, 8)
    training = Training(4, 300, fixed=0.1, shares=shares, noise=0.02, spikes=0)
    recording = training.record()
    best, own = scores_of(recording)
    assert best == pytest.approx(np.ones(4), abs=0.06)
    assert own == pytest.approx(np.ones(4), abs=0.06)
    lines = Situation(recording).lines
    assert lines.fixed == pytest.approx(np.full(4, 0.1), rel=0.2)
    unaware, _ = scores_of(recording.between(100, 300))
    assert unaware[3] < 0.5


def test_a_device_without_samples_has_no_score():
    best, own = scores_of(Training(3, shares=(32, 32, 0)).record())
    assert np.isnan(best[2]) and np.isnan(own[2])
    assert np.isfinite(best[:2]).all()


def test_a_device_that_has_lost_its_samples_keeps_its_speed():
    shares = np.tile([32, 32], (200, 1))
    shares[100:] = (64, 0)
    best, _ = scores_of(Training(2, slowness=(1, 4), shares=shares).record())
    assert best[1] == pytest.approx(0.25, rel=0.1)


def test_a_short_recording_has_no_best():
    best, own = scores_of(Training(2, 30).record())
    assert np.isfinite(best).all() and np.isnan(own).all()
