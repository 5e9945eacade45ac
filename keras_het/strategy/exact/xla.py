"""Compilation by XLA of what a replica computes alone, around its clock and its collectives.

A step of several replicas holds operations that XLA has no kernels for: the clock, exchanges of
other replicas, summation on the machines' CPUs. So the step is not compiled as one function, as
Keras compiles that of one device, but TensorFlow puts the operations between those into clusters
and compiles each. It compiles a cluster when it runs first, and again for another size of a share
once that has come twice; where sizes keep changing, it runs the cluster without XLA.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api

SWITCH = "KERAS_HET_XLA"
# Operations that wait for others, tell the time, or whose result has a size that XLA only bounds.
_OUTSIDE = ("Collective", "Nccl", "Timestamp", "NumpyFunc", "PyFunc", "EagerPyFunc", "Where")


def compiles_by_default(
    resolve: Callable[[keras.Model], bool], model: keras.Model, devices: Sequence[str]
) -> bool:
    """Return what `jit_compile="auto"` means for a model that trains on these devices."""
    if all("CPU" in device for device in devices):
        return False
    strategy, model._distribute_strategy = model._distribute_strategy, None
    try:
        return resolve(model)
    finally:
        model._distribute_strategy = strategy


def is_wanted(model: keras.Model | None) -> bool:
    """Whether the steps of a model are to be compiled."""
    return model is not None and model.jit_compile and os.environ.get(SWITCH) != "0"


def num_unsettled_steps(model: keras.Model, devices: Sequence[str]) -> int:
    """Return how many steps with a new share say nothing about the speed of these devices."""
    # XLA compiles a new size when it comes again; convolutions on a GPU try algorithms at first.
    if is_wanted(model):
        return 2
    return int(any("GPU" in device for device in devices))


def compiled_as_a_whole(step: Callable[..., Any], model: keras.Model | None) -> Callable[..., Any]:
    """Return a step that exchanges nothing and is not measured, as Keras compiles it."""
    if not is_wanted(model) or tf.executing_eagerly():
        return step
    return tf.function(step, jit_compile=True, reduce_retracing=True)


def compiled_update(update: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return the update of an optimizer as one function that XLA compiles."""
    # Clusters would be many: a variable that has been written is read outside of its cluster.

    def run(gradients: list[Any]) -> Any:
        returned = []

        @tf.function(jit_compile=True, autograph=False)
        def compiled_apply(present: list[tf.Tensor]) -> None:
            values = iter(present)
            filled = [None if each is None else next(values) for each in gradients]
            returned.append(update(filled))

        compiled_apply([each for each in gradients if each is not None])
        return returned[-1]

    return update if tf.executing_eagerly() else run


@contextlib.contextmanager
def compiled(model: keras.Model | None, device: str) -> Iterator[None]:
    """Let XLA compile what is added to the graph meanwhile, of the replica on `device`."""
    if not is_wanted(model) or tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    first, own = len(graph.get_operations()), _type_and_index(device)
    yield
    for operation in graph.get_operations()[first:]:
        is_own = _type_and_index(operation.device) == own
        if is_own and not operation.type.startswith(_OUTSIDE):
            private_api.compile_operation(operation)


def _type_and_index(device: str) -> tuple[str | None, int | None]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index
