"""Stages of a running pipeline and their times, from the model by which AUTOTUNE tunes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tensorflow.core.framework.model_pb2 import ModelProto

CONSUMER = 0
"""Number of the consumer's own thread."""


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """One operation of a pipeline."""

    name: str
    depth: int
    parallelism: int
    most_parallelism: int
    is_tuned: bool
    buffer_size: int | None
    buffered: int
    buffered_bytes: int
    elements: int
    seconds_per_batch: float
    thread: int | None = CONSUMER
    at_once: int = 1
    is_recorded: bool = True

    @property
    def seconds_per_batch_in_parallel(self) -> float:
        """Time per batch with all its threads busy: the pipeline is no faster than that."""
        return self.seconds_per_batch / self.at_once


class _Thread(NamedTuple):
    number: int | None
    at_once: int


class _Part(NamedTuple):
    """One iterator of a stage, of which an `interleave` has several."""

    node: ModelProto.Node
    per_batch: float  # its elements per batch of the pipeline


class _Input(NamedTuple):
    name: str
    place: int  # among the inputs of its kind
    is_inner: bool  # an iterator that an interleave opened


def read_stages(model: ModelProto, pool_threads: int) -> tuple[PipelineStage, ...]:
    """Return the stages of a pipeline, starting at the consumer's end."""
    # Times are for one element, times the elements that a batch needs: iterators before a
    # `repeat`, and in an `interleave`, start again with each round, so their sums say nothing.
    told = [_threads_for_calls(node) for node in model.nodes.values() if _is_in_pool(node)]
    reader = _StageReader(model.nodes, max(told, default=pool_threads))
    reader.add([_Part(model.nodes[model.output], 1.0)], 0, _Thread(CONSUMER, 1))
    return tuple(stage for stage in reader.stages if stage.name != "Root")


class _StageReader:
    def __init__(self, nodes: Mapping[int, ModelProto.Node], pool_threads: int):
        self.stages: list[PipelineStage] = []
        self._nodes = nodes
        self._pool_threads = pool_threads
        self._threads = CONSUMER

    def add(self, parts: list[_Part], depth: int, thread: _Thread) -> None:
        """Add the stage of some iterators of one kind, and all that they read."""
        own, inner, outer = self._threads_of(parts, thread)
        inputs: dict[_Input, list[_Part]] = {}
        has_inputs = True
        for part in parts:
            has_inputs &= self._add_inputs(part, inputs)
        self.stages.append(_stage(parts, depth, own, has_inputs))
        for kind, found in inputs.items():
            self.add(found, depth + 1, inner if kind.is_inner else outer)

    def _threads_of(self, parts: list[_Part], thread: _Thread) -> tuple[_Thread, _Thread, _Thread]:
        """Threads of a stage, of the iterators that it opens, and of its other inputs."""
        node = parts[0].node
        kind = _kind(node)
        if node.name == "Map":
            # within a parallel interleave: its function takes a thread of the pool nevertheless
            at_once = min(thread.at_once, self._pool_threads)
            return thread._replace(at_once=at_once), thread, thread
        if not kind.startswith("ASYNC"):
            return thread, thread, thread
        reading = self._new_thread(len(parts))
        calls = sum(_calls(part.node) for part in parts)
        if kind == "ASYNC_INTERLEAVE_MANY":
            workers = self._new_thread(calls)
            return workers, workers, reading
        if _is_in_pool(node):
            in_pool = _Thread(None, min(calls, _threads_for_calls(node)))
            return in_pool, reading, reading
        return reading, reading, reading

    def _new_thread(self, at_once: int) -> _Thread:
        self._threads += 1
        return _Thread(self._threads, max(at_once, 1))

    def _add_inputs(self, part: _Part, inputs: dict[_Input, list[_Part]]) -> bool:
        """Add what an iterator reads; return False if that does not exist at the moment."""
        children = [self._nodes[number] for number in part.node.inputs]
        inner = _inner_inputs(part.node, children)
        outer = children[: len(children) - len(inner)]  # inner ones are the last
        if part.node.name.startswith("Concatenate"):
            outer = outer[-1:]  # the one being read; those that have ended stay in the model
        for place, child in enumerate(outer):
            found = inputs.setdefault(_Input(child.name, place, False), [])
            found.append(_Part(child, part.per_batch * _ratio(part.node, child)))
        given = sum(child.num_elements for child in inner)
        for child in inner:
            share = child.num_elements / given if given else 0.0
            found = inputs.setdefault(_Input(child.name, 0, True), [])
            found.append(_Part(child, part.per_batch * share))
        if _kind(part.node).endswith("INTERLEAVE_MANY"):
            return given > 0 or part.per_batch == 0.0
        # sources have a ratio of 0, except these
        is_source = (
            part.node.ratio == 0.0 or _is_cache(part.node) or "DataService" in part.node.name
        )
        return bool(children) or is_source


def _stage(parts: list[_Part], depth: int, thread: _Thread, has_inputs: bool) -> PipelineStage:
    node = parts[0].node
    parameters = _parameters(node)
    buffer = parameters.get("buffer_size")
    used = [part for part in parts if part.per_batch > 0.0]
    return PipelineStage(
        name=re.sub(r"V\d+$", "", node.name),
        depth=depth,
        parallelism=_calls(node) if "parallelism" in parameters else 1,
        most_parallelism=_threads_for_calls(node),
        is_tuned=any(entry.tunable for entry in node.parameters),
        buffer_size=int(buffer.state_value) if buffer else None,
        buffered=sum(part.node.buffered_elements for part in parts),
        buffered_bytes=sum(part.node.buffered_bytes for part in parts),
        elements=sum(part.node.num_elements for part in parts),
        seconds_per_batch=sum(_seconds_per_batch(part) for part in used),
        thread=thread.number,
        at_once=thread.at_once,
        is_recorded=has_inputs and all(_made(part.node) for part in used),
    )


def _seconds_per_batch(part: _Part) -> float:
    made = _made(part.node)
    return part.per_batch * part.node.processing_time / 1e9 / made if made else 0.0


def _made(node: ModelProto.Node) -> int:
    # elements in its buffer took its time too, except in a cache, which buffers them all for good
    waiting = 0 if _is_cache(node) else node.buffered_elements
    return int(node.num_elements + waiting)


def _is_cache(node: ModelProto.Node) -> bool:
    return "Cache" in node.name


def _ratio(node: ModelProto.Node, child: ModelProto.Node) -> float:
    """Number of elements of an input per element."""
    if node.ratio > 0.0:
        return float(node.ratio)
    made = _made(node)
    return child.num_elements / made if made else 0.0


def _inner_inputs(node: ModelProto.Node, children: list[ModelProto.Node]) -> list[ModelProto.Node]:
    """The iterators that an `interleave`, `flat_map` or the like opened itself."""
    if not _kind(node).endswith("INTERLEAVE_MANY"):
        return []
    # the iterators they are opened for are made together with the operation, and go when it ends
    has_outer = bool(children) and children[0].id == node.id + 1
    return children[1:] if has_outer else children


def _parameters(node: ModelProto.Node) -> dict[str, ModelProto.Node.Parameter]:
    return {entry.name: entry for entry in node.parameters}


def _calls(node: ModelProto.Node) -> int:
    parameters = _parameters(node)
    calls = parameters.get("parallelism")
    if calls is None:
        # an interleave of the first kind has a thread for each of its iterators
        cycle = parameters.get("cycle_length")
        return max(int(cycle.value), 1) if cycle else 1
    return max(int(calls.state_value), 1)


def _threads_for_calls(node: ModelProto.Node) -> int:
    calls = _parameters(node).get("parallelism")
    return max(int(calls.max), 1) if calls else 1


def _is_in_pool(node: ModelProto.Node) -> bool:
    """Tell whether its calls run in the pipeline's pool; an interleave has private threads."""
    return "parallelism" in _parameters(node) and not _kind(node).endswith("INTERLEAVE_MANY")


def _kind(node: ModelProto.Node) -> str:
    kinds = node.DESCRIPTOR.fields_by_name["node_class"].enum_type
    return str(kinds.values_by_number[node.node_class].name)
