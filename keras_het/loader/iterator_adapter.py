"""Private symbols of tf.data's datasets, iterators and seeds, each covered by a test.

Checked with TensorFlow 2.16.2 and 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.core.framework import model_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import func_graph, random_seed
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

FuncGraph = func_graph.FuncGraph
UnchangedElementsDataset = dataset_ops.UnaryUnchangedStructureDataset

SeedState: TypeAlias = tuple[int, tuple[int, ...], float | None]
"""State of a `random.Random`."""


def data_set_variant(dataset: tf.data.Dataset) -> tf.Tensor:
    return dataset._variant_tensor


def is_adjustable(node: tf.data.Dataset) -> bool:
    """Tell whether this is a `loader.tunable_pipeline`, and not what Keras puts behind it."""
    is_ours = type(node).__module__.startswith("keras_het.")
    return is_ours and isinstance(node, UnchangedElementsDataset)


def free_graph_with(mapped: tf.data.Dataset) -> None:
    """Free the graphs of a mapped dataset together with it, not at some later collection."""
    # A graph and its operations refer to each other. Python's collector examines long-lived objects
    # only when their number has grown by a quarter: that is a hundred pipelines later.
    graph = mapped._map_func.function.graph
    weakref.finalize(mapped, _dismantle, graph).atexit = False


def _dismantle(graph: func_graph.FuncGraph) -> None:
    functions = graph._functions.values()
    inner: list[Any] = [getattr(function, "graph", None) for function in functions]
    inner = [each for each in inner if isinstance(each, CondBranchFuncGraph)]
    # the functions of others have their own graphs
    inner = [each for each in inner if each.outer_graph is graph]
    func_graph.dismantle_func_graph(graph)
    for name in ("inputs", "outputs", "structured_outputs", "_function_captures"):
        setattr(graph, name, None)  # they refer to it, too
    for each in inner:
        _dismantle(each)


def iterated_data_set(iterator: tf.data.Iterator) -> tf.data.Dataset | None:
    return getattr(iterator, "_dataset", None)


def save_iterator(iterator: tf.data.Iterator) -> tf.Tensor:
    """Save a `tf.data.Iterator` with its buffers, sharing tensors, once pending calls are done."""
    return tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource,
        external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE.value,
    )


def restore_iterator(iterator: tf.data.Iterator, state: tf.Tensor) -> None:
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def restart_iterator(iterator: tf.data.Iterator, dataset: tf.data.Dataset) -> None:
    """Switch a `tf.data.Iterator` to another dataset of the same element structure."""
    tf.raw_ops.MakeIterator(dataset=dataset._variant_tensor, iterator=iterator._iterator_resource)


def iterator_model(iterator: tf.data.Iterator) -> model_pb2.ModelProto | None:
    """Return the model by which AUTOTUNE tunes an iterator, a `ModelProto`."""
    read = getattr(tf.raw_ops, "IteratorGetModelProto", None)
    if read is None:
        return None
    try:
        text = read(iterator=iterator._iterator_resource).numpy()
    except tf.errors.OpError:  # not found; or no kernel, if the iterator is on a GPU
        return None
    return model_pb2.ModelProto.FromString(text)


def global_seed() -> int | None:
    """Return the argument of `tf.random.set_seed` in this process, None if it was not called."""
    return eager_context.global_seed()


def keep_operation_seeds(is_active: Callable[[], bool]) -> None:
    """Give operations with an explicit seed the seeds that they have without a global one."""
    global _keeps_operation_seeds
    _keeps_operation_seeds = is_active
    original = random_seed.get_seed
    if hasattr(original, "may_keep_operation_seeds"):
        return

    @functools.wraps(original)
    def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
        first, second = original(op_seed)
        if op_seed is not None and _keeps_operation_seeds():
            return random_seed.DEFAULT_GRAPH_SEED, second
        return first, second

    get_seed.may_keep_operation_seeds = True  # type: ignore[attr-defined]
    random_seed.get_seed = get_seed


def _keeps_operation_seeds() -> bool:
    return False


def operation_seed_state() -> SeedState | None:
    """Return the state of the sequence from which operations without an explicit seed take one."""
    return eager_context.context()._rng.getstate() if global_seed() is not None else None


@contextlib.contextmanager
def separate_operation_seeds(state: SeedState | None) -> Iterator[None]:
    """Make operations created by this thread take their seeds from a separate sequence."""
    # the process has one sequence: restoring it afterwards would lose what other threads draw
    generator = random.Random(0)
    if state is not None:
        generator.setstate(state)
    context = eager_context.context()
    if "_internal_operation_seed" not in vars(context):
        original = context._internal_operation_seed
        context._internal_operation_seed = functools.partial(_operation_seed, original)
    before, _of_thread.generator = getattr(_of_thread, "generator", None), generator
    try:
        yield
    finally:
        _of_thread.generator = before


def _operation_seed(original: Callable[[], int]) -> int:
    generator = getattr(_of_thread, "generator", None)
    return original() if generator is None else generator.randint(0, tf.int32.max)


_of_thread = threading.local()
