"""Short tasks on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import ray

_LONGEST_SECONDS = 120.0


def on_every_node(function: Callable[..., Any], *arguments: Any, but: Container[str] = ()) -> None:
    """Call a function on each node that lives, but for some; what fails there is not raised."""
    kind = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    running = [
        ray.remote(function)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=kind(node, soft=False))
        .remote(*arguments)
        for node in (each["NodeID"] for each in ray.nodes() if each["Alive"])
        if node not in but
    ]
    ray.wait(running, num_returns=len(running), timeout=_LONGEST_SECONDS) if running else None
