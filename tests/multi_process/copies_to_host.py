"""What the graphs of functions copy from devices to their host, which waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def graphs_of(run: Callable[[], object]) -> list[Any]:
    """Return the graphs of the functions that are traced and run for the first time meanwhile."""
    eager = context.context()
    eager.enable_graph_collection()
    eager.enable_run_metadata()
    try:
        with tf.device("CPU:1"):  # takes what nobody has placed, as a GPU does
            run()
        return list(eager.export_run_metadata().function_graphs)
    finally:
        eager.disable_run_metadata()
        eager.disable_graph_collection()


def copies_to_host(graphs: list[Any]) -> list[str]:
    """Return the names of what other devices send to CPU:0."""
    return [
        f"{node.attr['send_device'].s.decode()[-5:]}: {node.name}"
        for graph in graphs
        for part in graph.partition_graphs
        for node in part.node
        if node.op in ("_Recv", "_HostRecv")
        and not node.attr["send_device"].s.endswith(b"CPU:0")
        and node.attr["recv_device"].s.endswith(b"CPU:0")
    ]


def conditions(graphs: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each branch or check, and the operation that decides."""
    for graph in graphs:  # what tf.data runs is in a function of its own
        by_name = {node.name: node for node in graph.pre_optimization_graph.node}
        for node in by_name.values():
            if node.op in ("If", "StatelessIf", "Assert"):
                yield node.name, by_name[node.input[0].split(":")[0]]
