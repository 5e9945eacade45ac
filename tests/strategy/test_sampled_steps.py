"""On devices that work ahead of their hosts few steps are measured, and the others read nothing."""

from __future__ import annotations

import collections
import json
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from tensorflow.python.framework.ops import EagerTensor

import keras_het
from keras_het.callbacks import BatchBalancer
from keras_het.planning.measuring_schedule import BURST, FIRST_STEPS
from keras_het.strategy.measure import emulated_device
from keras_het.strategy.measure.emulated_device import DeviceQueue
from keras_het.strategy.measure.step_clock import StepClock

MILLISECOND = 1e-3
STEPS, BATCH = 60, 12


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Two devices, which work ahead of their hosts unless a test says otherwise."""
    speeds, asynchronous = getattr(request, "param", ((1, 1), True))
    devices = [
        {
            "speed": speed,
            "fixed_seconds": 0.0,
            "seconds_per_sample": MILLISECOND / speed,
            "asynchronous": asynchronous,
        }
        for speed in speeds
    ]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    monkeypatch.setattr(emulated_device, "_queues", {})
    monkeypatch.setattr(emulated_device, "_slowdowns", {})
    return keras_het.HeterogeneousStrategy(devices=DEVICES[1:3])


def trained(strategy: Any, callbacks: Any = (), steps: int = STEPS, **compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * steps, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(BATCH)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    model.fit(data, verbose=0, callbacks=list(callbacks))
    return model


class Reads(keras.callbacks.Callback):
    """Counts what the main thread reads from a device while a step is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.of_steps: collections.Counter[int] = collections.Counter()
        self._step: int | None = None
        read = EagerTensor._numpy

        def counting(tensor: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if self._step is not None and is_main and "CPU:0" not in tensor.backing_device:
                self.of_steps[self._step] += 1
            return read(tensor)

        monkeypatch.setattr(EagerTensor, "_numpy", counting)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step = batch

    def on_train_end(self, logs: Any = None) -> None:
        self._step = None


def test_a_queue_takes_launches_and_makes_copies_wait() -> None:
    device = DeviceQueue(depth=2)
    started = time.time()
    device.launch(0.05, started)
    device.launch(0.05, started)
    assert device.busy_until == pytest.approx(started + 0.1, abs=0.02)
    assert time.time() < started + 0.05
    device.launch(0.05, started)  # the queue is full
    assert time.time() >= started + 0.05
    device.meet(started + 0.3)
    device.wait()
    assert time.time() >= started + 0.3


def test_few_steps_are_measured_and_their_numbers_are_those_of_all(strategy: Any) -> None:
    balancer = BatchBalancer("even")
    trained(strategy, [balancer])
    numbers = [row["step"] for row in balancer.measurements]
    assert numbers[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert len(numbers) < STEPS
    assert numbers == sorted(set(numbers)) and numbers[-1] < STEPS
    for row in balancer.measurements:
        assert min(row["seconds"]) >= 6 * MILLISECOND


def test_steps_that_are_not_measured_read_nothing_and_have_no_clock(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, traced = [], StepClock.__init__

    def tracing(clock: Any, *arguments: Any) -> None:
        clocks.append(clock)
        traced(clock, *arguments)

    monkeypatch.setattr(StepClock, "__init__", tracing)
    reads, balancer = Reads(monkeypatch), BatchBalancer("even")
    trained(strategy, [balancer, reads])
    measured = {row["step"] for row in balancer.measurements}
    assert len(measured) < STEPS
    assert not set(reads.of_steps) - measured
    assert len(clocks) == 2  # in the measured one of two functions, on two replicas


@pytest.mark.parametrize("execution", [1, 4])
def test_weights_are_those_of_one_device(strategy: Any, execution: int) -> None:
    alone = trained(tf.distribute.get_strategy()).get_weights()
    balancer = BatchBalancer("static", weights=[3, 1])
    found = trained(strategy, [balancer], steps_per_execution=execution).get_weights()
    for got, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.parametrize("strategy", [((3, 1), True)], indirect=True)
def test_shares_follow_speeds_and_a_change_of_speed(strategy: Any) -> None:
    class Slower(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 100:
                emulated_device.slow_down(0, 3.0)

    balancer = BatchBalancer()
    trained(strategy, [balancer, Slower()], steps=200)
    before = [plan for plan in balancer.plans if plan.step < 100]
    assert before[-1].shares == (9, 3)
    assert balancer.plans[-1].shares == (6, 6)
    rows = [row["step"] for row in balancer.measurements if row["step"] > 100]
    assert len(rows) >= BURST


@pytest.mark.parametrize("strategy", [((1, 1), False)], indirect=True)
def test_devices_that_do_not_work_ahead_are_measured_in_all_steps(strategy: Any) -> None:
    balancer = BatchBalancer("even")
    trained(strategy, [balancer], steps=20)
    assert [row["step"] for row in balancer.measurements] == list(range(20))
