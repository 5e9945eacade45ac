"""The module for private symbols of Keras's graphs of layers.

``tests/test_private_graphs.py`` names every symbol; see `private_api`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
from keras.src.models.functional import Functional
from keras.src.ops.node import Node
from tensorflow.python.client import device_lib
from tensorflow.python.ops import collective_ops

from keras_het.ignored_errors import ignore_errors
from keras_het.private_api import (
    BaseTrainer,
    TensorFlowTrainer,
    keras_seed_generator,
    layers_with_state,
)
from keras_het.value_types import Nest

Graph: TypeAlias = Functional
__all__ = ["Graph", "Node", "collective_ops"]


def graph_of(operation: object) -> Graph | None:
    """Return the graph of layers that a model or nested model runs; None if it is Python code."""
    if isinstance(operation, keras.Sequential):
        is_stock = type(operation).call is keras.Sequential.call
        return operation._functional if is_stock else None
    is_stock = isinstance(operation, Functional) and type(operation).call is Functional.call
    return operation if is_stock else None


def nodes_of(graph: Graph) -> list[Node]:
    """Return the calls of layers in a graph, each after those whose results it takes."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in graph._nodes_by_depth[depth]]


def call_node(
    node: Node, operation: Any, values: dict[int, Any], training: bool | None
) -> list[Any]:
    arguments, options = node.arguments.fill_in(values)
    if training is not None and "training" in getattr(operation, "_call_context_args", ()):
        options["training"] = training
    return list(keras.tree.flatten(operation(*arguments, **options)))


def flat_inputs(graph: Graph, inputs: Nest) -> list[Any]:
    """Return the model's inputs as its graph takes them: flat, cast, of the expected rank."""
    policy = graph.dtype_policy
    cast = [
        policy.convert_input(value, graph.autocast, graph.input_dtype)
        for value in keras.tree.flatten(inputs)
    ]
    inputs = keras.tree.pack_sequence_as(inputs, cast)
    return list(graph._standardize_inputs(inputs))


def outputs_for(graph: Graph, rows: int) -> Nest:
    """Return symbolic outputs for a batch of so many rows; None if the graph does not allow it."""
    given = [keras.KerasTensor((rows, *t.shape[1:]), t.dtype, t.sparse) for t in graph.inputs]
    with ignore_errors("tracing"):  # a fixed size of batch, or it needs more rows
        return graph.compute_output_spec(keras.tree.pack_sequence_as(graph._inputs_struct, given))
    return None


def packed_outputs(graph: Graph, outputs: list[Any]) -> Nest:
    return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)


def compiled_loss(model: keras.Model) -> Callable[..., Any] | None:
    loss: Callable[..., Any] | None = model._compile_loss
    return loss


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Return the metric under which `fit` reports the loss; `compile` makes a new one."""
    return model._loss_tracker


def seeds_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the state of the random generators of a layer and those in it."""
    return [
        generator.state
        for each in layers_with_state(layer)
        for generator in getattr(each, "_seed_generators", [])
        if isinstance(generator, keras_seed_generator.SeedGenerator)
    ]


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the compiled losses, one per output that has one; the loss must be built."""
    flat = getattr(model._compile_loss, "_flat_losses", None) or []
    return [entry.loss for entry in flat if entry.loss is not None]


def variables_of_optimizer(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[keras.Variable, list[keras.Variable]]]:
    """Return each variable that an optimizer updates, with what it keeps for it."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    references = list(optimizer._trainable_variables)
    kept: list[list[keras.Variable]] = [[] for _ in references]
    left = {id(variable): variable for variable in optimizer.variables}
    # most optimizers have lists with one variable for each; two weights may have the same path
    for found in vars(optimizer).values():
        is_parallel = isinstance(found, (list, tuple)) and len(found) == len(references)
        if is_parallel and all(each is None or id(each) in left for each in found):
            for own, each in zip(kept, found, strict=True):
                if each is not None and left.pop(id(each), None) is not None:
                    own.append(each)
    begins = [reference.path.replace("/", "_") + "_" for reference in references]
    for variable in left.values():
        name = variable.path.split("/")[-1]
        fitting = [i for i, begin in enumerate(begins) if name.startswith(begin)]
        if fitting:
            kept[max(fitting, key=lambda i: len(begins[i]))].append(variable)
    return list(zip(references, kept, strict=True))


def accumulated_gradients(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> keras.Variable | None:
    """Return the sum of the gradients of a variable since its last update; None without one."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not optimizer.gradient_accumulation_steps:
        return None
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


@contextlib.contextmanager
def clipping_by(
    optimizer: keras.optimizers.Optimizer, clip: Callable[[list[Any]], list[Any]]
) -> Iterator[None]:
    vars(optimizer)["_clip_gradients"] = clip
    try:
        yield
    finally:
        del vars(optimizer)["_clip_gradients"]


def count_step(optimizer: keras.optimizers.Optimizer, is_finite: Any) -> None:
    """Do what an optimizer does in a step without gradients: count it, adapt its scale."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer._iterations.assign_add(1)
        return

    def count() -> None:
        optimizer._stateful_handle_finite_grads([], [])
        optimizer.inner_optimizer._iterations.assign_add(1)

    keras.ops.cond(is_finite, count, optimizer._stateful_handle_non_finite_grads)


def know_variables_again(optimizer: keras.optimizers.Optimizer) -> None:
    """Make an optimizer recognise variables that `private_api.recreate_variable` has changed."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    keys = [optimizer._var_key(variable) for variable in optimizer._trainable_variables]
    optimizer._trainable_variables_indices = {key: i for i, key in enumerate(keys)}
    if decays := vars(optimizer).get("_weight_decay_by_var_key"):  # Keras 3.16, in this order
        optimizer._weight_decay_by_var_key = dict(zip(keys, decays.values(), strict=True))


def memory_limit(device: str) -> float:
    """Return how many bytes TensorFlow may use on a GPU; infinite for a CPU."""
    if "GPU" not in device.upper():
        return float("inf")
    for found in device_lib.list_local_devices():
        if found.name.upper().endswith(device.upper().rpartition("DEVICE:")[2]):
            return float(found.memory_limit)
    return float("inf")


def own_step_of(model: keras.Model) -> str | None:
    """Return the name of a method of a model that replaces a part of Keras's own step, or None."""
    for name in ("train_step", "test_step", "predict_step"):
        if getattr(type(model), name) is not getattr(TensorFlowTrainer, name):
            return name
    for name in ("compute_loss", "_compute_loss"):
        if getattr(type(model), name) is not getattr(BaseTrainer, name):
            return name
    return None
