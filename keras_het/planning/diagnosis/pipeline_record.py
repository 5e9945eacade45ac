"""The plan of a model in stages, as a recording keeps it: who does what, and when, as predicted."""

from __future__ import annotations

import dataclasses

from keras_het.planning.pipeline import Timeline


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """A stage."""

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batches: tuple[int, ...]
    memory_bytes: tuple[float, ...] = ()
    recomputed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PipelineRecord:
    """A plan."""

    text: str
    stages: tuple[StageRecord, ...]
    predicted: Timeline | None = None
