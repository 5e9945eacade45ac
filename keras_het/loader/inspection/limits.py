"""Limits of a running pipeline: stages that share a thread, or the threads of a pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from keras_het.loader.inspection.stages import CONSUMER, PipelineStage

_NAMED = 0.1  # least part of a limit's time for which a stage is named
_NOTICEABLE = 0.05  # part of the consumer's time; less in its own thread is not a wait


@dataclasses.dataclass(frozen=True)
class Limit:
    """Stages that cannot run at the same time: a pipeline is no faster than they are together."""

    stages: tuple[PipelineStage, ...]
    at_once: int

    @property
    def seconds_per_batch(self) -> float:
        """Least time per batch."""
        return sum(stage.seconds_per_batch for stage in self.stages) / self.at_once

    @property
    def largest(self) -> PipelineStage:
        """The stage that takes the most time."""
        return max(self.stages, key=lambda stage: stage.seconds_per_batch)

    @property
    def is_of_consumer(self) -> bool:
        """Whether the consumer's own thread does this work while it waits."""
        return self.stages[0].thread == CONSUMER

    @property
    def named(self) -> tuple[PipelineStage, ...]:
        """The stages that take a noticeable part of the time."""
        least = _NAMED * sum(stage.seconds_per_batch for stage in self.stages)
        return tuple(stage for stage in self.stages if stage.seconds_per_batch >= least)

    @property
    def description(self) -> str:
        """Its stages, its time and its threads."""
        named = self.named
        text = _enumerated([stage.name for stage in named])
        is_in_pool = self.stages[0].thread is None
        if len(named) > 1:
            threads = "thread" if self.at_once == 1 else f"{self.at_once} threads"
            text += f" in the same {threads}" if is_in_pool else " one after the other"
        text += f", {self.seconds_per_batch * 1e3:.2f} ms a batch"
        if len(named) == 1 and is_in_pool and named[0].parallelism > self.at_once:
            return f"{text} ({named[0].parallelism} calls, {self.at_once} at once)"
        if self.at_once > 1 and not (len(named) > 1 and is_in_pool):
            text += f" ({self.at_once}{' calls' if is_in_pool else ''} at once)"
        return text


def limits_of(stages: Iterable[PipelineStage]) -> tuple[Limit, ...]:
    """Return all limits of a pipeline."""
    threads: dict[int, list[PipelineStage]] = {}
    pool: list[PipelineStage] = []
    for stage in stages:
        if stage.thread is None:
            pool.append(stage)
        else:
            threads.setdefault(stage.thread, []).append(stage)
    limits = [
        Limit(tuple(found), max(stage.at_once for stage in found)) for found in threads.values()
    ]
    # maps that several threads of an interleave call need the pool too
    calls = pool + [
        stage
        for found in threads.values()
        for stage in found
        if stage.at_once > 1 and stage.name == "Map"
    ]
    limits += [Limit((stage,), stage.at_once) for stage in calls]
    if pool:
        # each alone may have all threads, but not both
        shared = Limit(tuple(pool), max(stage.most_parallelism for stage in pool))
        limits += [Limit(shared.named, shared.at_once)] if len(shared.named) > 1 else []
    return tuple(limit for limit in limits if limit.seconds_per_batch > 0.0)


def slowest_of(limits: Iterable[Limit]) -> Limit | None:
    """Return the limit that takes longest; None if there is none."""
    return max(limits, key=lambda limit: limit.seconds_per_batch, default=None)


def awaited_of(limits: Iterable[Limit], consumer_seconds: float) -> Limit | None:
    """Return the limit that the consumer waits for; None if the pipeline keeps up."""
    limits = tuple(limits)
    own = slowest_of(limit for limit in limits if limit.is_of_consumer)
    other = slowest_of(limit for limit in limits if not limit.is_of_consumer)
    own_seconds = own.seconds_per_batch if own is not None else 0.0
    if other is not None and other.seconds_per_batch > consumer_seconds + own_seconds:
        return other
    return own if own_seconds > _NOTICEABLE * consumer_seconds else None


def _enumerated(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
