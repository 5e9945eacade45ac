"""What only a GPU shows: clocks of a device that works later, its memory, its readings.

`make test-gpu` runs these along with the tests of training.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import devices
import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

import keras_het
from keras_het.telemetry.event_log import read_log

pytestmark = pytest.mark.skipif(
    devices.TYPE != "GPU", reason="needs a GPU, and KERAS_HET_TEST_DEVICES=GPU"
)
HERE = Path(__file__).parent


ROWS, WIDTH, LAYERS = 512, 4096, 3
# Of float32; no GPU of 2026 is near it.
MOST_OPERATIONS_PER_SECOND = 200e12


def fit_large_layers(strategy, callbacks, steps=30):
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input([WIDTH]), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(steps)
    model.fit(strategy.distribute(data), verbose=0, callbacks=callbacks)


def test_compute_time_is_that_of_the_kernels(tmp_path):
    """Not that of their launch, which a GPU's own speed does not bound."""
    strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[:1])
    fit_large_layers(strategy, [keras_het.callbacks.Telemetry(tmp_path)])
    (run,) = read_log(tmp_path)
    operations = 3 * LAYERS * 2 * ROWS * WIDTH**2  # forward, and two products backward
    assert np.nanmin(run.recording.compute[5:]) > operations / MOST_OPERATIONS_PER_SECOND


def test_the_four_times_are_the_step(tmp_path):
    strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[3, 1])
    telemetry = keras_het.callbacks.Telemetry(tmp_path)
    fit_large_layers(strategy, [telemetry])
    found = telemetry.recording()
    parts = np.stack([found.compute, found.input, found.sync, found.other])[:, 5:]
    assert (parts >= 0).all()
    assert parts.sum(axis=0) == pytest.approx(found.wall[5:], rel=0.02)


def test_readings_of_the_gpu_are_in_the_log(tmp_path):
    strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[:2])
    telemetry = keras_het.callbacks.Telemetry(tmp_path)
    fit_large_layers(strategy, [telemetry], steps=600)
    (run,) = read_log(tmp_path)
    hardware = run.recording.hardware
    assert np.nanmax(hardware["hw.gpu.utilization"]) > 0.3
    assert np.nanmax(hardware["hw.gpu.memory.usage"]) > 100e6
    assert np.nanmax(hardware["keras_het.gpu.clock"]) > 0.5e9


def test_jit_compile_on_one_gpu_of_a_process():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
    weights = []
    for strategy in (None, keras_het.HeterogeneousStrategy(devices=DEVICES[:1])):
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else tf.device(DEVICES[0]):
            layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input([32]), *layers])
            model.compile("adam", "mse", jit_compile=True)
        model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_mixed_precision_trains_on_several():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[3, 1])
        x = np.random.default_rng(0).normal(size=(512, 32)).astype("float32")
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(1, dtype="float32")]
            model = keras.Sequential([keras.Input([32]), *layers])
            model.compile("adam", "mse")
        history = model.fit(x, x[:, :1], batch_size=64, epochs=8, verbose=0).history["loss"]
        assert history[-1] < 0.5 * history[0]
    finally:
        keras.config.set_dtype_policy("float32")


def run(program, *arguments, workers=None, status=0):
    """Run a program, with the launcher if it has workers; return its errors, then its output."""
    command = [str(HERE / program), *map(str, arguments)]
    if workers:
        command = ["-m", "keras_het", "run", *workers, *command]
    environment = {
        **os.environ,
        "KERAS_HET_SECRET": "a secret of these tests",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment
    )
    assert status is None or ended.returncode == status, ended.stdout + ended.stderr
    return ended.stderr + ended.stdout


def test_a_lack_of_memory_names_the_replica_and_is_remembered(tmp_path):
    """Each start halves the share of the part that has little memory, until it fits."""
    text, bounds = run("program_memory.py", tmp_path, status=1), []
    while "Out of memory" in text:
        last = text.strip().splitlines()[-1]
        assert "Out of memory on replica(s) [1]." in last, text[-3000:]
        bounds.append(int(last.split("max_share={1: ")[1].split("}")[0]))
        assert bounds == [512 // 2**count for count in range(1, len(bounds) + 1)]
        text = run("program_memory.py", tmp_path, status=None)
    shares = json.loads(text.strip().splitlines()[-1])
    assert sum(shares) == 1024 and shares[1] == bounds[-1]


@pytest.mark.parametrize("mode", ["all_reduce", "summation"])
def test_two_workers_on_parts_of_a_gpu_are_exact(mode, tmp_path):
    """In float64; over rings, as NCCL takes no two workers on one GPU."""
    run("program_workers.py", mode, tmp_path, workers=["--workers", "2"])
    run("program_workers.py", "one", tmp_path)
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / f"{mode}.npz") as several:
        assert one.files == several.files
        for name in one.files:
            np.testing.assert_allclose(several[name], one[name], rtol=1e-9, atol=1e-12)


def test_a_gpu_leads_and_a_cpu_trains_beside_it(tmp_path):
    """The worker without a GPU exchanges with the leader's center; both train."""
    run(
        "program_workers.py",
        "hybrid",
        tmp_path,
        workers=["--workers", "2", "--async-workers", "1"],
    )
    found = json.loads((tmp_path / "hybrid.json").read_text())
    assert found["device"] == "GPU:0" and found["other_device"] == "CPU:0"
    assert min(found["used"]) > 0
    assert found["loss"][-1] < 0.5 * found["loss"][0]
