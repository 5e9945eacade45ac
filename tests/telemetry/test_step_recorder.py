"""Where the time of steps goes, against clocks of the test's own."""

from __future__ import annotations

import csv
import threading
import time
import types
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.callbacks import BatchBalancer, LoaderTuner, Telemetry
from keras_het.callbacks import telemetry as telemetry_callback
from keras_het.strategy.measure.phase_times import PARTS
from keras_het.telemetry.event_log import read_log
from keras_het.telemetry.step_recorder import StepRecorder

NUMBERS = {
    "samples_per_second",
    "slowest_replica",
    "slowest_replica_wait_seconds",
    "input_wait_seconds",
}
STEPS = 12
BATCH = 8


class Sleep(keras.layers.Layer):
    """Waits in the forward pass of a replica.

    Args:
        seconds: by the number of the replica.
    """

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        replica = getattr(context, "replica_id_in_sync_group", 0)  # none while a model is built
        number = int(tf.get_static_value(replica) or 0)

        def wait(values):
            time.sleep(self.seconds[number % len(self.seconds)])
            return values

        waited = tf.numpy_function(wait, [inputs], tf.float32, stateful=False)
        waited.set_shape(inputs.shape)
        return waited

    def compute_output_shape(self, shape):
        return shape


class Clock(keras.callbacks.Callback):
    """Measures epochs, without their first steps, and spends time of its own after each batch."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds, self.epochs = seconds, []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.start = time.perf_counter()
        # what comes after the last step belongs to none
        self.end = time.perf_counter()
        time.sleep(self.seconds)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.end - self.start)


def make_model(devices, seconds=(0.0,)):
    strategy = keras_het.HeterogeneousStrategy(devices=devices)
    with strategy.scope():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(1)(Sleep(seconds)(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
    return strategy, model


def make_data(seconds=0.0, steps=STEPS):
    rows = np.ones((BATCH * steps, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(BATCH)
    if not seconds:
        return data

    def wait(values):
        time.sleep(seconds)
        return values

    def slowly(x, y):
        waited = tf.numpy_function(wait, [x], tf.float32)
        waited.set_shape((None, 4))
        return waited, y

    return data.map(slowly, num_parallel_calls=1)


@pytest.mark.quick("2")
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_four_times_add_up_to_the_wall_time(logical_devices, replicas):
    steps = 20
    _, model = make_model(logical_devices[:replicas], (0.01, 0.03))
    telemetry, clock = Telemetry(), Clock(0.02)
    model.fit(make_data(0.015, steps), epochs=3, verbose=0, callbacks=[telemetry, clock])
    recording = telemetry.recording()
    assert recording.steps.tolist() == list(range(3 * steps - 1))
    # of the second epoch, whose last step is known in the third
    rows = recording.between(steps + 1, 2 * steps)
    np.testing.assert_allclose(rows.wall.sum(axis=0), clock.epochs[1], rtol=0.02)
    assert (rows.compute > 0.009).all()
    assert (rows.other > 0.019).all()


@pytest.mark.full
def test_each_part_is_where_it_arises(logical_devices):
    _, model = make_model(logical_devices[:2], (0.01, 0.05))
    telemetry = Telemetry()
    model.fit(make_data(), epochs=2, verbose=0, callbacks=[telemetry])
    rows = telemetry.recording().between(2, 2 * STEPS)
    compute, sync = np.median(rows.compute, axis=0), np.median(rows.sync, axis=0)
    assert compute[0] < 0.05 <= compute[1]
    # the fast one waits for the slow one
    np.testing.assert_allclose(sync[0] - sync[1], compute[1] - compute[0], atol=0.01)
    assert (rows.shares == BATCH / 2).all()


@pytest.mark.full
def test_input_wait_is_the_pipelines(logical_devices):
    _, model = make_model(logical_devices[:2])
    telemetry = Telemetry()
    history = model.fit(make_data(0.05), epochs=2, verbose=0, callbacks=[telemetry])
    waited = telemetry.recording().between(4, STEPS).input
    assert np.median(waited) > 0.03
    assert (waited[:, 0] == waited[:, 1]).all()  # one pipeline for both
    assert history.history["input_wait_seconds"][-1] > 0.03


@pytest.mark.quick("tuned")
@pytest.mark.parametrize("others", [(), (BatchBalancer, LoaderTuner)], ids=["alone", "tuned"])
def test_loggers_get_the_numbers_that_matter(logical_devices, tmp_path, others):
    _, model = make_model(logical_devices[:2], (0.001, 0.01))
    seen = []

    class Logger(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    table = tmp_path / "log.csv"
    callbacks = [
        Logger(),
        keras.callbacks.CSVLogger(table),
        Telemetry(),
        *(each() for each in others),
    ]
    data = make_data()
    history = model.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=callbacks)
    assert set(history.history) >= {"loss", "val_loss", *NUMBERS}
    assert all(set(each) >= NUMBERS for each in seen)
    with table.open() as file:
        assert set(csv.DictReader(file).fieldnames) >= NUMBERS
    assert history.history["slowest_replica"][0] == 1.0


@pytest.mark.full
def test_weights_are_the_same_with_it(logical_devices):
    results = []
    for callbacks in ([], [Telemetry()]):
        keras.utils.set_random_seed(1)
        strategy, model = make_model(logical_devices[:2])
        strategy.set_share_weights((3, 1))
        model.fit(make_data(), epochs=2, verbose=0, callbacks=callbacks)
        results.append(model.get_weights())
    for plain, watched in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, watched)


@pytest.mark.full
def test_the_progress_bar_and_prometheus_have_the_numbers(logical_devices, capsys):
    _, model = make_model(logical_devices[:2])
    telemetry, pages = Telemetry(progress=True, prometheus_port=0), []

    class Scrape(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            port = telemetry._endpoint.port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
                pages.append(page.read().decode())

    model.fit(make_data(), epochs=2, verbose=1, callbacks=[telemetry, Scrape()])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "samples_per_second" in last and f"{STEPS}/{STEPS}" in last
    assert 'keras_het_step_seconds{device="worker 0 CPU 1",phase="compute"}' in pages[1]
    assert "keras_het_samples_per_second" in pages[1]
    assert "keras_het_steps_total" in pages[0]


def test_a_second_fit_continues_counting_and_holds_its_own_steps(logical_devices, tmp_path):
    _, model = make_model(logical_devices[:1])
    telemetry = Telemetry(tmp_path)
    model.fit(make_data(), verbose=0, callbacks=[telemetry])
    model.fit(make_data(), verbose=0)
    model.fit(make_data(), verbose=0, callbacks=[telemetry])
    assert telemetry.recording().steps.tolist() == list(range(2 * STEPS, 3 * STEPS - 1))


def test_changes_are_recorded_with_their_reasons(logical_devices, tmp_path):
    _, model = make_model(logical_devices[:2], (0.001, 0.02))
    telemetry = Telemetry(tmp_path)
    model.fit(make_data(), epochs=2, verbose=0, callbacks=[BatchBalancer(), telemetry])
    changes = telemetry.recording().changes
    assert changes[0].kind == "shares"
    assert changes[0].text == "shares 4 4 (min_max: even split)", "its step is not in the text"
    (run,) = read_log(tmp_path)
    assert run.recording.changes == changes
    assert run.recording.steps.tolist() == list(range(2 * STEPS - 1))


def test_a_pause_between_epochs_is_no_part_of_a_step(logical_devices, tmp_path, capsys):
    """Nor is there a slowest replica of one."""
    _, model = make_model(logical_devices[:1])

    class Pause(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            time.sleep(0.3)

    telemetry = Telemetry(tmp_path)
    history = model.fit(make_data(), epochs=3, verbose=1, callbacks=[telemetry, Pause()])
    recording = telemetry.recording()
    assert [step for step, _ in recording.pauses] == [STEPS, 2 * STEPS]
    assert all(0.3 <= seconds < 60 for _, seconds in recording.pauses)
    (run,) = read_log(tmp_path)
    assert run.recording.pauses == recording.pauses
    # of the last epoch all steps but the last are known
    rows = recording.between(2 * STEPS, 3 * STEPS)
    expected = rows.samples.sum() / rows.wall.mean(axis=1).sum()
    assert history.history["samples_per_second"][-1] == pytest.approx(expected, rel=1e-6)
    assert "slowest_replica" not in history.history
    assert "slowest_replica" not in capsys.readouterr().out


class Phases:
    """Measured steps of two workers, of which this one knows its own."""

    count = 0
    stages = 1
    is_sampled = False

    def __init__(self):
        self.new = np.zeros((0, PARTS, 2))

    def read_new(self):
        rows, self.new = self.new, self.new[:0]
        self.count += len(rows)
        return self.count - len(rows), rows, np.ones(len(rows), bool)


def test_numbers_of_an_epoch_cover_the_steps_known_for_all():
    phases = Phases()
    others = np.zeros((1, 64, PARTS, 2))
    others[..., 0, 1], others[..., 4, 1] = 0.1, 24  # compute, share
    strategy = types.SimpleNamespace(
        extended=types.SimpleNamespace(
            compute_times=types.SimpleNamespace(phases=phases),
            gather_over_workers=lambda own: np.concatenate([own, others]),
        ),
    )
    recorder = StepRecorder(strategy, ["worker 0", "worker 1"])
    recorder.begin(0)
    phases.new = np.zeros((100, PARTS, 2))
    phases.new[:, 0, 0], phases.new[:, 4, 0] = 0.1, 8
    recorder.complete(strategy)
    assert recorder.logs()["samples_per_second"] == pytest.approx(320)
    phases.new = np.zeros((3, PARTS, 2))
    recorder.read()
    assert recorder.logs(latest=3) == {}, "nothing is known of these"


def test_blocks_of_steps_are_written_in_their_order():
    """The end of an epoch, in the main thread, does not overtake the thread that writes."""
    telemetry, written = Telemetry(), []
    blocks = [(first, np.ones((8, PARTS, 1)), np.ones(8, bool)) for first in (0, 8)]

    class Recorder:
        def take_new(self):
            return [blocks.pop(0)]

        def logs(self, latest):
            return {}

    class Log:
        def write_steps(self, first, rows, measured):
            if first == 0:
                other.start()
                other.join(0.2)
            written.append(first)

        def write_scalars(self, step, values):
            assert set(values) == {"heterogeneous/step_seconds"}

    recorder, telemetry._log = Recorder(), Log()
    other = threading.Thread(target=telemetry._write_steps, args=[recorder])
    telemetry._write_steps(recorder)
    other.join(30)
    assert written == [0, 8]


def test_the_end_says_why_there_is_no_verdict(logical_devices, capsys):
    _, model = make_model(logical_devices[:2])
    telemetry = Telemetry(verbose=1)
    model.fit(make_data(), verbose=0, callbacks=[telemetry])
    assert telemetry.verdict.lines == ()
    (reason,) = telemetry.verdict.missing
    assert reason.startswith("not enough steps yet")
    assert f"No verdict: {reason}.\n" in capsys.readouterr().out


def test_a_diagnosis_that_fails_ends_no_training(logical_devices, tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry_callback, "diagnose", lambda recording: 1 / 0)
    _, model = make_model(logical_devices[:1])
    telemetry = Telemetry(tmp_path)
    model.fit(make_data(), verbose=0, callbacks=[telemetry])
    assert str(telemetry.verdict).startswith("No verdict: the diagnosis failed: ZeroDivisionError")
    assert len(read_log(tmp_path)) == 1 and telemetry._background is None


@pytest.mark.full
def test_an_error_of_fit_ends_the_thread(logical_devices, capsys):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("on purpose")

    _, model = make_model(logical_devices[:1])
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(make_data(), verbose=0, callbacks=[Telemetry(verbose=1), Fails()])
    assert "erdict" not in capsys.readouterr().out, "nothing is said below an error"
    assert not [each for each in threading.enumerate() if each.name == "keras_het-telemetry"]


def test_wrong_use_is_refused_in_words(logical_devices):
    with pytest.raises(ValueError, match="keep_steps must be a whole number of at least 1"):
        Telemetry(keep_steps=0)
    _, model = make_model(logical_devices[:1])
    with pytest.raises(ValueError, match="One Telemetry records a fit"):
        model.fit(make_data(), verbose=0, callbacks=[Telemetry(), Telemetry()])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    message = "Received: a model that was built under no strategy. Make strategy = keras_het"
    with pytest.raises(ValueError, match=message):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[Telemetry()])
