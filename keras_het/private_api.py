"""Private symbols of TensorFlow and Keras; tf.data and Keras's graphs have adapters of their own.

Checked on TensorFlow 2.16.2 and 2.21.0 with Keras 3.15.1; ``tests/test_private_api.py`` names every
symbol, so a release that moves one fails there first and says which.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state as keras_global_state
from keras.src.backend.tensorflow import optimizer as keras_tf_optimizer
from keras.src.backend.tensorflow import trainer as keras_tf_trainer
from keras.src.layers.normalization import batch_normalization as keras_batch_normalization
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.losses import loss as keras_loss
from keras.src.losses import losses as keras_losses
from keras.src.metrics import reduction_metrics as keras_reduction_metrics
from keras.src.optimizers import base_optimizer as keras_base_optimizer
from keras.src.optimizers import loss_scale_optimizer as keras_loss_scale_optimizer
from keras.src.random import seed_generator as keras_seed_generator
from keras.src.trainers import trainer as keras_base_trainer
from keras.src.utils import python_utils as keras_python_utils
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.autograph.pyct import loader as autograph_loader
from tensorflow.python.client.pywrap_tf_session import TF_DeviceListMemoryBytes as memory_bytes
from tensorflow.python.distribute import (
    collective_util,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
)
from tensorflow.python.distribute import values as distribute_values
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.framework.type_spec import type_spec_from_value
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.types import distribute as distribute_types

try:  # Keras 3.16
    from keras.src.backend.tensorflow.ops import nn as keras_nn
    from keras.src.backend.tensorflow.ops.core import Variable as KerasTensorFlowVariable
except ImportError:
    from keras.src.backend.tensorflow import nn as keras_nn
    from keras.src.backend.tensorflow.core import Variable as KerasTensorFlowVariable

EpochIterator: TypeAlias = keras_tf_trainer.EpochIterator
# AutoGraph turns a loop over this type into one of the graph; Keras asks for its subclass
# tf.distribute.DistributedIterator, and steps through anything else in Python.
IteratorInterface = distribute_types.Iterator
Mirrored = distribute_values.Mirrored
PerReplica = distribute_values.PerReplica
GLOBAL_SEED_GENERATOR = "global_seed_generator"
StrategyExtended = distribute_lib.StrategyExtendedV2
CollectiveKeys: TypeAlias = cross_device_utils.CollectiveKeys
CollectiveReplicaLauncher = cross_device_utils.CollectiveReplicaLauncher
CommunicationOptions: TypeAlias = collective_util.Options
# Keras 3.16 renames both.
TensorFlowTrainer = getattr(keras_tf_trainer, "TensorFlowTrainer", None) or keras_tf_trainer.Trainer
BaseTrainer = getattr(keras_base_trainer, "BaseTrainer", None) or keras_base_trainer.Trainer
regroup = distribute_utils.regroup

# Names imported here for others; those defined below need no entry.
__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CompositeTensor",
    "DropoutRNNCell",
    "KerasTensorFlowVariable",
    "ResourceVariable",
    "distribute_lib",
    "distribute_values",
    "keras_base_optimizer",
    "keras_batch_normalization",
    "keras_loss",
    "keras_loss_scale_optimizer",
    "keras_losses",
    "keras_nn",
    "keras_python_utils",
    "keras_reduction_metrics",
    "keras_seed_generator",
    "keras_tf_optimizer",
    "type_spec_from_value",
]


def replace_everywhere(
    function: Callable[..., Any], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace what a public function of TensorFlow calls, under every name it was imported by."""
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    called = dict(variables)["fn"]  # of the decorator that shortens tracebacks
    called.cell_contents = replacement(called.cell_contents)


def start_collecting_graphs() -> None:
    """Keep the graphs of functions that run for the first time, as placed on devices."""
    eager_context.context().enable_graph_collection()
    eager_context.context().enable_run_metadata()


def stop_collecting_graphs() -> list[Any]:
    """Return the graphs of functions that ran for the first time meanwhile (`FunctionGraphs`)."""
    context = eager_context.context()
    graphs = list(context.export_run_metadata().function_graphs)
    context.disable_run_metadata()
    context.disable_graph_collection()
    return graphs


def recreate_variable(variable: keras.Variable) -> None:
    """Give an initialised Keras variable a TensorFlow variable of the current scope, same value."""
    value = tf.convert_to_tensor(variable.value)
    variable._initialize(value)


def move_optimizer(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Make an optimizer update variables of a strategy; by default it keeps its original one."""
    optimizer._distribution_strategy = strategy


def keras_step_kind(function: object) -> str | None:
    """Tell which step of Keras `function` is, in the form `Strategy.run` receives it."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, keras.Model):
        name = getattr(function, "__name__", "")
        for step in ("train_step", "test_step"):
            # a decorator need not copy the name
            if name == step or function == getattr(owner, step):
                return step.removesuffix("_step")
    wrapped = getattr(function, "__wrapped__", function)
    qualified_name = getattr(wrapped, "__qualname__", "")
    if (
        getattr(wrapped, "__module__", None) == keras_tf_trainer.__name__
        and "make_predict_function" in qualified_name
    ):
        return "predict"
    return None


def undecorated_step(function: Any) -> Any:
    """Return the bound method of a method decorated with `tf.function`."""
    # A step must be traced together with its replica's: values that leave a separate function are
    # no longer recognised as the result of a metric, or as a gradient that waits for its reduction.
    if not hasattr(function, "python_function"):
        return function
    method: Any = getattr(function, "__original_wrapped__", None)
    # a method of a class is bound to a separate stand-in for the instance
    owner = getattr(method, "__self__", None)
    # a model may have an attribute `target` itself, such as a second network
    model = owner if isinstance(owner, keras.Model) else getattr(owner, "target", None)
    if not isinstance(model, keras.Model):
        return function
    step = method.__func__
    if function._autograph:
        # enabled, because Keras disables it around its steps
        enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        step = autograph.convert(recursive=True, conversion_ctx=enabled)(step)
    return types.MethodType(_named_as_step(step, model, function), model)


def _named_as_step(step: Callable[..., Any], model: keras.Model, function: object) -> Any:
    """Return `step` under its known name, which a decorator below may not have copied."""
    for name in ("train_step", "test_step"):
        if getattr(model, name) is function and getattr(step, "__name__", "") != name:

            def named(*arguments: object, **options: object) -> Any:
                return step(*arguments, **options)

            named.__name__ = name
            return named
    return step


def model_of_step(function: object) -> keras.Model | None:
    owner = getattr(function, "__self__", None)
    cells = getattr(getattr(function, "__wrapped__", function), "__closure__", None) or ()
    for candidate in (owner, *(cell.cell_contents for cell in cells)):
        if isinstance(candidate, keras.Model):
            return candidate
    return None


def model_of_prediction(function: object) -> keras.Model | None:
    """Return the model whose predict step `function` is, under all its decorators, or None."""
    model = model_of_step(function)  # no `:=`, which AutoGraph warns of in a function of the user's
    while model is None and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
        model = model_of_step(function)
    return model


def runs_keras_train_step(function: object) -> bool:
    return getattr(function, "__func__", None) is TensorFlowTrainer.train_step


def is_stock_train_step(function: object) -> bool:
    """Tell whether a bound `train_step` and its computation of metrics are Keras's own."""
    trainer = TensorFlowTrainer
    model = getattr(function, "__self__", None)
    return (
        runs_keras_train_step(function)
        and getattr(type(model), "compute_metrics", None) is trainer.compute_metrics
        and getattr(type(model), "get_metrics_result", None) is trainer.get_metrics_result
    )


def is_of_keras(metric: object) -> bool:
    """Tell whether the class of a metric, and its wrapped function or loss, are Keras's."""
    module = getattr(metric, "__module__", None) or ""
    wrapped = [getattr(metric, name, None) for name in ("_fn", "fn")]
    return module.split(".")[0] == "keras" and all(
        is_of_keras(function) for function in wrapped if function is not None
    )


def local_nccl(
    workers: CollectiveAllReduce, devices: Sequence[str], group_key: int
) -> CollectiveAllReduce:
    """Return NCCL's all-reduce among the devices of this process."""
    # The first of them also reduces with other `workers`. Its collectives of both kinds have one
    # order: with NCCL they could wait for each other else.
    local = CollectiveAllReduce(
        devices=tuple(devices),
        group_size=len(devices),
        options=CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
        ),
        collective_keys=CollectiveKeys(group_key_start=group_key),
    )
    local._launchers[0]._ordering_token = workers._launchers[0]._ordering_token
    return local


def sums_of_replicas(
    collectives: CollectiveAllReduce, values: Sequence[tf.distribute.DistributedValues]
) -> list[tf.distribute.DistributedValues]:
    """Sum values of one type over the devices of `collectives`, in one collective; in a graph."""
    return collectives._all_reduce_per_replica_values(
        tf.distribute.ReduceOp.SUM, values, collectives._options
    )


class EpochLoop:
    """The loop of a running `fit`, found in the frames of the call; Keras does not expose it."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        fit = _locals_of_fit(model)
        self._iterator: Any = fit.get("epoch_iterator")
        self.callbacks: list[Any] = getattr(fit.get("callbacks"), "callbacks", [])
        self.steps_per_epoch: int | None = getattr(self._iterator, "steps_per_epoch", None)
        self.data: Any = None if self._iterator is None else self._iterator._get_iterator()
        self.validates_on_generator = isinstance(fit.get("val_x"), types.GeneratorType)
        self._is_resumed = False
        self._knows_steps = getattr(self._iterator, "_num_batches", None) is not None

    @property
    def validation_data(self) -> Any:
        return distributed_data_of(getattr(self._model, "_eval_epoch_iterator", None))

    @property
    def is_at_end_of_pass(self) -> bool:
        """Whether the steps so far have used up a pass over data of known size."""
        batches = getattr(self._iterator, "_num_batches", None)
        return batches is not None and self._iterator._steps_seen >= batches

    def resume_epoch(self, steps: int, steps_of_pass: int) -> None:
        """Make the epoch that is about to begin the rest of one."""
        if self._iterator is None:
            return
        self._is_resumed = True
        if self.steps_per_epoch is not None:
            self._iterator.steps_per_epoch = self.steps_per_epoch - steps
            # Keras ends a pass by its number of steps, counted since its iterator was made
            self._iterator._current_iterator = iter(self.data)
            self._iterator._steps_seen = steps_of_pass
        if steps:
            enumerated = self._iterator._enumerate_iterator
            batches = None if self.steps_per_epoch else self._iterator._num_batches

            def enumerate_remaining() -> Iterator[tuple[Any, ...]]:
                for *numbers, iterator in enumerated():
                    if batches is not None and numbers[0] + steps >= batches:
                        # else callbacks see the begin of a step for which there is no data
                        self._iterator._current_iterator = None
                        self._iterator.data_adapter.on_epoch_end()
                        return
                    yield (*(number + steps for number in numbers), iterator)

            self._iterator._enumerate_iterator = enumerate_remaining

    def skip_steps(self) -> None:
        """Make the epoch that is about to begin one without steps."""
        if self._iterator is not None:
            self._iterator._enumerate_iterator = lambda: iter(())

    def go_on_with_logs(self, logs: Mapping[str, float]) -> None:
        """Let the epoch that is about to begin have these logs if it has no steps."""
        original = self._model._get_metrics_result_or_logs
        self._model._get_metrics_result_or_logs = lambda own: (
            original(own) if own or not logs else dict(logs)
        )

    def end_resumed_epoch(self) -> None:
        """Make later epochs complete ones."""
        vars(self._model).pop("_get_metrics_result_or_logs", None)
        if self._iterator is None:
            return
        vars(self._iterator).pop("_enumerate_iterator", None)
        if not self._is_resumed:
            return
        self._is_resumed = False
        self._iterator.steps_per_epoch = self.steps_per_epoch
        if self.steps_per_epoch is None and not self._knows_steps:
            self._iterator._num_batches = None  # which was the number of remaining steps


def write_events(callback: keras.callbacks.Callback) -> None:
    """Write to their files the events that a TensorBoard callback of Keras holds in memory."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        for writer in callback._writers.values():
            writer.flush()


def _locals_of_fit(model: keras.Model) -> dict[str, Any]:
    """The variables of a running `fit`, {} outside of one."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            found = frame.f_locals
            if isinstance(found.get("epoch_iterator"), keras_tf_trainer.EpochIterator):
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def distributed_data_of(iterator: EpochIterator | None) -> object:
    """Return the distributed dataset of `fit`'s or `evaluate`'s `EpochIterator`, or None."""
    return getattr(iterator, "_distributed_dataset", None)


def epoch_steps_of(iterator: Callable[[], EpochIterator | None]) -> int | None:
    """Return `steps_per_epoch` of a weakly referenced `EpochIterator`, None without one."""
    return getattr(iterator(), "steps_per_epoch", None)


def pass_steps_of(iterator: EpochIterator | None) -> int | None:
    """Return the steps after which Keras ends a pass over the data, None if it does not count."""
    return getattr(getattr(iterator, "data_adapter", None), "num_batches", None)


def has_begun(iterator: EpochIterator | None) -> bool:
    """Tell whether an `EpochIterator` continues a pass that an earlier epoch began."""
    return getattr(iterator, "_current_iterator", None) is not None


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return a Keras optimizer's representation of its rate: a variable, schedule or function."""
    return optimizer._learning_rate


def peer_is_healthy(task: str, timeout_seconds: float) -> bool:
    """Ask a peer, such as "/job:worker/replica:0/task:1", whether it answers; nothing else runs."""
    try:
        eager_context.context().check_collective_ops_peer_health(
            task, timeout_in_ms=int(timeout_seconds * 1000)
        )
    except tf.errors.FailedPreconditionError as error:
        raise ProcessLookupError(str(error)) from None
    except tf.errors.OpError:
        return False
    return True


def is_too_late_to_join() -> bool:
    """Tell whether TensorFlow has started working in this process without a cluster."""
    context = eager_context.context()
    return context._context_handle is not None and context._collective_leader is None


def listens_for_workers() -> bool:
    """Tell whether this process has joined a cluster, and so listens at its own address."""
    return eager_context.context()._collective_leader is not None


@contextlib.contextmanager
def coordination_timeouts(register_seconds: float, silence_seconds: float) -> Iterator[None]:
    """Set how long a cluster joined meanwhile waits for workers to join, or to break silence."""
    context = eager_context.context()
    configure = context.configure_coordination_service
    context.configure_coordination_service = functools.partial(
        configure,
        cluster_register_timeout_in_ms=round(1000 * register_seconds),
        heartbeat_timeout_in_ms=round(1000 * silence_seconds),
    )
    try:
        yield
    finally:
        del context.configure_coordination_service


def abort_collectives(message: str) -> None:
    """Make every pending and later collective fail with `UnavailableError(message)`."""
    eager_context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def abort_collectives_everywhere(message: str) -> None:
    """Make pending and later collectives of all workers fail with `message`."""
    # An error that travels along the collectives does not reach those waiting to be read.
    abort_collectives(message)
    with contextlib.suppress(tf.errors.OpError):  # another worker was first
        eager_context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, message)


def tell_cluster(name: str, text: str) -> None:
    """Publish a text to all workers of the cluster; the first one under a name stays."""
    with contextlib.suppress(tf.errors.OpError):  # another worker was first, or worker 0 is gone
        eager_context.context().set_config_key_value(name, text)


def wait_for_cluster(name: str) -> str | None:
    """Wait until a worker publishes a text under a name; None if worker 0 is gone first."""
    try:
        text: str = eager_context.context().get_config_key_value(name)
    except tf.errors.OpError:
        return None
    return text


def run_independently(result: tf.Tensor | tf.Operation) -> tf.Tensor | tf.Operation:
    """Let a stateful operation of a `tf.function` run in parallel with the other ones."""
    graph = getattr(result, "graph", None) if not tf.executing_eagerly() else None
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(getattr(result, "op", result))
    return result


def compile_operation(operation: tf.Operation) -> None:
    """Let XLA compile an operation, together with others around it that it can compile."""
    operation._set_attr("_XlaCompile", attr_value_pb2.AttrValue(b=True))


def function_being_traced(graph: tf.Graph) -> Any:
    """Return the outermost graph around `graph` if a `tf.function` is being traced into it."""
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return None if getattr(graph, "experimental_acd_manager", None) is None else graph


def convert_as_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make AutoGraph convert a function if `Strategy.run`, called here, would."""
    return autograph.tf_convert(function, ag_ctx.control_status_ctx(), convert_by_default=False)


def order_of_operation(operation: tf.Operation) -> int:
    """Return a number that is larger for an operation that was made later, in one graph."""
    return int(operation._id)


def is_stateful(operation: tf.Operation) -> bool:
    """Tell whether an operation reads or changes more than its inputs and outputs."""
    return bool(operation.op_def.is_stateful)


def calls_functions(operation: tf.Operation) -> bool:
    """Tell whether an operation runs other graphs, such as the branches of a `tf.cond`."""
    values = operation.node_def.attr.values()
    return any(value.HasField("func") or value.list.func for value in values)


def repeat_operation(operation: tf.Operation, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Repeat an operation with one output, in the graph being built, on inputs of its types."""
    attributes = {
        name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")
    }
    types = [output.dtype for output in operation.outputs]
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(operation.type, inputs, types, attrs=attributes).outputs[0]


def keras_state_of_thread() -> dict[str, Any]:
    """Return Keras's private state of the running thread, by name; changes to it affect Keras."""
    return vars(keras_global_state.GLOBAL_STATE_TRACKER)


def layers_with_state(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and its layers, each of which has its own variables."""
    return list(model._flatten_layers())


def own_state(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the non-trainable variables of a layer itself, without random seeds and metrics."""
    return list(layer._non_trainable_variables)


def memory_limits() -> dict[str, int]:
    """Return the bytes that TensorFlow's allocators may take, by the full names of devices."""
    runtime = eager_context.context()
    runtime.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(runtime._handle)
    try:
        return {
            pywrap_tfe.TF_DeviceListName(devices, index): memory_bytes(devices, index)
            for index in range(pywrap_tfe.TF_DeviceListCount(devices))
        }
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)


_load_generated = autograph_loader.load_source


def leave_no_generated_files() -> None:
    """Remove each file of AutoGraph once it is loaded: who is killed cannot do so at the end."""
    autograph_loader.load_source = _load_and_remove


def _load_and_remove(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
    module, path = _load_generated(source, delete_on_exit)
    if delete_on_exit:
        # without a time, so that a traceback still has the lines
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        for each in (path, importlib.util.cache_from_source(path)):
            Path(each).unlink(missing_ok=True)
    return module, path


def let_variables_be_numbers() -> None:
    """Let numpy, `float` and `int` read the variables of strategies, as they read others."""
    # not bool: TensorFlow's strategies ask whether a list of variables is empty
    variable = distribute_values.DistributedVariable
    variable.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype)
    variable.__float__ = lambda self: float(self.numpy())
    variable.__int__ = lambda self: int(self.numpy())
