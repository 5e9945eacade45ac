"""The public strategy for models in stages: `model.fit` across devices that hold a part each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from keras_het import keras_graphs_adapter, private_api
from keras_het.planning import ReplicaLayout
from keras_het.planning.pipeline import PipelinePlan, Timeline
from keras_het.planning.pipeline.plan import check_plan_options
from keras_het.stability import experimental
from keras_het.strategy.extended import HeterogeneousExtended
from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy
from keras_het.strategy.measure.phase_times import PhaseTimes
from keras_het.strategy.membership import choose_devices
from keras_het.strategy.pipeline.edges import Place
from keras_het.strategy.pipeline.measured_plan import (
    PlanRequest,
    Processes,
    check_plan,
    make_plan,
    measure,
    slowed,
)
from keras_het.strategy.pipeline.model_units import (
    ModelUnits,
    check_can_be_cut,
    check_inputs,
)
from keras_het.strategy.pipeline.pass_times import Emulation
from keras_het.strategy.pipeline.pipeline import Pipeline, slots_of
from keras_het.strategy.pipeline.process_group import GROUPS, ProcessGroup
from keras_het.value_types import Nest


class PipelineExtended(HeterogeneousExtended):
    """Variables are plain ones, on the host until a stage's device takes them."""

    _target = "CPU:0"

    @contextlib.contextmanager
    def variables_on(self, device: str) -> Iterator[None]:
        before, self._target = self._target, device
        try:
            with tf.device(device):
                yield
        finally:
            self._target = before

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> Any:
        place = kwargs.pop("colocate_with", None)
        with tf.device(self._target if place is None else place.device):
            return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        pass

    def _update(
        self,
        var: tf.Variable,
        fn: Callable[..., Nest],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Nest:
        with tf.device(var.device), tf.distribute.ReplicaContext(self._container_strategy(), 0):
            return fn(var, *args, **kwargs)

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1


_BLOCK = 4096
# A strategy that kept the pipelines would keep their models.
_ATTRIBUTE = "_keras_het_pipeline"
_FIRST_GROUP = 5_000_000


@experimental
class PipelineStrategy(HeterogeneousStrategy):
    r"""Training of one model whose layers lie on several devices, with the numbers of one device.

    The model is cut into stages. A batch goes through them in M micro-batches, several of which are
    under way at the same time; a stage may have several devices, which take different
    micro-batches. A step is synchronous and changes the weights as one device would on the whole
    batch of B rows:

    .. math:: g = \sum_{m=1}^{M} \frac{b_m}{B} \nabla L_m, \qquad \sum_m b_m = B.

    Use it like any `tf.distribute.Strategy`, around stock Keras code. Every process reads whole
    batches. Layers that look at a whole batch see micro-batches: BatchNormalization normalizes each
    by itself, and Dropout draws for each, as under any data parallelism.

    Stages, their devices and the layers to recompute are chosen in the first step, from measured
    times and links, so that a step is short and fits into memory. The choice may be a single stage
    on all devices, which is data parallelism, or one device alone.

    Args:
        split_after: names of the layers after which to cut the model. Default: chosen from
            measurements.
        num_micro_batches: number of micro-batches of a step, M; 1 to 4 for each device are usual.
        devices: names of this process's devices, such as ["GPU:0", "GPU:1"]. Default: all GPUs, or
            all (logical) CPUs without a GPU.
        device_memory_bytes: what the model may use on each device of this process, in bytes: one
            number, or one per device. Default: what TensorFlow may use of a GPU; no limit for CPUs.
        recompute: "auto" computes layers again in the backward pass where memory would not do
            otherwise; "never", or "always".
        schedule: "1f1b", with few micro-batches in memory, or "gpipe", all forward passes first.
            With a loss that is no mean over samples (masked outputs, a user's own function) all
            forward passes come first in any case.
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`. Default: `TF_CONFIG`.
        startup_timeout_seconds: how long to wait for workers that have not started yet, in seconds.
        peer_timeout_seconds: how long a worker may be silent before it counts as lost, in seconds.
            Default: `KERAS_HET_PEER_TIMEOUT_SECONDS` in the environment, or 30.
        plan: a whole `keras_het.planning.pipeline.PipelinePlan`, in place of `split_after`.

    Raises:
        ValueError: for arguments that are not valid; in the first step, for models that cannot be
            cut, and if no plan fits into memory.

    Example:
        >>> import keras, keras_het
        >>> strategy = keras_het.PipelineStrategy(num_micro_batches=8)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")

    References:
        Zhang et al., "Optimizing execution for pipelined-based distributed deep learning in a
        heterogeneously networked GPU cluster", CCPE 32(23), 2020; Fan et al., "DAPPLE", PPoPP 2021.
    """

    _extended_class = PipelineExtended
    _refused_callbacks: ClassVar = {
        "BatchBalancer": "it gives micro-batches to devices by their measured speed",
        "BucketTuner": "a process has no gradients of the whole model to cut into buckets",
        "AsyncWorkers": "async workers train whole models",
        "LocalTraining": "a worker has no whole model to train by itself",
    }

    _compiles_steps = False

    def __init__(
        self,
        split_after: Sequence[str] | None = None,
        num_micro_batches: int = 8,
        devices: Sequence[str] | None = None,
        device_memory_bytes: float | Sequence[float] | None = None,
        recompute: str = "auto",
        schedule: str = "1f1b",
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        startup_timeout_seconds: float = 300.0,
        peer_timeout_seconds: float | None = None,
        plan: PipelinePlan | None = None,
    ) -> None:
        _check_plan_arguments(split_after, plan)
        check_plan_options(num_micro_batches, schedule, recompute)
        super().__init__(
            devices=["CPU:0"],
            cluster_resolver=cluster_resolver,
            startup_timeout_seconds=startup_timeout_seconds,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        if self.num_async_workers:
            raise ValueError(
                "All workers of a pipeline train together: each has a part of the model. Received: "
                f'a cluster with {self.num_async_workers} task(s) in the job "async". Make them '
                'tasks of the job "worker", or train under keras_het.HeterogeneousStrategy.'
            )
        self._own_devices = choose_devices(devices, 1)
        super()._warn_of_emulation(len(self._own_devices))
        limits = _limits(device_memory_bytes, self._own_devices)
        given = plan or split_after
        self._request = PlanRequest(given, num_micro_batches, schedule, recompute, limits)
        self._places = self._find_places()
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._latest: Callable[[], Pipeline | None] = lambda: None
        self._plan: PipelinePlan | None = None
        owners = [place.process for place in self._places]
        counts = tuple(owners.count(process) for process in range(self.num_workers))
        # a "replica" of these times is a device
        self.extended.compute_times.phases = PhaseTimes(ReplicaLayout(counts, self.worker_index))
        self._num_pipelines = 0
        self._timeline: Timeline | None = None
        if self.num_workers > 1:
            described = {
                "split_after": str(split_after and list(split_after)),
                "plan": str(plan and plan.stages),
                "num_micro_batches": str(num_micro_batches),
                "recompute": recompute,
                "schedule": schedule,
            }
            self.extended.agree("keras_het.PipelineStrategy", described)

    def _new_group(self) -> ProcessGroup | None:
        """Return the processes for one more pipeline, with its own messages."""
        if self.num_workers == 1:
            return None
        first = _FIRST_GROUP + self._collective_key_base + GROUPS * self._num_pipelines
        self._num_pipelines += 1
        return ProcessGroup(
            self.worker_index,
            self.num_workers,
            first,
            self.extended.sum_over_workers,
            self.extended.stop_request,
        )

    def _find_places(self) -> list[Place]:
        if self.num_workers == 1:
            return [Place(0, name) for name in self._own_devices]
        text = ",".join(self._own_devices).encode()
        codes = np.zeros([1, _BLOCK])
        codes[0, : len(text)] = list(text)
        return [
            Place(process, name)
            for process, row in enumerate(self._gather(codes))
            for name in bytes(row[row > 0].astype(int).tolist()).decode().split(",")
        ]

    def _gather(self, values: np.ndarray) -> np.ndarray:
        """Concatenate an array of every process; of few sizes, since each is traced."""
        padded = np.zeros([1, -(-values.size // _BLOCK) * _BLOCK])
        padded[0, : values.size] = values.ravel()
        everyone = self.extended.gather_over_workers(padded)
        return everyone[:, : values.size].reshape([-1, *values.shape[1:]])

    def _warn_of_emulation(self, num_devices: int) -> None:
        """Wait until the devices of the pipeline are known."""

    def __repr__(self) -> str:
        plan = self._plan
        state = "no plan before the first step" if plan is None else f"{len(plan.stages)} stages"
        return self._described(self._own_devices, state)

    @property
    def num_replicas_in_sync(self) -> int:
        """1: a step is one step of one device, as far as Keras and the optimizer see."""
        return 1

    @property
    def layout(self) -> ReplicaLayout:
        """One replica: every process reads the whole batch."""
        return ReplicaLayout((1,), 0)

    @property
    def predicted_timeline(self) -> Timeline | None:
        """The passes of one step of the latest plan, as predicted; None before the first step."""
        return self._timeline

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan of the model whose step was built last, None before the first."""
        return self._plan

    @property
    def measured_timeline(self) -> Timeline | None:
        """The passes of a recent step of the latest plan, as measured.

        `keras_het.callbacks.Telemetry` makes training measure them; None before the second step
        with it. Each process's times count from the begin of the step on its own clock. A backward
        pass includes the recomputation before it.
        """
        latest = self._latest_passes()
        return None if latest is None else latest[1]

    def _latest_passes(self) -> tuple[int, Timeline] | None:
        """Return the number of a step in `compute_times.phases`, and its passes."""
        pipeline = self._latest()
        return None if pipeline is None else pipeline.times.latest()

    @property
    def _layer_names(self) -> list[str]:
        pipeline = self._latest()
        return [] if pipeline is None else [unit.name for unit in pipeline.units.units]

    def _measure_phases(self, model: keras.Model, sampled: int) -> None:
        phases = self.extended.compute_times.phases
        self.extended.data_path.on_input_wait = phases.note_input_wait
        phases.begin(model, self._own_devices, sampled, host="CPU:0")

    def _sample_steps(self, *_: object) -> None:
        """Measure all steps: passes have no function without a clock."""

    def run(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Nest:
        """Run a step of Keras through the pipeline.

        Args:
            fn: Keras's train, test or predict step.
            args: the whole batch.
            kwargs: none.
            options: `tf.distribute.RunOptions`; accepted for compatibility.

        Raises:
            ValueError: for any other function, which has no layers to cut.
        """
        step = private_api.undecorated_step(fn)
        kind = private_api.keras_step_kind(step) if args and not kwargs else None
        if kind is None:
            raise ValueError(
                "A pipeline runs the steps of Keras, whose layers it can cut. Received: "
                f"strategy.run of {getattr(fn, '__name__', fn)}. Use model.fit, evaluate, predict "
                "or train_on_batch, or keras_het.HeterogeneousStrategy for a custom loop."
            )
        model = private_api.model_of_prediction(step)
        self.extended.stop_request.note_step(model, f"{kind}_function", self.num_workers > 1)
        data = tf.nest.map_structure(_whole_batch, args[0], expand_composites=False)
        return self._pipeline_of(model, data).step(kind, data)

    def _pipeline_of(self, model: keras.Model, data: Nest) -> Pipeline:
        pipeline = _known_pipeline(model)
        if pipeline is None or pipeline.is_outdated:
            units = ModelUnits(model)
            check_can_be_cut(units)
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            inputs = keras_graphs_adapter.flat_inputs(units.graph, inputs)
            check_inputs(inputs)
            with tf.init_scope():
                # the new stages may lie elsewhere
                self._complete(model, "compile")
                plan, emulation = self._make_plan(units, inputs)
                others = [each for each in self._pipelines if each.units.model is not model]
                taken = {id(variable) for each in others for variable in each.variables}
                pipeline = Pipeline(
                    units,
                    plan,
                    self._places,
                    self._new_group(),
                    emulation,
                    self.extended.compute_times.phases,
                )
                _place(self.extended, pipeline, taken)
            vars(model)[_ATTRIBUTE] = pipeline
            self._pipelines.add(pipeline)
        self._plan, self._latest = pipeline.plan, weakref.ref(pipeline)
        return pipeline

    def _make_plan(
        self, units: ModelUnits, inputs: list[tf.Tensor]
    ) -> tuple[PipelinePlan, Emulation | None]:
        """Plan from measurements on a micro-batch of these types; a user's plan is only checked."""
        given = self._request.plan
        if isinstance(given, PipelinePlan):
            check_plan(given, units, len(self._places))
        rows = max(1, -(-sum(self.current_shares) // self._request.num_micro_batches))
        specs = [
            tf.TensorSpec([rows, *(size or rows for size in value.shape[1:])], value.dtype)
            for value in inputs
        ]
        devices, emulation = self._own_devices, None
        measured = measure(units, specs, devices)
        if self.extended.emulated_devices is not None:
            emulated = dict(zip(devices, self.extended.emulated_devices, strict=True))
            times = measured.forward_seconds[:, 0], measured.backward_seconds[:, 0]
            emulation = Emulation(emulated, *times)
            measured = slowed(measured, emulation, devices, rows)
        processes = Processes(self._places, self._new_group(), self._gather)
        plan, self._timeline = make_plan(units, measured, self._request, processes)
        return plan, emulation

    @property
    def _holds_parts(self) -> bool:  # type: ignore[override]
        return self.num_workers > 1

    def _put_together(self, model: keras.Model) -> None:
        pipeline = _known_pipeline(model)
        if pipeline is not None and pipeline.is_scattered:
            with self.extended.naming_lost_workers():
                pipeline.put_together()

    def _complete(self, model: keras.Model, purpose: str) -> None:
        pipeline = _known_pipeline(model)
        if pipeline is None or not pipeline.is_scattered:
            return
        self.extended.agree(
            f"model.{purpose}",
            {},
            leaves_loop=(
                # begins as all messages that travel between workers do
                "The workers have each trained their own stages of the model. Received: "
                f"{purpose} within an epoch on worker {self.worker_index}, but not on all workers. "
                "Call it on every worker after the same step (only the chief writes files), or at "
                "the end of an epoch, when each of them has the whole model."
            ),
        )
        self._put_together(model)


def _check_plan_arguments(split_after: object, plan: object) -> None:
    names = split_after if isinstance(split_after, (list, tuple)) else [None]
    if split_after is not None and not all(isinstance(name, str) for name in names):
        raise ValueError(
            "split_after must be a list of names of the layers after which to cut. "
            f"Received: {split_after!r}. Write split_after=['block_2'], or leave it out."
        )
    if plan is not None and (split_after is not None or not isinstance(plan, PipelinePlan)):
        raise ValueError(
            "plan must be a keras_het.planning.pipeline.PipelinePlan, and comes without "
            f"split_after. Received: plan={plan!r}, split_after={split_after!r}. Leave one of "
            "them out."
        )


def _known_pipeline(model: keras.Model) -> Pipeline | None:
    return vars(model).get(_ATTRIBUTE)


def _whole_batch(value: Nest) -> Nest:
    return value.host_values[0] if hasattr(value, "host_values") else value


def _limits(given: float | Sequence[float] | None, devices: Sequence[str]) -> tuple[float, ...]:
    """Return the memory limit of each device of this process, infinite for none."""
    if given is None:
        return tuple(keras_graphs_adapter.memory_limit(device) for device in devices)
    limits = [given] * len(devices) if isinstance(given, (int, float)) else list(given)
    if len(limits) != len(devices) or not all(limit > 0 for limit in limits):
        raise ValueError(
            "device_memory_bytes must be a positive number of bytes, or one for each of this "
            f"process's {len(devices)} devices {list(devices)}. Received: {given!r}."
        )
    return tuple(map(float, limits))


def _place(extended: PipelineExtended, pipeline: Pipeline, taken: Container[int]) -> None:
    """Move the variables of each stage, and what the optimizer keeps for them, to its device."""
    kept = slots_of(pipeline.optimizer)
    for stage, device in zip(pipeline.stages, pipeline.homes(), strict=True):
        for variable in [*stage.weights, *stage.state]:
            if id(variable) in taken:
                continue
            for each in [variable, *kept.get(id(variable), [])]:
                if not _lies_on(each, device):
                    with extended.variables_on(device):
                        private_api.recreate_variable(each)
    if kept:
        keras_graphs_adapter.know_variables_again(pipeline.optimizer)


def _lies_on(variable: keras.Variable, device: str) -> bool:
    found = tf.DeviceSpec.from_string(variable.value.device)
    wanted = tf.DeviceSpec.from_string(f"/device:{device}")
    return (found.device_type, found.device_index) == (wanted.device_type, wanted.device_index)
