"""The report of a model in stages: its plan, its passes in the trace, samples counted once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from test_pipeline_log import DEVICES, PASSES, PLAN
from trace_format import check_trace

from keras_het.launch.report.facts import Facts, facts_of
from keras_het.launch.report.terminal import console_for, show
from keras_het.launch.report.trace import write_trace
from keras_het.planning.diagnosis.recording import PipelineRecord
from keras_het.telemetry.event_files import read_log
from keras_het.telemetry.event_log import EventLog

STEPS = 60
EVIL = "<b>stage\x1b[31m  layers</b>"


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    log = EventLog(tmp_path / "telemetry", DEVICES)
    log.write_plan(0, PipelineRecord(f"{EVIL}\n0      a .. c", PLAN.stages, PASSES))
    block = np.zeros((STEPS, 5, 2), np.float32)
    block[:] = np.array([[0.3, 0.2], [0.1, 0.1], [0.2, 0.3], [0.0, 0.0], [32, 32]])
    log.write_steps(0, block)
    for step in (20, 59):
        log.write_passes(step, PASSES)
    log.close()
    (run,) = read_log(tmp_path)
    return facts_of(run.name, run.content)


def test_the_plan_is_shown_as_text(facts: Facts) -> None:
    stream = io.StringIO()
    show(facts, console_for(stream, 100))
    text = stream.getvalue()
    assert "Plan of the pipeline" in text
    assert "0      a .. c" in text
    assert "\x1b[31m" not in text
    assert "What a step would take" not in text  # that is about whole replicas
    assert facts.speed.samples_per_second == pytest.approx(32 / 0.6, rel=1e-3)


def test_the_trace_has_the_measured_passes(facts: Facts, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert write_trace(path, facts) is None
    content = json.loads(path.read_text())
    check_trace(content)
    passes = [each for each in content["traceEvents"] if each.get("cat") == "pass"]
    assert len(passes) == 8
    first = next(each for each in passes if each["args"]["step"] == 20)
    assert first["name"] == "forward"
    assert first["ts"] == pytest.approx((20 * 0.6 + 0.1) * 1e6)
    assert first["dur"] == pytest.approx(0.1e6)
    names = [
        each["args"]["name"] for each in content["traceEvents"] if each["name"] == "thread_name"
    ]
    assert names[-2:] == [f"{device.name}: passes" for device in DEVICES]
