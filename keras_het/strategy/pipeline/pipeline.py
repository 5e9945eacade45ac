"""A model in a pipeline: its train, test and predict steps."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.planning.pipeline.plan import PipelinePlan
from keras_het.strategy.exact.own_state import tell
from keras_het.strategy.measure.phase_times import PhaseTimes
from keras_het.strategy.pipeline.edges import Edges, Messages, Place, Spec
from keras_het.strategy.pipeline.micro_batches import LossHead, MicroBatches, join
from keras_het.strategy.pipeline.model_units import ModelUnits, Token
from keras_het.strategy.pipeline.pass_graph import PassGraph
from keras_het.strategy.pipeline.pass_times import Emulation, PassClock, PassTimes
from keras_het.strategy.pipeline.process_group import ProcessGroup
from keras_het.strategy.pipeline.stage import Stage
from keras_het.value_types import Nest, Summand

_KINDS = ("train", "test", "predict")
# TensorFlow remembers the type of each message
_MESSAGES_PER_KIND = 500_000


class Pipeline:
    """A model cut into stages."""

    def __init__(
        self,
        units: ModelUnits,
        plan: PipelinePlan,
        places: Sequence[Place],
        group: ProcessGroup | None,
        emulation: Emulation | None,
        phases: PhaseTimes,
    ) -> None:
        self.units, self.plan, self.group = units, plan, group
        self._emulation = emulation
        self.stages = [Stage(units, planned) for planned in plan.stages]
        self.edges = Edges(units, self.stages, plan, places)
        self._process = 0 if group is None else group.process
        self._is_collector = self.edges.collector.process == self._process
        self.optimizer: keras.optimizers.Optimizer | None = units.model.optimizer
        self._built_from = self._parts()
        with tf.device("CPU:0"):
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._put_together_at = 0
        self._share = tf.function(self._share_stages, autograph=False)
        self._known_specs: dict[tuple[object, ...], dict[Token, Spec]] = {}
        self.times = PassTimes(plan, places, self._process, phases)
        self._clock: PassClock | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the model has been compiled again, or has other layers or variables, since."""
        return self._parts() != self._built_from

    def _parts(self) -> list[int]:
        model, variables = self.units.model, [v for u in self.units.units for v in u.variables]
        owners = keras_graphs_adapter.loss_tracker(model), keras_graphs_adapter.graph_of(model)
        return list(map(id, [*owners, *variables]))

    @property
    def is_scattered(self) -> bool:
        """Whether other processes have trained their stages since the model was put together."""
        return self.group is not None and int(self._steps.numpy()) != self._put_together_at

    def put_together(self) -> None:
        """Copy each stage, and what the optimizer keeps for it, to all processes; all call it."""
        self._share()
        self._put_together_at = int(self._steps.numpy())

    def _share_stages(self) -> None:
        if self.group is None:
            return
        kept = slots_of(self.optimizer)
        for number, stage in enumerate(self.stages):
            own = [*stage.weights, *stage.state]
            slots = [slot for variable in own for slot in kept.get(id(variable), [])]
            self.group.share_state([*own, *slots], self.edges.processes_of(number)[0])

    @property
    def variables(self) -> list[keras.Variable]:
        return [v for stage in self.stages for v in (*stage.weights, *stage.state)]

    def homes(self) -> list[str]:
        """Return where this process keeps each stage's variables: the host without a replica."""
        own = self.edges.homes(self._process)
        return [own.get(number, "CPU:0") for number in range(len(self.stages))]

    def step(self, kind: str, data: Nest) -> Nest:
        """Run Keras's step of a kind: "train", "test" or "predict"."""
        inputs, targets, weight = keras.utils.unpack_x_y_sample_weight(data)
        passes = self._run(kind, inputs, targets, weight)
        if kind == "predict":
            return self._predictions()
        square = self._sum_gradients(passes) if kind == "train" else None
        square = self._count_loss(passes, targets, weight, square)
        if kind == "train":
            self._update(passes, square)
        return self._logs(inputs, targets, weight)

    def _sum_gradients(self, passes: PassGraph) -> tf.Tensor | None:
        """Sum over processes; return the square of this process's part of the norm, if several."""
        with tf.device("CPU:0"):
            self._steps.assign_add(1)
        if self.group is None:
            return None
        own: list[tuple[Summand | None, keras.Variable]] = []
        for stage, gradients in passes.gradients.items():
            processes = self.edges.processes_of(stage)
            if len(processes) > 1:
                gradients = self.group.sum_gradients(gradients, processes, stage)
                passes.gradients[stage] = gradients
            if processes[0] == self._process:
                own += zip(gradients, self.stages[stage].weights, strict=True)
        with tf.device("CPU:0"):
            return square_norm(self.optimizer, own)

    def _predictions(self) -> Nest:
        whole = self._whole if self._is_collector else None
        if self.group is not None:
            self.group.sum_of_step([])
            like = [tf.TensorSpec(t.shape, t.dtype) for t in self.units.graph.outputs]
            whole = self.group.share_outputs(whole, like, self.edges.collector.process)
        with tf.control_dependencies(self._messages.sends):
            whole = [tf.identity(value) for value in whole or []]
        return keras_graphs_adapter.packed_outputs(self.units.graph, whole)

    def _run(self, kind: str, inputs: Nest, targets: Nest, weight: Nest) -> PassGraph:
        self._batches = batches = MicroBatches(inputs, self.plan.num_micro_batches)
        head = LossHead(self.units, batches, targets, weight) if kind == "train" else None
        flat = keras_graphs_adapter.flat_inputs(self.units.graph, inputs)
        self._clock = None
        if kind == "train" and self.times.phases.is_measuring:
            self._clock = PassClock(flat)
            flat = self._clock.inputs
        specs = self._specs(flat) if self.group is not None else {}
        number = _KINDS.index(kind)
        self._messages = Messages(self.edges, self.group, specs, number * _MESSAGES_PER_KIND)
        passes = PassGraph(self.edges, self._messages, self._emulation, self._clock)
        passes.run(batches, flat, head)
        if self._is_collector:
            with tf.device(self.edges.collector.device):
                self._whole = join(batches, passes.outputs, passes.output_masks)
        for stage in passes.homes:
            self._assign_state(passes, stage, number)
        return passes

    def _specs(self, inputs: list[tf.Tensor]) -> dict[Token, Spec]:
        """Return types of the tensors between stages, from a trace that never runs."""
        sizes = tuple(tuple(value.shape[1:]) for value in inputs)
        known = self._known_specs.setdefault(sizes, {})

        def trace(*values: tf.Tensor) -> tf.Tensor:
            tensors = dict(zip(self.units.inputs, values, strict=True))
            masks: dict[Token, tf.Tensor] = {}
            for stage in self.stages:
                weights = [tf.convert_to_tensor(v.value) for v in stage.weights]
                state = [tf.convert_to_tensor(v.value) for v in stage.state]
                result = stage.forward(weights, state, tensors, masks, False)
                tensors.update(result.tensors)
                masks.update(result.masks)
            for token, value in tensors.items():
                mask = masks.get(token)
                mask_rank = None if mask is None else mask.shape.rank
                known[token] = Spec(value.dtype, value.shape, mask_rank)
            return tf.zeros([])

        if not known:
            specs = [tf.TensorSpec([None, *v.shape[1:]], v.dtype) for v in inputs]
            with tf.init_scope():
                tf.function(trace, autograph=False).get_concrete_function(*specs)
        return known

    def _assign_state(self, passes: PassGraph, stage: int, kind: int) -> None:
        """Give a stage's layers the state after the step, the same in all of its processes."""
        own, processes = self.stages[stage], self.edges.processes_of(stage)
        changes = passes.changes(stage)
        tell(self.units.model, own.remarks)
        if len(processes) > 1:
            own.check_may_be_shared(_KINDS[kind] == "train")
        summands = [each for change in changes for each in change.summands]
        if self.group is not None and len(processes) > 1 and summands:
            summands = self.group.sum(summands, processes, stage, 1 + kind)
        sums = iter(summands)
        for change in changes:
            change.variable.assign(change.finish([next(sums) for _ in change.summands]))

    def _count_loss(
        self, passes: PassGraph, targets: Nest, weight: Nest, square: tf.Tensor | None
    ) -> tf.Tensor | None:
        """Report the loss of the whole batch as one device does."""
        model = self.units.model
        losses = list(passes.losses)
        if self._is_collector:
            compiled = keras_graphs_adapter.compiled_loss(model)
            with tf.device(self.edges.collector.device):
                outputs = keras_graphs_adapter.packed_outputs(self.units.graph, self._whole)
                loss = None if compiled is None else compiled(targets, outputs, weight)
            losses = [*([] if loss is None else [loss]), *losses]
        with tf.device("CPU:0"):
            dtype = losses[0].dtype if losses else keras.config.floatx()
            total = tf.add_n([tf.cast(each, dtype) for each in losses] or [tf.zeros([], dtype)])
            measured = [] if self._clock is None else [self.times.contribution()]
            flat = tf.nest.flatten(passes.gradients, expand_composites=True)
            results = [total, *(value for value in flat if value is not None)]
            if self.group is not None:
                sent = [tf.cast(total, tf.float64), *measured]
                sent += [] if square is None else [square]
                results = self.group.sum_of_step(sent)
                measured = results[1 : 1 + len(measured)]
                total, square = tf.cast(results[0], dtype), results[-1]
            if self._clock is not None:
                self.times.record(*measured)
                self.times.finish_step(self._clock, results, self._batches)
        keras_graphs_adapter.loss_tracker(model).update_state(
            total, sample_weight=self._batches.rows
        )
        return square

    def _update(self, passes: PassGraph, square: tf.Tensor | None) -> None:
        model = self.units.model
        gradients: dict[int, Summand | None] = {
            id(variable): gradient
            for stage, found in passes.gradients.items()
            for variable, gradient in zip(self.stages[stage].weights, found, strict=True)
        }
        if not model.trainable_weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        elif square is None:
            model.optimizer.apply_gradients(
                [(gradients.get(id(v)), v) for v in model.trainable_weights]
            )
        else:
            own = [
                (gradients[id(v)], v)
                for v in model.trainable_weights
                if gradients.get(id(v)) is not None
            ]
            apply_own_gradients(model.optimizer, own, square)

    def _logs(self, inputs: Nest, targets: Nest, weight: Nest) -> dict[str, tf.Tensor]:
        """Update the metrics where the outputs are, and give all processes their state."""
        model = self.units.model
        logs = None
        if self._is_collector:
            with tf.device(self.edges.collector.device):
                outputs = keras_graphs_adapter.packed_outputs(self.units.graph, self._whole)
                logs = model.compute_metrics(inputs, targets, outputs, sample_weight=weight)
        if self.group is not None:
            tracker = keras_graphs_adapter.loss_tracker(model)
            state = [
                v for metric in model.metrics if metric is not tracker for v in metric.variables
            ]
            self.group.share_state(state, self.edges.collector.process)
            logs = model.get_metrics_result() if logs is None else logs
        with tf.control_dependencies(self._messages.sends):
            return {name: tf.identity(value) for name, value in (logs or {}).items()}


def slots_of(optimizer: keras.optimizers.Optimizer | None) -> dict[int, list[keras.Variable]]:
    if optimizer is None or not optimizer.built:
        return {}
    pairs = keras_graphs_adapter.variables_of_optimizer(optimizer)
    return {id(variable): slots for variable, slots in pairs}


def square_norm(
    optimizer: keras.optimizers.Optimizer | None,
    gradients: Sequence[tuple[Summand | None, keras.Variable]],
) -> tf.Tensor:
    """Return the sum of the squares of what the optimizer would clip, float64 scalar."""
    # Without its scale, with gradients that wait for their update, each row of a sparse one by
    # itself.
    found = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    if optimizer is None or not found:
        return tf.zeros([], tf.float64)
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float64)
    squares = []
    for gradient, variable in found:
        waiting = keras_graphs_adapter.accumulated_gradients(optimizer, variable)
        if waiting is not None:
            gradient = tf.convert_to_tensor(gradient)
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        unscaled = tf.cast(values, tf.float64) / scale
        if waiting is not None:
            unscaled = (unscaled + tf.cast(waiting.value, tf.float64)) / steps
        squares.append(tf.reduce_sum(tf.square(unscaled)))
    return tf.add_n(squares)


def apply_own_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tuple[Summand, keras.Variable]],
    square: tf.Tensor,
) -> None:
    """Update this process's variables as an optimizer that has all gradients does."""
    # Clipping by the norm, and `LossScaleOptimizer`'s check for finite ones, need all gradients.
    norm = tf.sqrt(square)
    if not gradients:
        # learning rate schedules go by the number of steps, the loss by the scale
        keras_graphs_adapter.count_step(optimizer, tf.math.is_finite(norm))
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is not inner:
        factor = tf.ones([], tf.float64) + (norm - norm)
        gradients = [
            (tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient), variable)
            for gradient, variable in gradients
        ]
    with contextlib.ExitStack() as stack:
        if inner.global_clipnorm and not inner.clipnorm:
            clip = functools.partial(_clipped, limit=inner.global_clipnorm, norm=norm)
            stack.enter_context(keras_graphs_adapter.clipping_by(inner, clip))
        optimizer.apply_gradients(gradients)


def _clipped(gradients: list[Summand], limit: float, norm: tf.Tensor) -> list[tf.Tensor]:
    """Clip as Keras does: a norm that is not finite makes all NaN, and sparse ones become dense."""
    factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in gradients]
