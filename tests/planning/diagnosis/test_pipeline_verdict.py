"""The verdict on a model in stages names its idle devices, and no remedy for whole replicas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from step_recordings import scores_of

from keras_het.planning.diagnosis.recording import Device, PipelineRecord, Recording, StageRecord
from keras_het.planning.diagnosis.verdict import diagnose
from keras_het.planning.pipeline import Event, Timeline

STEPS, COMPUTE = 60, (0.010, 0.030, 0.0)
DEVICES = tuple(Device(f"worker {n} GPU 0", n, "GPU") for n in range(3))
STAGES = (StageRecord(("a",), (0,), (8,)), StageRecord(("b", "c"), (1,), (8,)))
PREDICTED = Timeline(
    ((Event("forward", 0, 0, 0.0, 0.010),), (Event("forward", 0, 1, 0.010, 0.030),), ()), 0.040
)


def recording_of(predicted: Timeline | None = PREDICTED, input_seconds: float = 0.0) -> Recording:
    """Two of three devices work, and the second takes longer than predicted."""
    compute = np.tile(np.array(COMPUTE), (STEPS, 1))
    return Recording(
        DEVICES,
        np.arange(STEPS),
        compute=compute,
        input=np.full_like(compute, input_seconds),
        sync=0.050 - compute,
        other=np.full_like(compute, 0.002),
        shares=np.tile([64.0, 64.0, 0.0], (STEPS, 1)),
        pipeline=PipelineRecord("plan", STAGES, predicted),
    )


def test_idle_parts_are_named_as_predicted_and_as_measured() -> None:
    verdict = diagnose(recording_of())
    first, second = verdict.lines
    assert "worker 0 GPU 0 75 % predicted, 80 % measured" in first
    assert "worker 1 GPU 0 50 % predicted, 40 % measured" in first
    assert "worker 2" not in first  # has no stage
    assert "strategy.plan" in first and "num_micro_batches" in first
    assert "worker 1 GPU 0 computes 30 ms of each step, 20 ms were predicted" in second
    assert verdict.causes == () == verdict.missing


def test_a_starving_pipeline_is_named_first() -> None:
    verdict = diagnose(recording_of(input_seconds=0.020))
    (cause,) = verdict.causes
    assert cause.kind == "input" and cause.share_of_step == pytest.approx(0.28, abs=0.01)
    assert verdict.lines[0].startswith("worker 0 waits for its batch in 28 % of each step.")


def test_a_plan_without_prediction() -> None:
    (line,) = diagnose(recording_of(predicted=None)).lines
    assert "worker 0 GPU 0 80 %; worker 1 GPU 0 40 %" in line


@pytest.mark.parametrize("input_seconds", [0.0, 0.020])
@pytest.mark.parametrize("predicted", [PREDICTED, None])
def test_no_remedy_of_data_parallel_training(
    predicted: Timeline | None, input_seconds: float
) -> None:
    recording = recording_of(predicted, input_seconds)
    text = " ".join(diagnose(recording).lines)
    for remedy in ("BatchBalancer", "summation", "LocalTraining", "AsyncWorkers", "share"):
        assert remedy not in text
    # the same times of whole replicas get one
    replicas = dataclasses.replace(recording, pipeline=None)
    assert "BatchBalancer" in " ".join(diagnose(replicas).lines)
    assert np.isnan(scores_of(recording)[0]).all()
    assert np.isfinite(scores_of(replicas)[0]).any()


def test_too_few_steps() -> None:
    verdict = diagnose(recording_of().between(0, 5))
    assert verdict.lines == ()
    assert "not enough steps" in verdict.missing[0]
