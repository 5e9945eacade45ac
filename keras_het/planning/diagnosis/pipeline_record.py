"""The plan of a model in stages, as a recording keeps it: who does what, and when, as predicted."""

from __future__ import annotations

import dataclasses

from keras_het.planning.pipeline import Timeline


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """A stage.

    Args:
        layers: names of its layer calls.
        devices: indices of its devices among those of the recording.
        micro_batches: how many micro-batches each of them takes.
        memory_bytes: what each of them is predicted to use.
        recomputed: names of the layer calls that are computed again in the backward pass.
    """

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batches: tuple[int, ...]
    memory_bytes: tuple[float, ...] = ()
    recomputed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PipelineRecord:
    """A plan.

    Args:
        text: the plan as a table, for people.
        stages: its stages.
        predicted: the passes of one step, of each device of the recording; None if unknown.
    """

    text: str
    stages: tuple[StageRecord, ...]
    predicted: Timeline | None = None
