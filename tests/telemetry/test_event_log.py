"""Logs as they are written and read back: sizes, damage, errors, resumed trainings."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_het.planning.diagnosis.recording import Change, Device
from keras_het.telemetry import event_files, event_log
from keras_het.telemetry.event_files import Run, read_log
from keras_het.telemetry.event_log import EventLog
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_files import records

DEVICES = tuple(Device(f"worker {n} GPU 0", n, "GPU", f"host{n}", "Model") for n in range(3))
HARDWARE = ("hw.power", "hw.temperature")


def block(first: int, steps: int, replicas: int = 3) -> Any:
    """Values that say which step, row and replica they are of."""
    step = np.arange(first, first + steps)[:, None, None]
    row = np.arange(5)[None, :, None] / 10
    return step + row + np.arange(replicas) / 100


def write(folder: Path, first: int, steps: int, size: int = 5, **settings: Any) -> None:
    log = EventLog(folder / "telemetry", DEVICES, HARDWARE, **settings)
    for start in range(first, first + steps, size):
        log.write_steps(start, block(start, size))
    log.close()


def only_run(folder: Path) -> Run:
    (run,) = read_log(folder)
    return run


def files(folder: Path) -> list[Path]:
    return sorted((folder / "telemetry").iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
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


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    EventLog(tmp_path / "telemetry", DEVICES).close()
    assert list(tmp_path.iterdir()) == []


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path, DEVICES, HARDWARE)
    with pytest.raises(ValueError, match="block does not fit"):
        log.write_steps(0, block(0, 4, replicas=2))
    with pytest.raises(ValueError, match="values does not fit"):
        log.write_hardware(0, np.zeros((3, 1)))


def test_old_steps_are_thinned_and_the_newest_kept_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, 0, 400, keep_steps=150, segment_steps=50, every=8)
    content = only_run(tmp_path).content
    steps, every = content.recording.steps, content.every
    assert np.all(np.diff(steps) > 0)
    assert 100 <= np.sum(every == 1) <= 150
    assert set(every) == {1, 8}
    np.testing.assert_array_equal(steps[every == 1], np.arange(steps[every == 1][0], 400))
    old = steps[every == 8]
    assert (old[0], len(files(tmp_path))) == (0, 8)
    # windows begin with each file: 0, 8, .. 40, 48, 50, 58, ..
    assert list(old[:9]) == [0, 8, 16, 24, 32, 40, 48, 50, 58]
    median = block(0, 400)[:, 0]
    np.testing.assert_allclose(content.recording.compute[0], np.median(median[:8], axis=0))
    np.testing.assert_allclose(content.highest[0, 0], median[7], rtol=1e-6)
    assert sum(path.stat().st_size for path in files(tmp_path)) < 400 * 3 * 100


def test_thinning_keeps_changes_and_a_part_of_the_rest(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "telemetry", DEVICES, HARDWARE, 20, segment_steps=10, every=5)
    for step in range(60):
        log.write_hardware(step, np.full((3, 2), step))
        log.write_steps(step, block(step, 1))
        if step % 3 == 0:
            log.write_change(Change(step, "shares", f"at {step}"))
    log.close()
    recording = only_run(tmp_path).recording
    assert [each.step for each in recording.changes] == list(range(0, 60, 3))
    sampled = list(recording.hardware_steps)
    assert sampled[:4] == [4, 9, 10, 14]  # a file begins before step 10, after its sample
    assert sampled[-10:] == list(range(50, 60))


def test_a_resumed_training_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, 0, 40)
    log = EventLog(tmp_path / "telemetry", DEVICES, HARDWARE)
    log.write_steps(23, block(23, 10) + 1000)
    log.close()
    recording = only_run(tmp_path).recording
    np.testing.assert_array_equal(recording.steps, np.arange(33))
    assert recording.compute[22, 0] == pytest.approx(22)
    assert recording.compute[23, 0] == pytest.approx(1023)


def test_steps_of_earlier_starts_count_too(tmp_path: Path) -> None:
    for start in range(6):
        write(tmp_path, 50 * start, 50, keep_steps=100, segment_steps=50, every=10)
    content = only_run(tmp_path).content
    assert np.sum(content.every == 1) == 100
    np.testing.assert_array_equal(content.recording.steps[content.every == 10], range(0, 200, 10))


def test_a_clock_that_was_put_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 10)
    monkeypatch.setattr(event_files.time, "time", lambda: 1.0)
    write(tmp_path, 5, 10)
    np.testing.assert_array_equal(only_run(tmp_path).recording.steps, np.arange(15))


def test_other_devices_after_a_resume(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("lost", [1, 3, 40, 200])
def test_a_torn_file_is_read_up_to_there(tmp_path: Path, lost: int) -> None:
    write(tmp_path, 0, 50)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-lost])
    steps = only_run(tmp_path).recording.steps
    np.testing.assert_array_equal(steps, np.arange(len(steps)))
    assert 40 <= len(steps) < 50


def damaged(folder: Path, tag: str, content: Any) -> Run:
    """A log of 50 steps, of which one value of a tag was replaced."""
    log = EventLog(folder / "telemetry", DEVICES, HARDWARE)
    for step in range(0, 50, 5):
        log.write_steps(step, block(step, 5))
        log.write_hardware(step, np.full((3, 2), step))
        log.write_change(Change(step, "shares", f"at {step}"))
    log.close()
    (path,) = files(folder)
    values = list(event_files.read_events(str(path)))
    place = [n for n, each in enumerate(values) if each.tag == tag][4]
    values[place] = dataclasses.replace(values[place], value=content)
    file = event_files.EventFile(str(path))
    for each in values:
        file.write([each])
    file.close()
    return only_run(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"no numbers",
        np.array([[["no", "numbers"]]]),
        np.zeros((5, 3), np.float32),
        np.zeros((5, 4, 3), np.float32),
        np.zeros((5, 5, 3), np.complex64),
    ],
    ids=["text", "texts", "dimensions", "rows", "complex"],
)
def test_a_damaged_block_costs_that_block_only(tmp_path: Path, content: Any) -> None:
    run = damaged(tmp_path, log_format.STEPS, content)
    np.testing.assert_array_equal(run.recording.steps, np.r_[0:20, 25:50])
    assert len(run.recording.changes) == len(run.recording.hardware_steps) == 10
    message, gap = run.content.messages
    assert message.startswith("1 value of keras_het/steps could not be read, the first at step 20")
    assert gap == "5 steps are not in this log, the first of them is step 20."


@pytest.mark.parametrize("tag", [log_format.HARDWARE_SAMPLES, log_format.CHANGES])
def test_other_damaged_values_cost_themselves(tmp_path: Path, tag: str) -> None:
    run = damaged(tmp_path, tag, np.array(["no", "numbers"]))
    assert len(run.recording.steps) == 50
    kept = {len(run.recording.changes), len(run.recording.hardware_steps)}
    assert kept == {9, 10}
    assert [f"1 value of {tag}" in message for message in run.content.messages] == [True]


def test_a_damaged_record_costs_that_record_only(tmp_path: Path) -> None:
    write(tmp_path, 0, 50)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    place = content.index(log_format.STEPS.encode(), len(content) // 2)
    path.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])
    run = only_run(tmp_path)
    assert len(run.recording.steps) == 45
    ((begin, end),) = records(path.read_bytes())[1]
    assert begin < place < end
    damage, gap = run.content.messages
    assert damage.startswith(f"{end - begin} bytes of {path} are damaged and were left")
    assert gap.startswith("5 steps are not in this log")


def test_a_damaged_block_does_not_end_the_log_of_a_resumed_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(tmp_path, log_format.STEPS, b"no numbers")
    write(tmp_path, 50, 50, keep_steps=50, segment_steps=50, every=5)
    content = only_run(tmp_path).content
    assert caplog.records == []
    np.testing.assert_array_equal(content.recording.steps[content.every == 1], np.arange(50, 100))
    assert set(content.recording.steps[content.every == 5]) == {*range(0, 20, 5), *range(25, 50, 5)}


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    import tensorflow as tf

    write(tmp_path / "run", 0, 10)
    with tf.summary.create_file_writer(str(tmp_path / "run" / "train")).as_default():
        tf.summary.scalar("loss", 1.0, step=0)
    (tmp_path / "run" / "telemetry" / "events.out.tfevents.1.x").write_bytes(b"nonsense")
    (tmp_path / "run" / "telemetry" / "events.out.tfevents.1.x.keras_het").write_bytes(b"\1" * 99)
    assert only_run(tmp_path).name == "run/telemetry"


def test_a_newer_version_is_read_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(log_format, "VERSION", 2)
        write(tmp_path, 0, 10)
    run = only_run(tmp_path)
    assert len(run.recording.steps) == 10
    assert ["version 2" in message for message in run.content.messages] == [True]


def test_no_log_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no log directory"):
        read_log(tmp_path / "none")
    assert read_log(tmp_path) == []


def train_a_while(log: EventLog) -> None:
    for step in range(0, 30, 10):
        log.write_steps(step, block(step, 10))
        log.write_scalars(step, {"heterogeneous/step_seconds": 0.5})
        log.flush()
    log.close()


def test_a_full_disk_makes_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "file_names", lambda directory: iter(["/dev/full"]))
    with caplog.at_level(logging.WARNING, "keras_het"):
        train_a_while(EventLog(tmp_path, DEVICES))
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "the training goes on" in record.getMessage()
    (tmp_path / "file").write_text("")
    train_a_while(EventLog(tmp_path / "file" / "telemetry", DEVICES))
    assert len(caplog.records) == 2, "a directory that cannot be made"


def test_a_removed_log_makes_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "telemetry", DEVICES)
    log.write_steps(0, block(0, 10))
    log.flush()
    for path in files(tmp_path):
        path.unlink()
    train_a_while(log)
    (record,) = caplog.records
    assert "was removed" in record.getMessage()


def test_a_failed_thinning_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 0, 100, segment_steps=50)
    before = {path: path.read_bytes() for path in files(tmp_path)}

    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError("disk quota exceeded")

    monkeypatch.setattr("keras_het.telemetry.event_log.tf.io.gfile.rename", fail)
    write(tmp_path, 100, 10, keep_steps=50, segment_steps=50)
    assert "disk quota exceeded" in caplog.text
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(only_run(tmp_path).recording.steps) == 100
