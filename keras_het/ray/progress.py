"""How far a training has come, as an actor that outlives its workers."""

from __future__ import annotations

from typing import Any

import ray

Place = tuple[int, ...]
"""An epoch, and the number of its steps that are trained."""


class Progress:
    """The furthest place from which each `fit` of a script can continue."""

    def __init__(self) -> None:
        self._furthest: dict[str, Place] = {}

    def note_saved(self, folder: str, *place: int) -> None:
        self._furthest[folder] = max(self._furthest.get(folder, (0, 0)), place)

    def furthest(self) -> dict[str, Place]:
        return dict(self._furthest)


def start_progress() -> Any:
    """Start the actor on this node, where it takes no CPU."""
    node = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Progress).options(num_cpus=0, scheduling_strategy=strategy).remote()
