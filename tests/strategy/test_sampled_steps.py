"""On devices that work ahead of their hosts few steps are measured, and the others read nothing."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from reads_of_devices import Reads
from tensorflow.core.util import event_pb2

import keras_het
from keras_het.callbacks import BatchBalancer
from keras_het.loader.input.step_iterator import StepIterator
from keras_het.planning.measuring_schedule import BURST, FIRST_STEPS
from keras_het.strategy.measure import emulated_device
from keras_het.strategy.measure.emulated_device import DeviceQueue
from keras_het.strategy.measure.step_clock import StepClock

SAMPLE_SECONDS = 4e-3
STEPS, BATCH = 40, 12
STEP_SECONDS = SAMPLE_SECONDS * BATCH / 2


@pytest.fixture
def strategy(monkeypatch, request):
    """Two devices, which work ahead of their hosts unless a test says otherwise."""
    speeds, asynchronous = getattr(request, "param", ((1, 1), True))
    devices = [
        {
            "speed": speed,
            "fixed_seconds": 0.0,
            "seconds_per_sample": SAMPLE_SECONDS / speed,
            "asynchronous": asynchronous,
        }
        for speed in speeds
    ]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    monkeypatch.setattr(emulated_device, "_queues", {})
    monkeypatch.setattr(emulated_device, "_slowdowns", {})
    return keras_het.HeterogeneousStrategy(devices=DEVICES[1:3])


def data(steps):
    x = np.random.default_rng(0).normal(size=(BATCH * steps, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(BATCH)


def trained(strategy, callbacks=(), steps=STEPS, verbose=0, **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    model.fit(data(steps), verbose=verbose, callbacks=list(callbacks))
    return model


def test_a_queue_takes_launches_and_makes_copies_wait():
    device = DeviceQueue(depth=2)
    started = time.time()
    device.launch(0.05, started)
    device.launch(0.05, started)
    assert device.busy_until == pytest.approx(started + 0.1, abs=0.02)
    assert time.time() < started + 0.05
    device.launch(0.05, started)  # the queue is full
    assert time.time() >= started + 0.05
    device.meet(started + 0.3)  # the host waits, too
    assert time.time() >= started + 0.3
    assert device.busy_until >= started + 0.3


def test_few_steps_are_measured_and_stand_for_all(strategy):
    balancer = BatchBalancer("even")
    trained(strategy, [balancer])
    numbers = [row["step"] for row in balancer.measurements]
    assert numbers[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert len(numbers) < STEPS
    assert numbers == sorted(set(numbers)) and numbers[-1] < STEPS
    for row in balancer.measurements:
        assert min(row["seconds"]) >= STEP_SECONDS - 1e-3


@pytest.mark.full
def test_only_the_measured_function_has_clocks(strategy, monkeypatch):
    clocks, traced = [], StepClock.__init__

    def tracing(clock, *arguments):
        clocks.append(clock)
        traced(clock, *arguments)

    monkeypatch.setattr(StepClock, "__init__", tracing)
    trained(strategy, [BatchBalancer("even")])
    assert len(clocks) == 2  # on two replicas


CALLBACKS = {
    "none": lambda folder: [],
    "balancer": lambda folder: [BatchBalancer("even")],
    "telemetry": lambda folder: [keras_het.callbacks.Telemetry(folder)],
    "tuner": lambda folder: [keras_het.callbacks.LoaderTuner()],
    "backup": lambda folder: [keras_het.callbacks.BackupAndRestore(folder)],
    "those of Keras": lambda folder: [
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ModelCheckpoint(folder / "model.keras"),
        keras.callbacks.TensorBoard(folder),
    ],
    "all": lambda folder: [
        keras_het.callbacks.BackupAndRestore(folder / "backup"),
        keras_het.callbacks.LoaderTuner(),
        BatchBalancer(),
        keras_het.callbacks.Telemetry(folder / "log"),
    ],
}


@pytest.mark.quick("all")
@pytest.mark.parametrize("callbacks", CALLBACKS)
def test_a_plain_step_reads_nothing_from_a_device(strategy, monkeypatch, tmp_path, callbacks):
    reads = Reads(monkeypatch.setattr)
    trained(strategy, [*CALLBACKS[callbacks](tmp_path), reads])
    assert not reads.in_plain_steps
    measures = callbacks in ("balancer", "telemetry", "all")
    assert bool(reads.measured) == measures and len(reads.measured) < STEPS


def test_a_progress_bar_shows_late_numbers_and_reads_nothing(strategy, monkeypatch, capsys):
    reads = Reads(monkeypatch.setattr)
    model = trained(strategy, [reads], verbose=1)
    assert not reads.in_plain_steps
    *earlier, last = capsys.readouterr().out.strip().split("\r")
    assert any("loss: " in shown for shown in earlier)
    assert f"loss: {model.history.history['loss'][-1]:.4f}" in last


def test_who_looks_at_logs_finds_the_logs_of_the_step(strategy, tmp_path):
    def logged(strategy):
        found = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: found.append(logs["loss"]),
            on_epoch_end=lambda epoch, logs: found.append(logs["loss"]),
        )
        trained(strategy, [look], steps=6)
        return found

    found = logged(strategy)
    assert len(found) == 7 and all(type(loss) is float for loss in found)
    np.testing.assert_allclose(found, logged(tf.distribute.get_strategy()), rtol=1e-5)


def test_tensorboard_writes_the_logs_of_the_steps_that_it_writes(strategy, tmp_path):
    losses = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    trained(strategy, [keras.callbacks.TensorBoard(tmp_path, update_freq=3), look], steps=6)
    written = {}
    for file in (tmp_path / "train").iterdir():
        for record in tf.data.TFRecordDataset(str(file)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag == "batch_loss":
                    written[event.step] = float(tf.make_ndarray(value.tensor))
    assert set(written) == {3, 6}
    for step, loss in written.items():
        assert loss == pytest.approx(losses[step - 1], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("execution", [1, 4])
def test_weights_equal_one_device(strategy, execution):
    alone = trained(tf.distribute.get_strategy(), steps=20).get_weights()
    balancer = BatchBalancer("static", weights=[3, 1])
    found = trained(strategy, [balancer], 20, steps_per_execution=execution).get_weights()
    for got, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.full
def test_measured_steps_have_their_numbers_among_executions(strategy):
    balancer, telemetry = BatchBalancer("even"), keras_het.callbacks.Telemetry()
    trained(strategy, [balancer, telemetry], steps=STEPS + 2, steps_per_execution=4)
    numbers = [row["step"] for row in balancer.measurements]
    executions = sorted({number // 4 for number in numbers})
    whole = [4 * each + step for each in executions for step in range(4)]
    assert numbers == [number for number in whole if number < STEPS + 2]
    assert len(executions) < (STEPS + 2) / 4
    recording = telemetry.recording()
    assert recording.steps.tolist() == list(range(len(recording.steps)))
    walls = recording.compute + recording.input + recording.sync + recording.other
    np.testing.assert_allclose(*walls.sum(axis=0), rtol=0.1)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [((3, 1), True)], indirect=True)
def test_shares_follow_speeds_and_a_change_of_speed(strategy):
    balancer = BatchBalancer()

    class Until(keras.callbacks.Callback):
        """Trains until the first share is as expected."""

        def __init__(self, expected):
            super().__init__()
            self.expected = expected

        def on_train_batch_end(self, batch, logs=None):
            if abs(balancer.plans[-1].shares[0] - self.expected) <= 1:
                self.model.stop_training = True

    endless = data(STEPS).repeat()
    model = trained(strategy, steps=4)
    for factor, expected in ((1.0, 9), (3.0, 6), (1.0, 9)):
        emulated_device.slow_down(0, factor)
        callbacks = [balancer, Until(expected)]
        model.fit(endless, steps_per_epoch=1000, verbose=0, callbacks=callbacks)
        assert balancer.plans[-1].shares[0] == pytest.approx(expected, abs=1)
    assert len(balancer.measurements) >= BURST


@pytest.mark.parametrize("strategy", [((1, 1), False)], indirect=True)
def test_devices_that_do_not_work_ahead_are_measured_in_all_steps(strategy):
    balancer = BatchBalancer("even")
    trained(strategy, [balancer], steps=20)
    assert [row["step"] for row in balancer.measurements] == list(range(20))


class LateBatches(keras.utils.PyDataset):
    """Batches that come when the device has long been empty, and its host waits for them."""

    def __init__(self, strategy, monkeypatch):
        super().__init__()
        self._strategy, self._waiting = strategy, -1
        wait = StepIterator.__next__

        def noting(iterator):
            self._waiting = iterator.step
            return wait(iterator)

        monkeypatch.setattr(StepIterator, "__next__", noting)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        deadline = time.monotonic() + 60
        while self._waiting >= 0 and not self._is_awaited(index):  # else Keras looks at shapes
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        time.sleep(STEP_SECONDS)
        x = np.full((BATCH, 4), index, "float32")
        return x, x[:, :1]

    def _is_awaited(self, index):
        pending = self._strategy.extended.stop_request.sampled._reads._pending
        return self._waiting >= index and all(read.done() for read in pending)


@pytest.mark.full
def test_rows_stand_for_all_steps_and_their_times_add_up(strategy):
    telemetry = keras_het.callbacks.Telemetry()
    model = trained(strategy, [telemetry], steps=4)
    x = np.ones((BATCH * STEPS, 4), "float32")
    started = time.perf_counter()
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0, callbacks=[telemetry])
    whole = time.perf_counter() - started
    recording = telemetry.recording()
    # what follows the last measured step is not known
    numbers = recording.steps - recording.steps[0]
    assert numbers.tolist() == list(range(len(numbers))) and STEPS < len(numbers) < 2 * STEPS
    walls = recording.compute + recording.input + recording.sync + recording.other
    np.testing.assert_allclose(*walls.sum(axis=0), rtol=0.1)
    # a busy machine delays the reading of the clock, too
    assert 0.9 * len(walls) * STEP_SECONDS < walls[:, 0].sum() < 1.1 * whole
    assert np.median(recording.compute) >= 0.9 * STEP_SECONDS
    assert np.median(recording.input) < 0.4 * np.median(walls)  # hosts wait, devices do not


@pytest.mark.full
def test_a_device_that_is_empty_waits_for_its_input(strategy, monkeypatch):
    telemetry, noted = keras_het.callbacks.Telemetry(), []
    model = trained(strategy, steps=4)
    phases = strategy.extended.compute_times.phases
    note = phases.note_input_wait

    def noting(seconds, **options):
        noted.append(seconds)
        note(seconds, **options)

    monkeypatch.setattr(phases, "note_input_wait", noting)
    data = LateBatches(strategy, monkeypatch)
    model.fit(data, shuffle=False, verbose=0, callbacks=[telemetry])
    assert len(noted) > FIRST_STEPS  # the first know no step before
    assert min(noted[FIRST_STEPS:]) >= STEP_SECONDS
    assert (telemetry.recording().input[FIRST_STEPS:] > 0).all()


@pytest.mark.full
def test_an_epoch_without_a_measured_step_has_the_latest_numbers(strategy):
    model = trained(strategy, steps=4)
    x = np.ones((BATCH * 5, 4), "float32")
    telemetry = keras_het.callbacks.Telemetry()
    history = model.fit(
        x, x[:, :1], batch_size=BATCH, epochs=6, verbose=0, callbacks=[telemetry]
    ).history
    assert len(history["samples_per_second"]) == 6
    assert min(history["samples_per_second"]) > 0
