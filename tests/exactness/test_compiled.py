"""`jit_compile=True` under the strategy: the numbers of one device that XLA compiles for."""

import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from types import SimpleNamespace

import keras
import pytest
from devices import DEVICES
from equivalence import (
    Trial,
    assert_equivalent,
    batches,
    build_seeded,
    dense_model,
    masked_words,
    three_replicas,
)
from test_exact_inputs import ragged_data, ragged_model
from test_exact_own_steps import GuideStep
from test_exact_own_steps import compiled as compiled_step

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import Telemetry
from keras_het.strategy import keras_calls
from keras_het.strategy.exact import xla
from keras_het.strategy.exact.xla import SWITCH, compiles_by_default, num_unsettled_steps
from keras_het.telemetry.event_log import read_log


def words():
    layers = [keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=True)
    return model


def scaled_loss():
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    scaling = functools.partial(
        keras.optimizers.LossScaleOptimizer, inner, initial_scale=2.0**8, dynamic_growth_steps=2
    )
    return compiled(optimizer=scaling)


def clipped():
    optimizer = functools.partial(keras.optimizers.AdamW, 0.05, global_clipnorm=0.1)
    return compiled(optimizer=optimizer, metrics=["mae"])


def synchronized():
    return compiled(layers=lambda: [keras.layers.BatchNormalization(synchronized=True)])


compiled = functools.partial(dense_model, jit_compile=True)
MODELS = {
    "dense": Trial(compiled, predict=True, evaluate=True),
    "own step": Trial(compiled_step(GuideStep, jit_compile=True)),
    "sparse gradients and a mask": Trial(words, data=masked_words),
    "a loss scale": Trial(scaled_loss),
    "clipped": Trial(clipped),
    "a collective in the forward pass": Trial(synchronized),
    "executions of several steps": Trial(lambda: compiled(steps_per_execution=2)),
    "ragged rows": Trial(functools.partial(ragged_model, jit_compile=True), ragged_data),
}


@pytest.mark.quick("dense")
@pytest.mark.parametrize("kind", MODELS)
def test_several_replicas_equal_one_device(kind):
    assert_equivalent(MODELS[kind])


@pytest.mark.full
@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"share_weights": [3, 1]}])
def test_measured_steps_and_parts_equal_one_device(options):
    strategy = HeterogeneousStrategy(DEVICES[:2], **options)
    strategy.extended.compute_times.begin()
    assert_equivalent(Trial(compiled), [(3, 1), (0, 2)], strategy=strategy)


@pytest.mark.full
def test_telemetry_measures_compiled_steps(tmp_path):
    def fit(model, callbacks):
        if isinstance(model.distribute_strategy, HeterogeneousStrategy):
            callbacks = [*callbacks, Telemetry(tmp_path)]
        history = model.fit(batches(), epochs=2, verbose=0, callbacks=callbacks).history
        return SimpleNamespace(history={"loss": history["loss"]})

    assert_equivalent(Trial(compiled, fit=fit), [(4, 2, 1)])
    (found,) = read_log(tmp_path)
    assert (found.recording.compute > 0).all()


@pytest.mark.full
def test_train_on_batch():
    results = []
    for scope in (three_replicas().scope, None):
        if scope is None:
            model = build_seeded(compiled)
        else:
            with scope():
                model = build_seeded(compiled)
        for x, y in batches(16).as_numpy_iterator():
            model.train_on_batch(x, y)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        assert abs(one - other).max() < 1e-6


def test_what_waits_for_others_stays_outside(monkeypatch):
    marked = Counter()
    monkeypatch.setattr(
        xla.private_api, "compile_operation", lambda operation: marked.update([operation.type])
    )
    strategy = HeterogeneousStrategy(DEVICES[:2], share_weights=[3, 1])
    strategy.extended.compute_times.begin()
    with strategy.scope():
        model = build_seeded(synchronized)
    model.fit(batches(16), verbose=0)
    assert marked["MatMul"] >= 2 * 3
    assert not [name for name in marked if name.startswith(("Collective", "Timestamp"))]


@pytest.mark.parametrize("switch", [None, "0"])
def test_the_environment_switches_it_off(monkeypatch, switch):
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    strategy = HeterogeneousStrategy(DEVICES[:1])
    with strategy.scope():
        model = build_seeded(compiled)
    assert num_unsettled_steps(model, ["CPU:0"]) == (2 if switch is None else 0)
    model.fit(batches(), verbose=0)
    assert model.jit_compile  # Keras has seen False while it made the function


def test_the_default_is_that_of_one_device():
    strategy = HeterogeneousStrategy(DEVICES[:1])
    asked = []

    def resolve(model):
        asked.append(model._distribute_strategy)
        return True

    with strategy.scope():
        model = build_seeded(dense_model)
    assert compiles_by_default(resolve, model, ["GPU:0", "GPU:1"])
    assert not compiles_by_default(resolve, model, ["CPU:0"])
    assert asked == [None]  # as if there were no strategy
    assert model._distribute_strategy is strategy


PROGRAM = """
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras_het
strategy = keras_het.HeterogeneousStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.Input((8,))])
    for _ in range(3):
        model.add(keras.layers.Dense(8))
        model.add(keras.layers.BatchNormalization())
    model.compile("sgd", "mse", jit_compile=True)
x = np.ones((32 * 40 + 5, 8), "float32")
balancer = keras_het.callbacks.BatchBalancer()
model.fit(x, x, batch_size=32, epochs=2, verbose=0, callbacks=[balancer])
seconds = [s for row in balancer.measurements for s in row["seconds"] if s == s]
print("SHARES", len({(r, s) for row in balancer.measurements for r, s in enumerate(row["shares"])}))
print("SLOWEST", max(seconds) / sorted(seconds)[len(seconds) // 2])
"""


@pytest.mark.parametrize(("given", "expected"), [("auto", True), (False, False)])
def test_the_default_is_that_of_plain_keras(monkeypatch, given, expected):
    """As on GPUs, where plain Keras compiles."""
    asked, name = set(), "_resolve_auto_jit_compile"

    def compiles_there(resolve, model, devices):
        asked.add(tuple(devices))
        return True

    monkeypatch.setattr(keras_calls, "compiles_by_default", compiles_there)
    monkeypatch.setattr(keras.Model, name, lambda model: False)  # other tests have put one here
    keras_calls._open(keras.Model, name, keras_calls._HANDLERS[keras.Model, name])
    strategy = three_replicas()
    with strategy.scope():
        model = dense_model(jit_compile=given)
    assert model.jit_compile is expected
    assert asked == {tuple(strategy.extended.worker_devices)}


@pytest.mark.full
def test_a_balanced_training_compiles_each_share_once(tmp_path):
    """Two clusters a replica, and the update; a partial batch comes too seldom."""
    devices = [
        {"speed": speed, "fixed_seconds": 0.0, "seconds_per_sample": 1e-3 / speed}
        for speed in (3.0, 1.0)
    ]
    environment = {
        **os.environ,
        "KERAS_HET_EMULATED_DEVICES": json.dumps(devices),
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "device_compilation_profiler=1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    counts = dict(re.findall(r"Compiled (\S+) (\d+) times", ended.stderr))
    shares = int(re.search(r"SHARES (\d+)", ended.stdout)[1])
    updates = [name for name in counts if "compiled_apply" in name]
    assert len(updates) == 2 and all(counts[name] == "1" for name in updates)
    large = sorted((int(counts[name]) for name in counts if name not in updates), reverse=True)
    assert sum(large) <= 3 * shares, counts  # of two replicas together
    # no time of a compilation, which takes 0.1 s and more, is one of a step
    assert float(re.search(r"SLOWEST (\S+)", ended.stdout)[1]) < 5, ended.stdout
