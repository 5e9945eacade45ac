"""Latest known report on a training's pipeline: the present, or the last one seen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from keras_het.loader.inspection.inspection import PipelineReport, better

_SECONDS_BETWEEN_LOOKS = 1.0  # a look takes a few tenths of a millisecond
_PAUSE = 500.0  # times the duration of a look, for pipelines with many iterators

_CUT_DEPTH = 3


class KeptReports:
    """Occasional looks at a running pipeline, for a report once it is gone.

    TensorFlow forgets its records when an iterator is handed over, or ends.
    """

    def __init__(self, read: Callable[[], PipelineReport | None]) -> None:
        self._read = read
        self._kept: tuple[PipelineReport, int] | None = None
        self._next_look = 0.0

    def after_step(self, step: int) -> None:
        """Look if it is time."""
        now = time.monotonic()
        # after the first few steps too: a training may be short
        if now >= self._next_look or not step & (step - 1):
            self.look(step)
            end = time.monotonic()
            self._next_look = end + max(_SECONDS_BETWEEN_LOOKS, _PAUSE * (end - now))

    def look(self, step: int) -> PipelineReport | None:
        """Look now; return the present state."""
        report = self._read()
        if report is not None and report.stages and report.batches:
            before = self._kept[0] if self._kept is not None else None
            if better(before, report) is report:
                self._kept = report, step
        return report

    def latest(self, step: int) -> PipelineReport | None:
        """Return the present state, else the last one seen; None if there is none."""
        report = self.look(step)
        has_stages = report is not None and report.stages
        return report if has_stages else self.last_seen or report

    @property
    def last_seen(self) -> PipelineReport | None:
        """The last state seen, None if there is none."""
        if self._kept is None:
            return None
        report, step = self._kept
        return dataclasses.replace(report, seen=f"This was seen at step {step} of the training.")


def with_own_rows_named(report: PipelineReport) -> PipelineReport:
    """Name the two stages of a worker's pipeline that takes its own rows, in a report.

    The stage that cuts batches waits until the shares of the step are settled, which the consumer
    does: that time is not its own.
    """
    stages = list(report.stages)
    for place, stage in enumerate(stages):
        if stage.depth == _CUT_DEPTH - 1:
            stages[place] = dataclasses.replace(stage, name="Maps of own rows")
        elif stage.depth == _CUT_DEPTH and stage.name == "Map":
            stages[place] = dataclasses.replace(
                stage, name="Cut into shares", seconds_per_batch=0.0
            )
    return dataclasses.replace(report, stages=tuple(stages))
