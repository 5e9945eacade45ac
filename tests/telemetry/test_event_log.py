"""Logs as they are written and read back: sizes, errors, resumed trainings."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from keras_het.planning.diagnosis.recording import Change, Device
from keras_het.planning.pipeline import Timeline
from keras_het.telemetry import event_log
from keras_het.telemetry.event_log import EventLog, read_log
from keras_het.tensorboard import log_format

DEVICES = tuple(Device(f"worker {n} GPU 0", n, "GPU", f"host{n}", "Model") for n in range(3))
HARDWARE = ("hw.power", "hw.temperature")


def block(first, steps, replicas=3):
    """Values that say which step, row and replica they are of."""
    step = np.arange(first, first + steps)[:, None, None]
    row = np.arange(5)[None, :, None] / 10
    return step + row + np.arange(replicas) / 100


def write(folder, first, steps, size=5, **settings):
    log = EventLog(folder / "telemetry", DEVICES, HARDWARE, **settings)
    for start in range(first, first + steps, size):
        log.write_steps(start, block(start, min(size, first + steps - start)))
    log.close()


def only_run(folder):
    (run,) = read_log(folder)
    return run


def files(folder):
    return sorted((folder / "telemetry").iterdir())


def test_what_is_written_is_read(tmp_path):
    log = EventLog(tmp_path / "telemetry", DEVICES, HARDWARE)
    log.write_steps(7, block(7, 4))
    log.write_hardware(9, [[100, np.nan], [200, 60], [300, 70]])
    log.write_change(Change(9, "shares", "worker 0 gets more"))
    log.write_change(Change(9, "loader", "2 threads"))
    log.write_async(10, worker=3, staleness=2, exchange_seconds=math.nan)
    log.write_scalars(10, {"heterogeneous/step_seconds": 0.5})
    log.write_steps(11, block(11, 1))
    log.flush()

    run = only_run(tmp_path)
    recording = run.recording
    assert run.name == "telemetry"
    assert run.content.messages == ()
    assert recording.devices == DEVICES
    np.testing.assert_array_equal(recording.steps, np.arange(7, 12))
    expected = block(7, 5)
    for row, name in enumerate(("compute", "input", "sync", "other", "shares")):
        np.testing.assert_allclose(getattr(recording, name), expected[:, row], rtol=1e-6)
    np.testing.assert_array_equal(recording.hardware["hw.power"], [[100, 200, 300]])
    np.testing.assert_array_equal(recording.hardware["hw.temperature"], [[np.nan, 60, 70]])
    np.testing.assert_array_equal(recording.hardware_steps, [9])
    assert recording.changes == (
        Change(9, "shares", "worker 0 gets more"),
        Change(9, "loader", "2 threads"),
    )
    assert run.content.exchanges == (
        {"worker": 3, "staleness": 2, "exchange_seconds": None, "step": 10},
    )
    log.close()


def test_nothing_is_created_before_the_first_write(tmp_path):
    EventLog(tmp_path / "telemetry", DEVICES).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 7, 100])
def test_later_steps_have_rows_of_several(tmp_path, size):
    write(tmp_path, 0, 799, size, keep_steps=100)
    content = only_run(tmp_path).content
    steps, every = content.recording.steps, content.every
    assert content.messages == ()
    ends = np.append(steps[1:], 799)
    # the last steps do not fill a row
    np.testing.assert_array_equal(ends - steps, every)
    assert set(every[:-20]) == {1, 4, 8, 16} and set(every) == {1, 4, 8, 16}
    # a block has one resolution
    assert 100 <= np.sum(every[:-15] == 1) < 100 + size
    values = block(0, 799)
    for step in steps[[0, 99, 120, 150, -20]]:
        row = int(np.searchsorted(steps, step))
        part = values[step : step + every[row], 0]
        np.testing.assert_allclose(content.recording.compute[row], np.median(part, axis=0))
        np.testing.assert_allclose(content.highest[row, 0], part[-1], rtol=1e-6)


def test_a_log_grows_with_the_logarithm_of_its_steps(tmp_path):
    sizes = []
    for steps in (3200, 6400, 12_800):
        folder = tmp_path / str(steps)
        log = EventLog(folder / "telemetry", DEVICES, HARDWARE, keep_steps=400)
        for step in range(0, steps, 20):
            log.write_steps(step, block(step, 20))
            log.write_hardware(step, np.full((3, 2), step))
            log.write_async(step, worker=3, staleness=2)
            log.write_scalars(step, {"heterogeneous/step_seconds": 0.5})
            log.write_passes(step, Timeline(((), (), ()), 1.0))
        log.close()
        sizes.append(files(folder)[0].stat().st_size)
        recording = only_run(folder).recording
        assert 50 < len(recording.hardware_steps) < 150
        assert recording.hardware_steps[-1] > 0.9 * steps
    assert sizes[2] - sizes[1] < 1.2 * (sizes[1] - sizes[0])


def test_changes_are_all_kept(tmp_path):
    log = EventLog(tmp_path / "telemetry", DEVICES, HARDWARE, keep_steps=100)
    for step in range(0, 600, 3):
        log.write_steps(step, block(step, 3))
        log.write_change(Change(step, "shares", f"at {step}"))
    log.close()
    recording = only_run(tmp_path).recording
    assert [each.step for each in recording.changes] == list(range(0, 600, 3))


def test_a_resumed_training_replaces_the_steps_that_it_repeats(tmp_path):
    write(tmp_path, 0, 40)
    log = EventLog(tmp_path / "telemetry", DEVICES, HARDWARE)
    log.write_steps(23, block(23, 10) + 1000)
    log.close()
    recording = only_run(tmp_path).recording
    np.testing.assert_array_equal(recording.steps, np.arange(33))
    assert recording.compute[22, 0] == pytest.approx(22)
    assert recording.compute[23, 0] == pytest.approx(1023)


def test_rows_of_a_resumed_training_continue_as_they_were(tmp_path):
    write(tmp_path, 0, 300, keep_steps=100)
    write(tmp_path, 233, 300, keep_steps=100)
    content = only_run(tmp_path).content
    steps, every = content.recording.steps, content.every
    assert content.messages == ()
    assert steps[-1] + every[-1] == 533
    assert every[steps == 233] == 8
    assert np.all(steps[1:] - steps[:-1] <= every[:-1])


def test_a_clock_that_was_put_back_changes_no_order(tmp_path, monkeypatch):
    write(tmp_path, 0, 10)
    monkeypatch.setattr(event_log.time, "time", lambda: 1.0)
    write(tmp_path, 5, 10)
    np.testing.assert_array_equal(only_run(tmp_path).recording.steps, np.arange(15))


def test_other_devices_after_a_resume(tmp_path):
    write(tmp_path, 0, 10)
    newer = (DEVICES[2], Device("worker 3 CPU 0", 3))
    log = EventLog(tmp_path / "telemetry", newer, HARDWARE[1:])
    log.write_steps(10, block(10, 2, replicas=2))
    log.write_hardware(10, [[50], [np.nan]])
    log.close()
    recording = only_run(tmp_path).recording
    assert recording.devices[:2] == newer
    gone = [f"worker {n} GPU 0 (until step 9)" for n in range(2)]
    assert [device.name for device in recording.devices[2:]] == gone
    np.testing.assert_allclose(recording.compute[3], [3.02, np.nan, 3.0, 3.01])
    np.testing.assert_allclose(recording.compute[11], [11.0, 11.01, np.nan, np.nan])
    assert list(recording.hardware) == ["hw.temperature"]


def test_files_of_others_are_left_alone(tmp_path):
    import tensorflow as tf

    write(tmp_path / "run", 0, 10)
    with tf.summary.create_file_writer(str(tmp_path / "run" / "train")).as_default():
        tf.summary.scalar("loss", 1.0, step=0)
    (tmp_path / "run" / "telemetry" / "events.out.tfevents.1.x").write_bytes(b"nonsense")
    (tmp_path / "run" / "telemetry" / "events.out.tfevents.1.x.keras_het").write_bytes(b"\1" * 99)
    assert only_run(tmp_path).name == "run/telemetry"


def test_a_newer_version_is_read_and_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(log_format, "VERSION", 2)
        write(tmp_path, 0, 10)
    run = only_run(tmp_path)
    assert len(run.recording.steps) == 10
    assert ["version 2" in message for message in run.content.messages] == [True]


def test_no_log_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no log directory"):
        read_log(tmp_path / "none")
    assert read_log(tmp_path) == []


def train_a_while(log):
    for step in range(0, 30, 10):
        log.write_steps(step, block(step, 10))
        log.write_scalars(step, {"heterogeneous/step_seconds": 0.5})
        log.flush()
    log.close()


def test_a_full_disk_makes_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(event_log.os.path, "join", lambda *parts: "/dev/full")
    with caplog.at_level(logging.WARNING, "keras_het"):
        train_a_while(EventLog(tmp_path, DEVICES))
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "the training continues" in record.getMessage()
    (tmp_path / "file").write_text("")
    train_a_while(EventLog(tmp_path / "file" / "telemetry", DEVICES))
    assert len(caplog.records) == 2, "a directory that cannot be made"


def test_a_removed_log_makes_one_warning(tmp_path, caplog):
    log = EventLog(tmp_path / "telemetry", DEVICES)
    log.write_steps(0, block(0, 10))
    log.flush()
    for path in files(tmp_path):
        path.unlink()
    train_a_while(log)
    (record,) = caplog.records
    assert "was removed" in record.getMessage()
