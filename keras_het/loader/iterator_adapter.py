"""Private symbols of tf.data's data sets, iterators and seeds, each with a test.

Checked with TensorFlow 2.16.2 and 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import model_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import func_graph, random_seed
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

FuncGraph = func_graph.FuncGraph
UnchangedElementsDataset = dataset_ops.UnaryUnchangedStructureDataset


def data_set_variant(dataset: Any) -> Any:
    """The tensor that is a `tf.data.Dataset` in TensorFlow's runtime."""
    return dataset._variant_tensor


def free_graph_with(mapped: Any) -> None:
    """Frees the graphs of a mapped data set together with it, not at some later garbage collection.

    A graph and its operations know each other. Python's collector looks at what has lived for some
    time only when a quarter more objects than before do: that is a hundred pipelines later.

    Args:
        mapped: what `Dataset.map` returned for a function that nobody else uses.
    """
    graph = mapped._map_func.function.graph
    weakref.finalize(mapped, _dismantle, graph).atexit = False


def _dismantle(graph: Any) -> None:
    functions = graph._functions.values()
    inner: list[Any] = [getattr(function, "graph", None) for function in functions]
    inner = [each for each in inner if isinstance(each, CondBranchFuncGraph)]
    # the functions of others have graphs of their own
    inner = [each for each in inner if each.outer_graph is graph]
    func_graph.dismantle_func_graph(graph)
    for name in ("inputs", "outputs", "structured_outputs", "_function_captures"):
        setattr(graph, name, None)  # they know it, too
    for each in inner:
        _dismantle(each)


def iterated_data_set(iterator: Any) -> Any:
    """The data set that a `tf.data.Iterator` was made of, None if it is not known."""
    return getattr(iterator, "_dataset", None)


def save_iterator(iterator: Any) -> Any:
    """The state of a `tf.data.Iterator`, buffers included, in memory.

    Tensors are shared, not copied. Waits for the calls that are under way.

    Returns:
        A variant tensor for `restore_iterator`.
    """
    return tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource,
        external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE.value,
    )


def restore_iterator(iterator: Any, state: Any) -> None:
    """Makes a new `tf.data.Iterator` continue where another was saved.

    Args:
        iterator: of a data set with the same operations.
        state: what `save_iterator` returned.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def restart_iterator(iterator: Any, dataset: Any) -> None:
    """Lets a `tf.data.Iterator` begin another data set of the same element structure."""
    tf.raw_ops.MakeIterator(dataset=dataset._variant_tensor, iterator=iterator._iterator_resource)


def iterator_model(iterator: Any) -> Any:
    """The model by which AUTOTUNE tunes an iterator, a `ModelProto`.

    Returns:
        None if the iterator is not tuned, or TensorFlow is older than the operation (2.16).
    """
    read = getattr(tf.raw_ops, "IteratorGetModelProto", None)
    if read is None:
        return None
    try:
        text = read(iterator=iterator._iterator_resource).numpy()
    except tf.errors.OpError:  # not found; or no kernel, where the iterator is on a GPU
        return None
    return model_pb2.ModelProto.FromString(text)


def global_seed() -> int | None:
    """Returns what `tf.random.set_seed` was given in this process, None if it was not called."""
    seed: int | None = eager_context.global_seed()
    return seed


def keep_operation_seeds(is_active: Callable[[], bool]) -> None:
    """Gives operations with a seed of their own the seeds that they have without a global one.

    Args:
        is_active: asked each time that an operation is made; replaces an earlier one.
    """
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


def operation_seed_state() -> Any:
    """Where the sequence stands from which operations without a seed of their own take one.

    Returns:
        A state for `separate_operation_seeds`; None without a global seed, where none is taken.
    """
    return eager_context.context()._rng.getstate() if global_seed() is not None else None


@contextlib.contextmanager
def separate_operation_seeds(state: Any) -> Iterator[None]:
    """Has operations that this thread makes take their seeds from a sequence apart.

    The process has one sequence for all its threads. Saved before and restored after, it would
    lose what another thread draws meanwhile.

    Args:
        state: where the sequence begins, from `operation_seed_state`.
    """
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
