"""The plan of a model's pipeline, from what the processes measure; the same on all of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het import private_api
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
from keras_het.strategy.pipeline.measurement.profiling import Measured, cut_bytes, unit_bytes
from keras_het.strategy.pipeline.step.edges import Place
from keras_het.strategy.pipeline.step.model_units import ModelUnits
from keras_het.strategy.pipeline.step.process_group import ProcessGroup

_plans = itertools.count()


@dataclasses.dataclass(frozen=True)
class Wishes:
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
    units: ModelUnits, measured: Measured, wishes: Wishes, processes: Processes
) -> tuple[PipelinePlan, Timeline]:
    """Measure the links, and plan; all processes must call it, and get the same plan."""
    weights, state = unit_bytes(units, units.model.optimizer)
    forward, backward = cut_bytes(units, measured.made_bytes)
    memory = np.array([wishes.memory_bytes])
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
    plan = functools.partial(_plan, units, profile, devices, wishes)
    agreed = plan() if processes.group is None else _agreed(plan, processes.group.process == 0)
    return agreed, simulate(profile, devices, agreed)


def _plan(
    units: ModelUnits, profile: ModelProfile, devices: Devices, wishes: Wishes
) -> PipelinePlan:
    arguments = wishes.num_micro_batches, wishes.schedule, wishes.recompute
    if isinstance(wishes.plan, PipelinePlan):
        return wishes.plan
    if wishes.plan is None:
        return plan_pipeline(profile, devices, *arguments)
    cuts = [units.cut_behind(name) for name in wishes.plan]
    if sorted(set(cuts)) != cuts:
        raise ValueError(
            "split_after names layers in the order in which the model calls them, each once. "
            "Received: "
            f"{list(wishes.plan)}. Put them in the order of model.summary()."
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
                "micro-batches, "
                f"and one micro-batch at least for each of its {len(stage.devices)} replicas. "
                f"Received: routes {list(stage.routes)}."
            )
