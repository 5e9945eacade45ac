"""How far a training has come, as an actor that outlives its workers."""

from __future__ import annotations

from typing import Any

import ray


class Progress:
    """Number of backups that the workers have written."""

    def __init__(self) -> None:
        self._num_saved = 0

    def note_saved(self) -> None:
        self._num_saved += 1

    def num_saved(self) -> int:
        return self._num_saved


def start_progress() -> Any:
    """Start the actor on this node, where it takes no CPU."""
    node = ray.get_runtime_context().get_node_id()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Progress).options(num_cpus=0, scheduling_strategy=strategy).remote()
