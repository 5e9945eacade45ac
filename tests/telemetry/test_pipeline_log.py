"""Plans and measured passes in the log and the report: written, read back, damaged, replaced."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from trace_format import check_trace

from keras_het.launch.report_terminal import console_for, show
from keras_het.launch.report_trace import write_trace
from keras_het.planning.diagnosis.recording import Device, PipelineRecord, StageRecord
from keras_het.planning.pipeline import Event, Timeline
from keras_het.telemetry.event_log import EventLog, read_log
from keras_het.tensorboard.log_format import parse_plan, parse_timeline, plan_text

DEVICES = tuple(Device(f"worker 0 CPU {n}", 0) for n in range(2))
PASSES = Timeline(
    (
        (Event("forward", 0, 0, 0.0, 0.1), Event("backward", 0, 0, 0.3, 0.5)),
        (Event("forward", 0, 1, 0.1, 0.2), Event("backward", 0, 1, 0.2, 0.3)),
    ),
    0.5,
)
PLAN = PipelineRecord(
    "stage  layers",
    (StageRecord(("a", "b"), (0,), (1,), (10.0,), ("a",)), StageRecord(("c",), (1,), (1,), (5.0,))),
    PASSES,
)


def write_steps(log, first, steps):
    log.write_steps(first, np.ones((steps, 5, 2), np.float32))


def only_run(folder):
    (run,) = read_log(folder)
    return run


def test_a_plan_and_passes_are_read_as_they_were_written(tmp_path):
    log = EventLog(tmp_path / "telemetry", DEVICES)
    write_steps(log, 0, 5)
    log.write_plan(2, PLAN)
    log.write_passes(3, PASSES)
    log.write_passes(4, PASSES)
    log.close()
    run = only_run(tmp_path)
    assert run.content.messages == ()
    assert run.recording.pipeline == PLAN
    assert [step for step, _ in run.content.passes] == [3, 4]
    assert parse_timeline(run.content.passes[-1][1]) == PASSES
    # two stages count each sample
    np.testing.assert_array_equal(run.recording.samples, np.ones(5))


def test_another_fit_in_the_same_folder_has_its_own_plan_or_none(tmp_path):
    folder = tmp_path / "telemetry"
    first = EventLog(folder, DEVICES)
    first.write_plan(0, PLAN)
    write_steps(first, 0, 5)
    first.write_passes(4, PASSES)
    first.close()
    second = EventLog(folder, DEVICES)
    write_steps(second, 5, 5)
    second.flush()
    assert only_run(tmp_path).recording.pipeline is None
    other = PipelineRecord("other", PLAN.stages)
    second.write_plan(7, other)
    second.write_passes(8, PASSES)
    second.close()
    run = only_run(tmp_path)
    assert run.recording.pipeline == other
    assert [step for step, _ in run.content.passes] == [8]


def test_members_of_newer_versions_are_left_out():
    text = plan_text(PLAN).replace('"text"', '"new":1,"text"')
    assert parse_plan(text) == PLAN


STEPS = 60
EVIL = "<b>stage\x1b[31m  layers</b>"


@pytest.fixture
def content(tmp_path):
    log = EventLog(tmp_path / "telemetry", DEVICES)
    log.write_plan(0, PipelineRecord(f"{EVIL}\n0      a .. c", PLAN.stages, PASSES))
    block = np.zeros((STEPS, 5, 2), np.float32)
    block[:] = np.array([[0.3, 0.2], [0.1, 0.1], [0.2, 0.3], [0.0, 0.0], [32, 32]])
    log.write_steps(0, block)
    for step in (20, 59):
        log.write_passes(step, PASSES)
    log.close()
    (run,) = read_log(tmp_path)
    return run.content


def test_the_plan_is_shown_as_text(content):
    stream = io.StringIO()
    show("run", content, console_for(stream, 100))
    text = stream.getvalue()
    assert "Plan of the pipeline" in text
    assert "0      a .. c" in text
    assert "\x1b[31m" not in text
    assert "What a step would take" not in text  # that is about whole replicas
    assert "53.3 samples/s" in text


def test_the_trace_has_the_measured_passes(content, tmp_path):
    path = tmp_path / "trace.json"
    assert write_trace(path, content) is None
    written = json.loads(path.read_text())
    check_trace(written)
    passes = [each for each in written["traceEvents"] if each.get("cat") == "pass"]
    assert len(passes) == 8
    first = next(each for each in passes if each["args"]["step"] == 20)
    assert first["name"] == "forward"
    assert first["ts"] == pytest.approx((20 * 0.6 + 0.1) * 1e6)
    assert first["dur"] == pytest.approx(0.1e6)
    names = [
        each["args"]["name"] for each in written["traceEvents"] if each["name"] == "thread_name"
    ]
    assert names[-2:] == [f"{device.name}: passes" for device in DEVICES]
