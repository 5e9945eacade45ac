"""The verdict on whole trainings, as a user has them: what it says, against how they are shared."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_recordings import repairs_of

import keras_het
from keras_het.callbacks import BatchBalancer, Telemetry

BATCH, STEPS, SECONDS = 16, 60, 0.001
# EMULATED: the second device takes three times as long for a sample.
SPEEDS = (1.0, 1 / 3)


@pytest.fixture
def train(logical_devices, monkeypatch):
    """Fits a model on two devices that do not match; returns its Telemetry."""
    devices = [{"speed": s, "fixed_seconds": 0, "seconds_per_sample": SECONDS / s} for s in SPEEDS]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    strategy = keras_het.HeterogeneousStrategy(devices=logical_devices[:2])
    monkeypatch.delenv("KERAS_HET_EMULATED_DEVICES")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def fit(*callbacks, steps=STEPS, shares=None, epochs=1):
        if shares:
            strategy.set_share_weights(shares)
        rows = np.ones((BATCH * steps, 4), np.float32)
        data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(BATCH)
        telemetry = Telemetry()
        model.fit(data, epochs=epochs, verbose=0, callbacks=[telemetry, *callbacks])
        return telemetry

    return fit


def check(telemetry, even):
    """What is said of shares is what they are, and what a line charges is what its repair saves."""
    recording, verdict = telemetry.recording(), telemetry.verdict
    text = str(verdict)
    shares = recording.shares[-1]
    assert (shares == BATCH / 2).all() == even
    assert ("Shares follow" in text) <= (not even)
    seconds = shares / SPEEDS
    balanced = min(max(n, (BATCH - n) / SPEEDS[1]) for n in range(BATCH))
    slow = [cause for cause in verdict.causes if cause.kind == "slow_device" and cause.device == 1]
    # On a machine that others use, too, there may be more causes.
    assert slow or not even, text
    assert not slow or seconds.max() > 1.02 * balanced, text
    for cause in slow:
        result = repairs_of(recording)
        saved = 1 - result.by_device[1] / result.step_seconds
        assert cause.share_of_step <= saved + 0.01
        assert "waits for it" in cause.text and "BatchBalancer" in cause.advice
        # Beside a busy program, compute may be the smaller part of a step.
        gains = "predicted .* times the samples/s|times slower|times as long as with balanced"
        assert re.search(gains, cause.advice)
    return slow


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("even", {}),
        ("static", {"weights": (1, 1)}),
        ("static", {"weights": (3, 1)}),
        ("min_max", {}),
    ],
    ids=["even", "static even", "static", "min_max"],
)
def test_each_policy(train, policy, settings):
    telemetry = train(BatchBalancer(policy, **settings))
    slow = check(telemetry, even=policy == "even" or settings == {"weights": (1, 1)})
    for cause in slow:
        assert cause.advice.startswith("Shares do not follow its speed.")


@pytest.mark.full
@pytest.mark.parametrize("shares", [None, (12, 4)])
def test_without_a_balancer(train, shares):
    for cause in check(train(shares=shares), even=shares is None):
        assert cause.advice.startswith("Add BatchBalancer: ")


@pytest.mark.full
@pytest.mark.parametrize("policy", ["even", "min_max"])
def test_a_second_fit(train, policy):
    balancer = BatchBalancer(policy)
    train(balancer)
    telemetry = train(balancer)
    (change,) = telemetry.recording().changes[:1]
    assert change.text.startswith("shares ") and change.text.endswith(f"({policy}: as before)")
    for cause in check(telemetry, even=policy == "even"):
        assert cause.advice.startswith("Shares do not follow its speed.")
