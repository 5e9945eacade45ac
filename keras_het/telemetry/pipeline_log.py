"""The plan of a pipeline and, now and then, the passes of a step: what goes into the log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from keras_het.planning.diagnosis.recording import PipelineRecord, StageRecord
from keras_het.planning.pipeline import PipelinePlan
from keras_het.telemetry.event_log import EventLog
from keras_het.telemetry.step_recorder import StepRecorder

if TYPE_CHECKING:
    from keras_het.strategy.pipeline import PipelineStrategy

_INTERVAL_SECONDS = 10.0


class PipelineLog:
    """Writes what is new of a pipeline."""

    def __init__(
        self, strategy: PipelineStrategy, recorder: StepRecorder, log: EventLog | None
    ) -> None:
        self._strategy, self._recorder, self._log = strategy, recorder, log
        self._plan: PipelinePlan | None = None
        self._step = -1
        self._written_at = -_INTERVAL_SECONDS

    def write(self, is_last: bool = False) -> None:
        """Write the plan if it is new, and the passes of the latest step if it is time."""
        plan, recorder = self._strategy.plan, self._recorder
        if plan is None:
            return
        if plan is not self._plan:
            self._plan, recorder.pipeline = plan, _record(self._strategy, plan)
            if self._log is not None:
                self._log.write_plan(recorder.next_step, recorder.pipeline)
        latest = self._strategy._latest_passes()
        if latest is None or self._log is None:
            return
        step, now = latest[0] + recorder.offset, time.monotonic()
        is_due = is_last or now - self._written_at >= _INTERVAL_SECONDS
        if is_due and step > max(self._step, recorder.first_step - 1):
            self._step, self._written_at = step, now
            self._log.write_passes(step, latest[1])


def _record(strategy: PipelineStrategy, plan: PipelinePlan) -> PipelineRecord:
    names = strategy._layer_names
    stages = tuple(
        StageRecord(
            tuple(names[stage.first : stage.end]),
            stage.devices,
            tuple(stage.routes.count(replica) for replica in range(len(stage.devices))),
            tuple(plan.memory_bytes[device] for device in stage.devices),
            tuple(names[unit] for unit in stage.recomputed),
        )
        for stage in plan.stages
    )
    return PipelineRecord(str(plan), stages, strategy.timeline)
