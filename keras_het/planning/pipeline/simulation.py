"""Discrete-event simulation of a step: what every device does when, and how long it is idle."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from keras_het.planning.pipeline.plan import PipelinePlan, stage_order
from keras_het.planning.pipeline.problem import Devices, Link, ModelProfile

COMPUTE = ("forward", "backward", "recompute")


class Event(NamedTuple):
    """Something that takes time.

    Attributes:
        kind: "forward", "backward", "recompute", "transfer" or "all_reduce".
        micro_batch: its number; -1 in an all-reduce.
        stage: number of the stage; of a transfer, that of the sender.
        begin: seconds from the beginning of the step.
        end: seconds from the beginning of the step.
    """

    kind: str
    micro_batch: int
    stage: int
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Args:
        events: events of each device by their begin, [D]; a transfer is the sender's.
        step_seconds: when the last event ends.
    """

    events: tuple[tuple[Event, ...], ...]
    step_seconds: float

    def busy_seconds(self, device: int) -> float:
        """Return how long a device computes."""
        return sum(e.end - e.begin for e in self.events[device] if e.kind in COMPUTE)

    def idle_seconds(self, device: int) -> float:
        """Return how long a device does not compute (the "bubble", all-reduce included)."""
        return self.step_seconds - self.busy_seconds(device)


def simulate(profile: ModelProfile, devices: Devices, plan: PipelinePlan) -> Timeline:
    """Simulate a step of a plan.

    Every replica follows `stage_order`. A backward pass waits for its gradient; the recomputation
    before it does not. Links carry one transfer at a time per direction and pair of hosts (of
    devices, inside a host), first come, first served. A stage with replicas ends with a ring
    all-reduce, which starts when the last replica is done and keeps the links of its ring.

    Args:
        profile: costs of the model.
        devices: devices and links.
        plan: the plan; its predictions are not read.
    """
    return _Simulation(profile, devices, plan).run()


class _Simulation:
    def __init__(self, profile: ModelProfile, devices: Devices, plan: PipelinePlan) -> None:
        self._profile, self._devices, self._plan = profile, devices, plan
        self._events: list[list[Event]] = [[] for _ in range(devices.num_devices)]
        self._orders = {
            (position, replica): deque(stage_order(plan.stages, position, replica, plan.schedule))
            for position, stage in enumerate(plan.stages)
            for replica in range(len(stage.devices))
        }
        self._seconds = {
            (kind, position, replica): float(table[units, device].sum())
            for position, stage in enumerate(plan.stages)
            for replica, device in enumerate(stage.devices)
            for kind, table, units in (
                ("forward", profile.forward_seconds, list(range(stage.first, stage.end))),
                ("backward", profile.backward_seconds, list(range(stage.first, stage.end))),
                ("recompute", profile.forward_seconds, list(stage.recomputed)),
            )
        }
        self._free = dict.fromkeys(self._orders, 0.0)
        self._link_free: dict[Link, float] = {}
        # When the tensors that a pass waits for are there; forward passes of the first stage wait
        # for nothing.
        self._arrived: dict[tuple[int, str, int], float] = {}
        self._passes_left = [2 * plan.micro_batches for _ in plan.stages]
        # Time, number in the order of requests, what happens then.
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = itertools.count()

    def run(self) -> Timeline:
        for key in self._orders:
            self._start(*key)
        while self._queue:
            now, _, action, arguments = heapq.heappop(self._queue)
            action(now, *arguments)
        if any(self._passes_left):
            raise ValueError(
                "The stages wait for each other. Received: "
                f"ahead={[stage.ahead for stage in self._plan.stages]}. "
                "Let `ahead` fall from stage to stage, or leave it out."
            )
        ends = [event.end for events in self._events for event in events]
        ordered = (sorted(events, key=lambda e: (e.begin, e.end)) for events in self._events)
        return Timeline(tuple(map(tuple, ordered)), max(ends))

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._queue, (time, next(self._numbers), action, arguments))

    def _start(self, position: int, replica: int) -> None:
        """Start the next pass of a replica if what it needs is there."""
        order = self._orders[position, replica]
        if not order:
            return
        kind, micro_batch = order[0]
        key = (position, kind, micro_batch)
        last = position == len(self._plan.stages) - 1
        if (kind == "forward" and not position) or (kind == "backward" and last):
            self._arrived.setdefault(key, 0.0)
        if key not in self._arrived:
            return
        order.popleft()
        stage = self._plan.stages[position]
        device = stage.devices[replica]
        begin = self._free[position, replica]
        if kind == "backward" and stage.recomputed:
            again = self._seconds["recompute", position, replica]
            self._add(device, "recompute", micro_batch, position, begin, begin + again)
            begin += again
        begin = max(begin, self._arrived[key])
        end = begin + self._seconds[kind, position, replica]
        self._add(device, kind, micro_batch, position, begin, end)
        self._free[position, replica] = end
        self._at(end, self._end_of_pass, kind, position, replica, micro_batch)

    def _end_of_pass(
        self, now: float, kind: str, position: int, replica: int, micro_batch: int
    ) -> None:
        self._passes_left[position] -= 1
        to = position + (1 if kind == "forward" else -1)
        if 0 <= to < len(self._plan.stages):
            self._at(now, self._transfer, position, to, micro_batch)
        if not self._passes_left[position] and len(self._plan.stages[position].devices) > 1:
            self._at(now, self._all_reduce, position)
        self._start(position, replica)

    def _transfer(self, now: float, position: int, to: int, micro_batch: int) -> None:
        stages = self._plan.stages
        sender = stages[position].devices[stages[position].routes[micro_batch]]
        taker = stages[to].routes[micro_batch]
        receiver = stages[to].devices[taker]
        forward = to > position
        num_bytes = (
            self._profile.cut_bytes[stages[to].first]
            if forward
            else self._profile.gradient_bytes[stages[position].first]
        )
        seconds = self._devices.transfer_seconds(sender, receiver, float(num_bytes))
        end = now
        if seconds > 0:
            link = self._devices.link(sender, receiver)
            begin = max(now, self._link_free.get(link, 0.0))
            end = self._link_free[link] = begin + seconds
            self._add(sender, "transfer", micro_batch, position, begin, end)
        self._arrived[to, "forward" if forward else "backward", micro_batch] = end
        self._start(to, taker)

    def _all_reduce(self, now: float, position: int) -> None:
        stage = self._plan.stages[position]
        weights = float(self._profile.weight_bytes[stage.first : stage.end].sum())
        seconds = self._devices.all_reduce_seconds(stage.devices, weights)
        if seconds <= 0:
            return
        ring = self._devices.ring(stage.devices)
        links = [self._devices.link(*pair) for pair in zip(ring, (*ring[1:], ring[0]), strict=True)]
        begin = max(now, *(self._link_free.get(link, 0.0) for link in links))
        self._link_free.update(dict.fromkeys(links, begin + seconds))
        for device in stage.devices:
            self._add(device, "all_reduce", -1, position, begin, begin + seconds)

    def _add(
        self, device: int, kind: str, micro_batch: int, stage: int, begin: float, end: float
    ) -> None:
        self._events[device].append(Event(kind, micro_batch, stage, float(begin), float(end)))
