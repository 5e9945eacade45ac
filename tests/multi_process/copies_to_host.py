"""The graphs of functions, and what decides in them; logical CPUs stand for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_het import private_api


def graphs_of(run: Callable[[], object]) -> list[Any]:
    """Return the graphs of the functions that are traced and run for the first time meanwhile."""
    private_api.start_collecting_graphs()
    try:
        with tf.device("CPU:1"):  # takes what nobody has placed, as a GPU does
            run()
    finally:
        graphs = private_api.stop_collecting_graphs()
    return graphs


def conditions(graphs: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each branch or check, and the operation that decides."""
    for graph in graphs:  # what tf.data runs is in a function of its own
        by_name = {node.name: node for node in graph.pre_optimization_graph.node}
        for node in by_name.values():
            if node.op in ("If", "StatelessIf", "Assert"):
                yield node.name, by_name[node.input[0].split(":")[0]]
