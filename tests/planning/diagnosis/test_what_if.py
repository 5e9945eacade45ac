"""Steps computed again with ideal times: against a computation step by step."""

import dataclasses

import numpy as np
import pytest
from step_recordings import Training, devices_of, gain_of, repairs_of

from keras_het.planning.diagnosis.recording import Recording


def recording_of(compute, waited=None, other=None, transfer=0.0, shares=None, per_worker=2):
    compute = np.asarray(compute, float)
    waited = np.zeros_like(compute) if waited is None else np.asarray(waited, float)
    other = np.zeros_like(compute) if other is None else np.asarray(other, float)
    shares = np.ones_like(compute) if shares is None else np.asarray(shares, float)
    own = compute + waited + other
    return Recording(
        devices_of(compute.shape[1], per_worker),
        np.arange(len(compute)),
        compute,
        waited,
        own.max(axis=1, keepdims=True) - own + transfer,
        other,
        np.broadcast_to(shares, compute.shape),
    )


def brute_force(recording, ideal, replaced):
    """Mean step time with ideal own times where `replaced(device)`, one step after the other."""
    seconds = []
    for t in range(len(recording.steps)):
        own = [
            ideal[t][d]
            if replaced(d)
            else recording.compute[t, d] + recording.input[t, d] + recording.other[t, d]
            for d in range(len(recording.devices))
        ]
        seconds.append(max(own) + min(recording.sync[t]))
    return np.mean(seconds)


def random_recording(seed):
    """Devices whose typical time of a sample is a whole number, and the ideal own times."""
    random = np.random.default_rng(seed)
    n, steps = int(random.integers(1, 9)), int(random.integers(20, 60))
    speed = random.integers(1, 5, n).astype(float)
    shares = random.integers(1, 9, n).astype(float)
    noise = 1 + 0.1 * random.random((steps, n))
    noise[1::2] = 1.0  # more than half of the times are typical
    noise[0] = 1.0
    compute = speed * shares * noise
    waited = random.random((steps, n))
    other = np.broadcast_to(random.random(n), (steps, n))
    recording = recording_of(compute, waited, other, random.random((steps, 1)), shares)
    ideal_compute = np.minimum(compute, speed.min() * shares)
    return recording, ideal_compute, np.minimum(other, other.min())


@pytest.mark.parametrize("seed", range(20))
def test_every_number_equals_brute_force(seed):
    recording, compute, other = random_recording(seed)
    ideal = compute + other
    result = repairs_of(recording)
    workers = [device.worker for device in recording.devices]
    expected = brute_force(recording, ideal, lambda d: False)
    assert result.step_seconds == pytest.approx(expected)
    for device in range(len(workers)):
        expected = brute_force(recording, ideal, lambda d, device=device: d == device)
        assert result.by_device[device] == pytest.approx(expected)
    assert set(result.by_worker) == set(workers)
    for worker in set(workers):
        expected = brute_force(recording, ideal, lambda d, worker=worker: workers[d] == worker)
        assert result.by_worker[worker] == pytest.approx(expected)
    phases = {
        "compute": compute + recording.input + recording.other,
        "input": recording.compute + recording.other,
        "other": recording.compute + recording.input + other,
    }
    for name, own in phases.items():
        expected = brute_force(recording, own, lambda d: True)
        assert result.by_phase[name] == pytest.approx(expected)
    own = recording.compute + recording.input + recording.other
    assert result.by_phase["sync"] == pytest.approx(own.max(axis=1).mean())


def test_a_slow_device_with_a_small_share_costs_nothing():
    compute = np.tile([1.0, 1.0], (30, 1))
    result = repairs_of(recording_of(compute, shares=[[8, 2]]))
    assert result.by_device == pytest.approx([1.0, 1.0])


def test_two_slow_devices_cost_nothing_alone_and_much_together():
    compute = np.tile([1.0, 1.0, 3.0, 3.0], (30, 1))
    result = repairs_of(recording_of(compute))
    assert result.by_device == pytest.approx([3.0] * 4)
    assert result.by_worker == pytest.approx({0: 3.0, 1: 1.0})


def test_steps_that_compile_and_partial_batches_do_not_count():
    compute = np.tile([1.0, 2.0], (40, 1))
    compute[0] = 500.0
    compute[20] = 0.1
    shares = np.full((40, 2), 8.0)
    shares[20] = 1.0
    result = repairs_of(recording_of(compute, shares=shares))
    assert result.step_seconds == pytest.approx(2.0)
    assert result.by_device == pytest.approx([2.0, 1.0])


def test_rows_count_as_many_steps_as_they_stand_for():
    compute = np.tile([[1.0], [2.0]], (20, 1))
    recording = recording_of(compute)
    steps = np.cumsum(np.tile([1, 3], 20)) - 1  # rows of 2 s stand for one step, of 1 s for three
    recording = dataclasses.replace(recording, steps=steps)
    assert repairs_of(recording).step_seconds == pytest.approx(1.25, rel=0.01)


def test_without_steps_nothing_is_known():
    result = repairs_of(recording_of(np.zeros((0, 2))))
    assert np.isnan(result.step_seconds) and np.isnan(result.by_device).all()
    assert np.isnan(gain_of(recording_of(np.zeros((0, 2)))))


@pytest.mark.parametrize("fixed", [0.0, 0.05])
def test_gain_of_balanced_shares(fixed):
    """Two devices, one three times as slow; even shares before step 100, balanced ones after."""
    shares = np.tile([32, 32], (200, 1))
    shares[100:] = (48, 16)
    training = Training(
        2, 200, slowness=(1, 3), fixed=fixed, shares=shares, noise=0.01, spikes=0, transfer=0.0
    )
    recording = training.record()
    even = 3 * (fixed + 0.1)
    balanced = max(fixed + 0.15, 3 * (fixed + 0.05))
    assert gain_of(recording.between(100, 200)) > 1.2
    assert gain_of(recording) == pytest.approx(even / balanced, rel=0.05)


def test_even_shares_gain_nothing():
    assert gain_of(Training(4).record()) == pytest.approx(1.0)
