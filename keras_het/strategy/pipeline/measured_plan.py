"""The plan of a model's pipeline, from what the processes measure; the same on all of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het import keras_graphs_adapter, private_api
from keras_het.exchange.links import measure_link
from keras_het.planning.pipeline import (
    Devices,
    ModelProfile,
    Timeline,
    plan_pipeline,
    plan_with_cuts,
    simulate,
)
from keras_het.planning.pipeline.plan import PipelinePlan, Stage
from keras_het.planning.shares import FloatArray
from keras_het.strategy.membership import physical_devices
from keras_het.strategy.pipeline.edges import Place
from keras_het.strategy.pipeline.model_units import ModelUnits, Token, Unit
from keras_het.strategy.pipeline.pass_times import Emulation
from keras_het.strategy.pipeline.process_group import ProcessGroup
from keras_het.strategy.pipeline.stage import Segment, Values

_FEWEST_RUNS, _MOST_RUNS = 5, 40
_RUN_SECONDS = 0.04  # of one function, if it takes more than the fewest runs


@dataclasses.dataclass
class Measured:
    """What this process measured, of L units on its own D devices, for one micro-batch."""

    forward_seconds: FloatArray
    backward_seconds: FloatArray
    activation_bytes: FloatArray
    made_bytes: dict[Token, float]


def measure(units: ModelUnits, inputs: Sequence[tf.TensorSpec], devices: Sequence[str]) -> Measured:
    """Run every layer call by itself, forward and backward, on each distinct device."""
    # Lower quartiles, less what a call takes that does nothing: other work adds to short times. In
    # a thread: the `tf.init_scope` of a step that is traced stops the tapes of its own.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_measure, units, inputs, devices).result()


def _measure(
    units: ModelUnits, inputs: Sequence[tf.TensorSpec], devices: Sequence[str]
) -> Measured:
    kinds = [_kind(device) for device in devices]
    timed: dict[str, list[_Measurement]] = {}
    for kind, device in zip(kinds, devices, strict=True):
        if kind not in timed:
            with tf.device(device):
                values = Values(dict(zip(units.inputs, map(_example, inputs), strict=True)))
                timed[kind] = [_Measurement(unit, values) for unit in units.units]
    # what a layer keeps and sends is the same on all devices
    needed = {token for each in timed[kinds[0]] for token in each.needed}
    kept = [
        each.inner_bytes + sum(_bytes(values.tensors[t]) for t in unit.outputs if t in needed)
        for unit, each in zip(units.units, timed[kinds[0]], strict=True)
    ]
    made_bytes = {}
    for token in units.maker:
        mask = values.masks.get(token)
        made_bytes[token] = _bytes(values.tensors[token]) + (0 if mask is None else _bytes(mask))
    return Measured(
        np.array([[each.forward for each in timed[kind]] for kind in kinds]).T,
        np.array([[each.backward for each in timed[kind]] for kind in kinds]).T,
        np.array(kept, np.float64),
        made_bytes,
    )


def slowed(measured: Measured, emulation: Emulation, devices: Sequence[str], rows: int) -> Measured:
    each = [emulation.seconds_per_sample(device) for device in devices]
    forward, backward = (rows * np.array([times[i] for times in each]).T for i in range(2))
    return dataclasses.replace(
        measured,
        forward_seconds=np.maximum(measured.forward_seconds, forward),
        backward_seconds=np.maximum(measured.backward_seconds, backward),
    )


class _Measurement:
    """One layer call: its times, and what its backward pass needs from the forward pass."""

    def __init__(self, unit: Unit, values: Values) -> None:
        segment = Segment([unit])
        variables = segment.trainable_variables
        weights = [tf.identity(v.value) for v in variables]
        state = {id(v): tf.identity(v.value) for v in segment.state}
        taken = [values.tensors[token] for token in segment.taken]
        masks = {token: values.masks[token] for token in segment.taken if token in values.masks}

        def run(given: list[tf.Tensor], weights: list[tf.Tensor]) -> Values:
            result = Values(dict(zip(segment.taken, given, strict=True)), dict(masks), dict(state))
            segment.run(dict(zip(map(id, variables), weights, strict=True)), result, True)
            return result

        def forward(given: list[tf.Tensor], weights: list[tf.Tensor]) -> list[tf.Tensor]:
            result = run(given, weights)
            return [*(result.tensors[token] for token in segment.made), *result.means]

        def both(given: list[tf.Tensor], weights: list[tf.Tensor]) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                sources = [v for v in given if v.dtype.is_floating] + weights
                tape.watch(sources)
                made = forward(given, weights)
                floats = [value for value in made if value.dtype.is_floating]
            found = tape.gradient(floats, sources) if floats and sources else []
            gradients = [tf.convert_to_tensor(g) for g in found if g is not None]
            return gradients + made[: len(segment.made)]

        def nothing(given: list[tf.Tensor], weights: list[tf.Tensor]) -> tf.Tensor:
            return tf.zeros([])

        whole = tf.function(both, autograph=False)
        idle, once, twice = (
            _seconds(tf.function(function, autograph=False), [taken, weights])
            for function in (nothing, forward, whole)
        )
        self.forward, self.backward = max(once - idle, 1e-7), max(twice - once, 0.0)
        graph = whole.get_concrete_function(taken, weights).graph
        made = len(graph.outputs) - len(segment.made)
        tokens = dict(zip(map(id, graph.inputs), segment.taken, strict=False))
        outputs = [_origin(tensor) for tensor in graph.outputs[made:]]
        tokens.update(zip(map(id, outputs), segment.made, strict=True))
        needed = _needed_by_gradients(graph)
        self.needed = {tokens[id(tensor)] for tensor in needed if id(tensor) in tokens}
        others = {*tokens, *map(id, graph.inputs)}
        inner = [t for t in needed if id(t) not in others and t.shape.is_fully_defined()]
        self.inner_bytes = sum(_bytes(tensor) for tensor in inner)
        done = run(taken, weights)
        values.tensors.update((token, done.tensors[token]) for token in segment.made)
        values.masks.update((t, done.masks[t]) for t in segment.made if t in done.masks)


def unit_bytes(
    units: ModelUnits, optimizer: keras.optimizers.Optimizer | None
) -> tuple[FloatArray, FloatArray]:
    """Return the bytes of each unit's weights, and of all it needs to train them."""
    # A layer that is called several times counts at its first call.
    is_built = optimizer is not None and bool(optimizer.built)
    pairs = keras_graphs_adapter.variables_of_optimizer(optimizer) if is_built else []
    slots = {id(variable): sum(_bytes(s.value) for s in kept) for variable, kept in pairs}
    weights, state = np.zeros([2, len(units.units)])
    seen: set[int] = set()
    for i, unit in enumerate(units.units):
        trained = {id(v) for v in (unit.layer.trainable_variables if unit.layer else [])}
        for variable in unit.variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            size = _bytes(variable.value)
            is_trained = id(variable) in trained
            weights[i] += size if is_trained else 0
            state[i] += (2 * size if is_trained else size) + slots.get(id(variable), 0)
    return weights, state


def cut_bytes(units: ModelUnits, made_bytes: dict[Token, float]) -> tuple[FloatArray, FloatArray]:
    """Return the bytes that cross each cut, forward and backward, float64 [L + 1] each."""
    number = len(units.units)
    forward, backward = np.zeros([2, number + 1])
    for token, maker in units.maker.items():
        last = min(units.last_use.get(token, -1), number - 1)
        unit = units.units[maker]
        dtype = tf.as_dtype(unit.node.outputs[unit.outputs.index(token)].dtype)
        for cut in range(maker + 1, last + 1):
            forward[cut] += made_bytes[token]
            backward[cut] += made_bytes[token] if dtype.is_floating else 0
    return forward, backward


def _kind(device: str) -> str:
    """Return what tells a device from others: the model of a GPU; all logical CPUs are alike."""
    name = device.upper()
    for index, physical in enumerate(physical_devices("GPU")):
        if name.endswith(f"GPU:{index}"):
            details = tf.config.experimental.get_device_details(physical)
            return str(details.get("device_name", physical.name))
    return name.split(":")[-2] if ":" in name else name


def _example(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform(spec.shape, [1, 2]), spec.dtype)
    return (tf.zeros if spec.dtype == tf.string else tf.ones)(spec.shape, spec.dtype)


def _bytes(value: tf.Tensor | tf.Variable) -> float:
    return float(value.dtype.size * (value.shape.num_elements() or 0))


def _seconds(function: Callable[..., object], arguments: list[object]) -> float:
    _wait_for(function(*arguments))
    times: list[float] = []
    while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and sum(times) < _RUN_SECONDS):
        begin = time.perf_counter()
        _wait_for(function(*arguments))
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 4]


def _wait_for(result: object) -> None:
    """Wait for a device that works in the background."""
    for value in tf.nest.flatten(result)[-1:]:
        np.asarray(value)


def _needed_by_gradients(graph: tf.Graph) -> list[tf.Tensor]:
    """Return what operations of gradients take from the forward pass."""
    found = {}
    for operation in graph.get_operations():
        for tensor in operation.inputs if _is_of_gradient(operation) else ():
            if not _is_of_gradient(tensor.op) and tensor.op.type != "Const":
                found[id(_origin(tensor))] = _origin(tensor)
    return list(found.values())


def _is_of_gradient(operation: tf.Operation) -> bool:
    return "gradient_tape" in operation.name


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that this one is the same memory as."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


_plans = itertools.count()


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What the user asked of a plan."""

    plan: PipelinePlan | Sequence[str] | None
    num_micro_batches: int
    schedule: str
    recompute: str
    memory_bytes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Processes:
    """What planning needs of the other processes."""

    places: Sequence[Place]
    group: ProcessGroup | None
    gather: Callable[[np.ndarray], np.ndarray]

    def columns(self, own: np.ndarray) -> np.ndarray:
        if self.group is None:
            return own
        counts = [sum(p.process == i for p in self.places) for i in range(self.group.processes)]
        padded = np.zeros([1, max(counts), len(own)])
        padded[0, : own.shape[1]] = own.T
        everyone = self.gather(padded)
        return np.concatenate([everyone[i, :count] for i, count in enumerate(counts)]).T

    def devices(self, memory: FloatArray) -> Devices:
        owners = [place.process for place in self.places]
        rate, latency = np.full([1, 1], np.inf), np.zeros([1, 1])
        if self.group is not None:
            rate, latency = measure_links(self.group, self.gather)
        names = [
            place.device if self.group is None else f"worker {place.process} {place.device}"
            for place in self.places
        ]
        return Devices(
            tuple(names), tuple(owners), rate[owners][:, owners], latency[owners][:, owners], memory
        )


def measure_links(
    group: ProcessGroup, gather: Callable[[np.ndarray], np.ndarray]
) -> tuple[FloatArray, FloatArray]:
    """Measure rates and latencies of pairs of processes one after the other; all must call it."""
    own, number = group.process, group.processes
    mine = np.zeros([1, number, 2])
    for pair, (first, second) in enumerate(itertools.combinations(range(number), 2)):
        if own in (first, second):
            other = second if own == first else first
            exchange = _exchange(group, other, own == first, 2 * pair)
            latency, rate = measure_link(exchange, comes_back=True)
            mine[0, other] = rate, latency
    everyone = gather(mine)
    # both ends have measured a link
    rates = np.maximum(everyone[..., 0], everyone[..., 0].T)
    latencies = np.minimum(everyone[..., 1], everyone[..., 1].T)
    rates[np.arange(number), np.arange(number)] = np.inf
    return rates, latencies


def _exchange(
    group: ProcessGroup, other: int, begins: bool, number: int
) -> Callable[[tf.Tensor], object]:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def exchange(value: tf.Tensor) -> tf.Tensor:
        if begins:
            with tf.control_dependencies([group.send(value, other, number)]):
                return group.receive(1, tf.float32, other, number + 1)
        received = group.receive(1, tf.float32, other, number)
        with tf.control_dependencies([group.send(received, other, number + 1)]):
            return tf.identity(received)

    return lambda value: exchange(value).numpy()


def make_plan(
    units: ModelUnits, measured: Measured, request: PlanRequest, processes: Processes
) -> tuple[PipelinePlan, Timeline]:
    """Measure the links, and plan; all processes must call it, and get the same plan."""
    weights, state = unit_bytes(units, units.model.optimizer)
    forward, backward = cut_bytes(units, measured.made_bytes)
    memory = np.array([request.memory_bytes])
    columns = processes.columns(
        np.concatenate([measured.forward_seconds, measured.backward_seconds, memory])
    )
    forward_seconds, backward_seconds = np.split(columns[:-1], 2)
    profile = ModelProfile(
        tuple(unit.name for unit in units.units),
        forward_seconds,
        backward_seconds,
        measured.activation_bytes,
        weights,
        state,
        forward,
        backward,
        units.together,
    )
    devices = processes.devices(columns[-1])
    plan = functools.partial(_plan, units, profile, devices, request)
    agreed = plan() if processes.group is None else _agreed(plan, processes.group.process == 0)
    return agreed, simulate(profile, devices, agreed)


def _plan(
    units: ModelUnits, profile: ModelProfile, devices: Devices, request: PlanRequest
) -> PipelinePlan:
    arguments = request.num_micro_batches, request.schedule, request.recompute
    if isinstance(request.plan, PipelinePlan):
        return request.plan
    if request.plan is None:
        return plan_pipeline(profile, devices, *arguments)
    cuts = [units.cut_after(name) for name in request.plan]
    if sorted(set(cuts)) != cuts:
        raise ValueError(
            "split_after names layers in the order in which the model calls them, each once. "
            f"Received: {list(request.plan)}. Put them in the order of model.summary()."
        )
    return plan_with_cuts(profile, devices, cuts, *arguments)


def _agreed(plan: Callable[[], PipelinePlan], is_chief: bool) -> PipelinePlan:
    """Let the chief plan for all: the same numbers need not round alike on different machines."""
    name = f"keras_het/pipeline_plan_{next(_plans)}"
    if is_chief:
        try:
            text = json.dumps({"plan": dataclasses.asdict(plan())})
        except ValueError as error:
            text = json.dumps({"error": str(error)})
        private_api.tell_cluster(name, text)
    told = private_api.wait_for_cluster(name)
    if told is None:
        raise RuntimeError(
            "Worker 0 did not send its plan of the pipeline: it has probably ended. See its output."
        )
    found = json.loads(told)
    if "error" in found:
        raise ValueError(found["error"])
    return PipelinePlan(**{name: _from_json(value) for name, value in found["plan"].items()})


def _from_json(value: Any) -> Any:
    """Return what a plan has: tuples for lists, and stages for the dictionaries in them."""
    if isinstance(value, dict):
        return Stage(**{name: _from_json(each) for name, each in value.items()})
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def check_plan(plan: PipelinePlan, units: ModelUnits, num_devices: int) -> None:
    bounds = [0, *(stage.end for stage in plan.stages)]
    begins = [stage.first for stage in plan.stages]
    if begins != bounds[:-1] or bounds[-1] != len(units.units) or sorted(set(bounds)) != bounds:
        raise ValueError(
            f"The stages of a plan must have all {len(units.units)} layer calls of the model, in "
            f"their order. Received: {[(s.first, s.end) for s in plan.stages]}. Give names of "
            "layers to cut after instead, as split_after=['block_2'], or no plan."
        )
    for first, last in units.together:
        if any(first < cut <= last for cut in bounds[1:-1]):
            names = [units.units[i].name for i in (first, last)]
            raise ValueError(
                f"A weight would lie in two stages. Received: a cut between {names[0]} and "
                f"{names[1]}, which share weights or state. Cut before or after both."
            )
    for number, stage in enumerate(plan.stages):
        unknown = [d for d in stage.devices if not 0 <= d < num_devices]
        if unknown or not stage.devices or len(set(stage.devices)) != len(stage.devices):
            raise ValueError(
                f"Stage {number} needs different devices from 0 to {num_devices - 1}. Received: "
                f"{list(stage.devices)}. Number the devices worker by worker."
            )
        if len(stage.routes) != plan.num_micro_batches or set(stage.routes) != set(
            range(len(stage.devices))
        ):
            raise ValueError(
                f"Stage {number} needs a replica for each of {plan.num_micro_batches} "
                f"micro-batches, and one micro-batch at least for each of its {len(stage.devices)} "
                f"replicas. Received: routes {list(stage.routes)}."
            )
