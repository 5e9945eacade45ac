"""What a training shows of its pipeline: the present, or what was last seen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from keras_het.loader.inspection.inspection import PipelineReport, better

_SECONDS_BETWEEN_LOOKS = 1.0  # a look takes a few tenths of a millisecond
_PAUSE = 500.0  # times a look's own time, for pipelines with many iterators

_CUT_DEPTH = 3


class KeptReports:
    """Looks at a running pipeline now and then, so that something is known when it is gone.

    TensorFlow forgets what it recorded when an iterator is handed over, or ends.

    Args:
        read: looks at the pipeline that runs; gives None if there is none that can be shown.
    """

    def __init__(self, read: Callable[[], PipelineReport | None]) -> None:
        self._read = read
        self._kept: tuple[PipelineReport, int] | None = None
        self._next_look = 0.0

    def after_step(self, step: int) -> None:
        """Looks if it is time to.

        Args:
            step: steps that were trained so far.
        """
        now = time.monotonic()
        # also after the first few steps: a training may be short
        if now >= self._next_look or not step & (step - 1):
            self.look(step)
            end = time.monotonic()
            self._next_look = end + max(_SECONDS_BETWEEN_LOOKS, _PAUSE * (end - now))

    def look(self, step: int) -> PipelineReport | None:
        """Looks now; returns what is known at this moment.

        Args:
            step: steps that were trained so far.
        """
        report = self._read()
        if report is not None and report.stages and report.batches:
            before = self._kept[0] if self._kept is not None else None
            if better(before, report) is report:
                self._kept = report, step
        return report

    def latest(self, step: int) -> PipelineReport | None:
        """What is known at this moment, else what was last seen; None if there is nothing.

        Args:
            step: steps that were trained so far.
        """
        report = self.look(step)
        has_stages = report is not None and report.stages
        return report if has_stages else self.last_seen or report

    @property
    def last_seen(self) -> PipelineReport | None:
        """What was last seen, None if nothing was."""
        if self._kept is None:
            return None
        report, step = self._kept
        return dataclasses.replace(report, seen=f"This was seen at step {step} of the training.")


def with_own_rows_named(report: PipelineReport) -> PipelineReport:
    """The report of a worker's pipeline that takes its own rows, with its two stages named.

    The one that cuts batches waits until the shares of the step are settled, which the consumer
    does: that is no time of its own.

    Args:
        report: of a pipeline that was built for own rows.
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
