"""Telemetry of a model in stages: the passes of each device, and the same weights as without."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.callbacks import Telemetry
from keras_het.planning import ReplicaLayout
from keras_het.planning.pipeline import PipelinePlan, Stage
from keras_het.strategy.measure.phase_times import PhaseTimes
from keras_het.strategy.pipeline.edges import Place
from keras_het.strategy.pipeline.micro_batches import MicroBatches
from keras_het.strategy.pipeline.pass_times import PassClock, PassTimes
from keras_het.telemetry.event_log import read_log
from keras_het.tensorboard.log_format import parse_timeline

BATCH, STEPS = 12, 8


def plan_of(schedule="1f1b"):
    """Two stages, the second on two devices; the fourth device has nothing to do."""
    stages = (Stage(0, 2, (0,), (0,) * 4, recomputed=(0,)), Stage(2, 4, (2, 1), (0, 1, 0, 0)))
    return PipelinePlan(stages, 4, schedule, 0.0, (0.0,) * 4)


def build():
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.3, seed=1),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input([6]), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def build_small():
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def train(devices, callbacks, plan, build=build):
    strategy = keras_het.PipelineStrategy(None, plan.num_micro_batches, devices, plan=plan)
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = build()
    x = np.random.default_rng(0).normal(size=[BATCH * STEPS, 6]).astype("float32")
    history = model.fit(
        x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=callbacks
    )
    return strategy, model, history


def same_weights(one, other):
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def assert_passes_of_a_step(strategy, plan):
    """Each pass once, on the device that the plan says, in an order that the data allow."""
    measured = strategy.measured_timeline
    assert measured is not None
    begin_of: dict[tuple[str, int, int], float] = {}
    for device, events in enumerate(measured.events):
        free = 0.0
        for event in events:
            stage = plan.stages[event.stage]
            assert stage.devices[stage.routes[event.micro_batch]] == device
            assert free <= event.begin <= event.end <= measured.step_seconds
            free = event.end
            key = event.kind, event.stage, event.micro_batch
            assert key not in begin_of
            begin_of[key] = event.begin
    assert len(begin_of) == 2 * len(plan.stages) * plan.num_micro_batches
    for m in range(plan.num_micro_batches):
        ways = [("forward", s, m) for s in range(len(plan.stages))]
        ways += [("backward", s, m) for s in reversed(range(len(plan.stages)))]
        for one, other in itertools.pairwise(ways):
            # what a pass gives is there before the clock says so: the next may begin meanwhile
            assert begin_of[one] <= begin_of[other]


@pytest.mark.full
def test_the_same_weights_with_and_without(logical_devices, tmp_path):
    stages = (Stage(0, 1, (0,), (0, 0)), Stage(1, 2, (1,), (0, 0)))
    plan = PipelinePlan(stages, 2, "1f1b", 0.0, (0.0, 0.0))
    devices = logical_devices[:2]
    _, expected, _ = train(devices, [], plan, build_small)
    strategy, model, _ = train(devices, [Telemetry(tmp_path)], plan, build_small)
    assert same_weights(model, expected)
    assert_passes_of_a_step(strategy, plan)
    (run,) = read_log(tmp_path)
    assert run.recording.pipeline is not None and run.recording.pipeline.text == str(plan)
    step, passes = run.content.passes[-1]
    assert step == 2 * STEPS - 2
    assert [len(events) for events in parse_timeline(passes).events] == [4, 4]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_times_of_each_device(logical_devices, schedule, tmp_path):
    plan = plan_of(schedule)
    _, expected, _ = train(logical_devices, [], plan)
    telemetry = Telemetry(tmp_path)
    strategy, model, history = train(logical_devices, [telemetry], plan)
    assert same_weights(model, expected)
    assert_passes_of_a_step(strategy, plan)

    recording = telemetry.recording()
    assert [device.name for device in recording.devices] == [f"worker 0 CPU {i}" for i in range(4)]
    # the last step is not known yet
    np.testing.assert_array_equal(recording.steps, np.arange(2 * STEPS - 1))
    np.testing.assert_array_equal(recording.shares, [[12, 3, 9, 0]] * (2 * STEPS - 1))
    assert (recording.compute[:, :3] > 0).all()
    assert (recording.compute[:, 3] == 0).all()
    measured = strategy.measured_timeline
    assert measured is not None
    found = [measured.busy_seconds(device) for device in range(4)]
    np.testing.assert_allclose(recording.compute[-1], found, rtol=1e-5)
    # compute time and waiting are the step, which is as long on all devices
    length = recording.compute + recording.sync
    np.testing.assert_allclose(length, length[:, :1].repeat(4, axis=1), rtol=1e-5)
    np.testing.assert_allclose(recording.wall, recording.wall[:, :1].repeat(4, axis=1), rtol=1e-5)
    (run,) = read_log(tmp_path)
    record = run.recording.pipeline
    assert record is not None and record.text == str(plan)
    assert [stage.devices for stage in record.stages] == [(0,), (2, 1)]
    assert [stage.micro_batches for stage in record.stages] == [(4,), (3, 1)]
    assert record.stages[0].layers[0].startswith("dense")
    step, passes = run.content.passes[-1]
    assert step == 2 * STEPS - 2
    assert [len(events) for events in parse_timeline(passes).events] == [8, 2, 6, 0]

    rows = recording.between(STEPS, 2 * STEPS)
    speed = BATCH * len(rows.steps) / rows.wall[:, 0].sum()
    assert history.history["samples_per_second"][1] == pytest.approx(speed, rel=1e-3)


@pytest.mark.full
def test_a_model_that_was_trained_before_is_measured_from_then_on(logical_devices):
    plan = plan_of()
    strategy, model, _ = train(logical_devices, [], plan)
    assert strategy.measured_timeline is None
    telemetry = Telemetry()
    x = np.ones([BATCH * STEPS, 6], "float32")
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[telemetry])
    assert_passes_of_a_step(strategy, plan)
    np.testing.assert_array_equal(telemetry.recording().steps, np.arange(2 * STEPS, 3 * STEPS - 1))


def test_a_process_without_a_stage_only_waits():
    plan = PipelinePlan((Stage(0, 2, (0,), (0, 0)),), 2, "1f1b", 0.0, (0.0, 0.0))
    phases = PhaseTimes(ReplicaLayout((1, 1), 1))
    phases.begin(keras.Model(), ["CPU:0"])
    times = PassTimes(plan, [Place(0, "CPU:0"), Place(1, "CPU:0")], 1, phases)
    batch = tf.zeros([4, 1])
    for _ in range(3):
        contribution = times.contribution()
        times.record(contribution)
        times.finish_step(PassClock([batch]), [batch], MicroBatches(batch, 2))
    _, rows, _ = phases.read_new()
    assert (rows[:, 2, 1] > 0).all()
    assert (rows[:, [0, 4]] == 0).all()
    latest = times.latest()
    assert latest is not None
    assert latest[0] == 1
    assert latest[1].step_seconds == pytest.approx(rows[1, 2, 1], rel=1e-5)
