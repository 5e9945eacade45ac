"""Discrete-event simulation of a step: what every device does when, and how long it is idle."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
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


class _Replica:
    """A replica of a stage: what it has done, and the passes that are left, the next one last."""

    def __init__(self, profile: ModelProfile, plan: PipelinePlan, position: int, number: int):
        stage = plan.stages[position]
        self.position, self.device = position, stage.devices[number]
        self.left = list(stage_order(plan.stages, position, number, plan.schedule))[::-1]
        forward, backward = profile.columns[self.device]
        units = slice(stage.first, stage.end)
        self.seconds = {"forward": sum(forward[units]), "backward": sum(backward[units])}
        self.again = sum([forward[unit] for unit in stage.recomputed])
        self.recomputes = bool(stage.recomputed)
        self.free = 0.0
        self.events: list[Event] = []

    def add(self, kind: str, micro_batch: int, begin: float, end: float) -> None:
        self.events.append(Event(kind, micro_batch, self.position, begin, end))


class _Simulation:
    def __init__(self, profile: ModelProfile, devices: Devices, plan: PipelinePlan) -> None:
        self._profile, self._devices, self._plan = profile, devices, plan
        self._replicas = [
            [_Replica(profile, plan, position, number) for number in range(len(stage.devices))]
            for position, stage in enumerate(plan.stages)
        ]
        # When the tensors that a pass waits for are there; forward passes of the first stage wait
        # for nothing, nor do backward passes of the last one.
        last = len(plan.stages) - 1
        starts = {"forward": 0, "backward": last}
        self._arrived: dict[str, list[list[float | None]]] = {
            kind: [[0.0 if s == start else None] * plan.num_micro_batches for s in range(last + 1)]
            for kind, start in starts.items()
        }
        self._passes_left = [2 * plan.num_micro_batches for _ in plan.stages]
        self._link_free: dict[Link, float] = {}
        self._ways: dict[tuple[int, int], tuple[float, Link]] = {}
        # Passes by their end, then in the order in which they began.
        self._queue: list[tuple[float, int, _Replica, str, int]] = []
        self._numbers = itertools.count()

    def run(self) -> Timeline:
        for replica in itertools.chain(*self._replicas):
            self._start(replica)
        while self._queue:
            now, _, replica, kind, micro_batch = heapq.heappop(self._queue)
            self._end_of_pass(now, replica, kind, micro_batch)
        if any(self._passes_left):
            raise ValueError(
                "The stages wait for each other. Received: "
                f"ahead={[stage.ahead for stage in self._plan.stages]}. "
                "Let `ahead` decrease from stage to stage, or leave it out."
            )
        events: list[tuple[Event, ...]] = [()] * self._devices.num_devices
        for replica in itertools.chain(*self._replicas):
            events[replica.device] = tuple(sorted(replica.events, key=lambda e: (e.begin, e.end)))
        return Timeline(tuple(events), max(event.end for each in events for event in each))

    def _start(self, replica: _Replica) -> None:
        """Start the next pass of a replica if what it needs is there."""
        if not replica.left:
            return
        kind, micro_batch = replica.left[-1]
        arrived = self._arrived[kind][replica.position][micro_batch]
        if arrived is None:
            return
        replica.left.pop()
        begin = replica.free
        if kind == "backward" and replica.recomputes:
            replica.add("recompute", micro_batch, begin, begin + replica.again)
            begin += replica.again
        begin = max(begin, arrived)
        end = replica.free = begin + replica.seconds[kind]
        replica.add(kind, micro_batch, begin, end)
        heapq.heappush(self._queue, (end, next(self._numbers), replica, kind, micro_batch))

    def _end_of_pass(self, now: float, replica: _Replica, kind: str, micro_batch: int) -> None:
        position = replica.position
        self._passes_left[position] -= 1
        to = position + (1 if kind == "forward" else -1)
        if 0 <= to < len(self._replicas):
            taker = self._replicas[to][self._plan.stages[to].routes[micro_batch]]
            self._arrived[kind][to][micro_batch] = self._transfer(
                now, replica, taker, kind, micro_batch
            )
            self._start(taker)
        if not self._passes_left[position] and len(self._replicas[position]) > 1:
            self._all_reduce(now, position)
        self._start(replica)

    def _transfer(
        self, now: float, sender: _Replica, taker: _Replica, kind: str, micro_batch: int
    ) -> float:
        """Return when the tensors of a pass are where they are taken."""
        pair = sender.device, taker.device
        if pair not in self._ways:
            size = self._profile.cut_bytes if kind == "forward" else self._profile.gradient_bytes
            cut = self._plan.stages[max(sender.position, taker.position)].first
            seconds = self._devices.transfer_seconds(*pair, float(size[cut]))
            self._ways[pair] = seconds, self._devices.link(*pair)
        seconds, link = self._ways[pair]
        if not seconds:
            return now
        begin = max(now, self._link_free.get(link, 0.0))
        end = self._link_free[link] = begin + seconds
        sender.add("transfer", micro_batch, begin, end)
        return end

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
        for replica in self._replicas[position]:
            replica.add("all_reduce", -1, begin, begin + seconds)
