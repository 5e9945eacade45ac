"""What a step copies from devices to their host, which waits for that.

What XLA compiles copies nothing; what it takes and leaves is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# What kernels of TensorFlow 2.21's CUDA build want in host memory, after the attribute that has its
# type; conditions need none.
_HOST_INPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "BroadcastTo": ("Tidx", (1,)),
    "Fill": ("index_type", (0,)),
    "If": ("Tcond", (0,)),
    "LoopCond": ("", (0,)),
    "Range": ("Tidx", (0, 1, 2)),
    "Reshape": ("Tshape", (1,)),
    "Slice": ("Index", (1, 2)),
    "SplitV": ("Tlen", (1,)),
    "StatelessIf": ("Tcond", (0,)),
    "StridedSlice": ("Index", (1, 2, 3)),
    "StridedSliceGrad": ("Index", (0, 1, 2, 3)),
    "Switch": ("", (1,)),
    "Tile": ("Tmultiples", (1,)),
    "UnsortedSegmentSum": ("Tnumsegments", (2,)),
}
# What these make is there, as are integers of 32 bits and what is computed of them.
_ON_HOST: tuple[str, ...] = ("Const", "LoopCond", "PyFunc", "Range", "Shape", "ShapeN", "Size")
_ON_HOST += ("_HostRecv", "_Recv", "_XlaCompile")
_KEPT = ("ReadVariableOp", "_Arg")  # so are integers and conditions among these
_INT32, _INT64, _BOOL = (kind.as_datatype_enum for kind in (tf.int32, tf.int64, tf.bool))
_HOST = "CPU:0"
# First arguments of the functions of a step: of Keras's two, and of our own of several steps.
_STEP_ARGUMENTS = ("data", "iterator", "steps")


def steps_of(graphs: Iterable[Any]) -> list[Any]:
    """Return those of the `FunctionGraphs` that are a step."""
    return [graph for graph in graphs if _is_step(graph.pre_optimization_graph.node)]


def _is_step(nodes: Any) -> bool:
    # a single operation that runs eagerly has a graph, too
    is_function = sum(not node.op.startswith("_") for node in nodes) > 1
    return is_function and nodes[0].name in _STEP_ARGUMENTS


def copies_to_host(graphs: Iterable[Any]) -> list[str]:
    """Return the names of what devices other than CPU:0 copy to the host."""
    parts = [part for graph in graphs for part in graph.partition_graphs]
    return [name for part in parts for name in sorted(_copied_of(part))]


def _copied_of(part: Any) -> set[str]:
    """What some operations of a device leave in its memory, and others want in the host's."""
    producers = {node.name: node for node in part.node}
    found = set()
    for node in part.node:
        is_sent = node.op == "_Send" and node.attr["recv_device"].s.decode().endswith(_HOST)
        kind, places = ("", (0,)) if is_sent else _HOST_INPUTS.get(node.op, ("", ()))
        if node.device.endswith(_HOST) or (kind and node.attr[kind].type not in (_INT64, _BOOL)):
            continue
        for place in places:
            producer = producers[node.input[place].split(":")[0]]
            types = (producer.attr["T"].type, node.attr["T"].type if is_sent else None)
            is_kept = producer.op in _ON_HOST or (producer.op in _KEPT and not is_sent)
            if not is_kept and _INT32 not in types:
                found.add(f"{node.device[-5:]}: {producer.name}")
    return found
