"""Recomputation lowers the peak of memory that a training reaches."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from devices import DEVICES

import keras_het
from keras_het.strategy.pipeline import pipeline_strategy

PROGRAM = Path(__file__).with_name("program_peak.py")
# The C library gives memory back at once, so that the process has what TensorFlow has.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
LEAST_SAVED = 0.25


def grown_bytes(recompute, stages):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), recompute, str(stages)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split("grown by")[-1])


# What is alive at once depends on how the threads of the stages meet, and so on other programs.
@pytest.mark.alone
def test_recomputation_lowers_peak_memory():
    kept, again = (
        min(grown_bytes(recompute, 4) for _ in range(3)) for recompute in ("never", "always")
    )
    assert again <= (1 - LEAST_SAVED) * kept, f"{again / 1e6:.0f} of {kept / 1e6:.0f} MB"


# So wide that a backward pass is longer than the noise of a busy machine.
WIDTH = 1500


def test_fit_plans_with_measured_activations_and_backward_passes(
    monkeypatch,
):
    """It measures while it traces its step, which stops gradient tapes."""
    found = []
    measure = pipeline_strategy.measure
    monkeypatch.setattr(
        pipeline_strategy, "measure", lambda *given: found.append(measure(*given)) or found[-1]
    )
    strategy = keras_het.PipelineStrategy(None, 2, DEVICES[:2])
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = 64
    model.fit(np.ones([rows, 8]), np.ones([rows, 1]), batch_size=rows, verbose=0)
    (measured,) = found
    # of a micro-batch; the gradient of tanh needs its result
    assert (measured.activation_bytes[:2] >= rows // 2 * WIDTH * 4).all()
    assert measured.backward_seconds[:2].max() > 0  # one alone may be lost in noise
    assert strategy.plan is not None
    assert max(strategy.plan.memory_bytes) >= measured.activation_bytes.max()
