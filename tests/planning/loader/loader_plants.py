"""Simulated input pipelines with known answers, one step after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from keras_het.planning.loader import LoaderPlan, LoaderWindow, StepSums


@dataclasses.dataclass(frozen=True)
class Work:
    """What a batch costs: waiting (parallel), CPU time, a serial part; and the device's part."""

    wait_seconds: float
    cpu_seconds: float
    device_seconds: float
    serial_seconds: float = 0.0
    burst: int = 1  # steps that the device takes at once before a pause of as many device times


START = LoaderPlan(2, 2)
STEPS = 900
BLOCKING_IO = Work(wait_seconds=0.080, cpu_seconds=0.002, device_seconds=0.0055)
BURSTY = Work(0.030, 0.0005, device_seconds=0.020, burst=8)
COMPUTING = Work(wait_seconds=0.0, cpu_seconds=0.009, device_seconds=0.002)
PERFECT = Work(wait_seconds=0.0, cpu_seconds=0.0005, device_seconds=0.010)


@dataclasses.dataclass
class Plant:
    """A loader of `work(step)` on `cpus` cores, of which neighbours take `neighbour_cpus`.

    Besides them `endless_threads` of others compute without end: the operating system gives all
    threads that want a CPU the same part of the CPUs, and nothing is ever idle.
    """

    work: Callable[[int], Work]
    cpus: float = 2.0
    neighbour_cpus: float = 0.0
    endless_threads: int = 0
    oversubscription: float = 0.25  # throughput lost with many more computing loaders than CPUs
    noise: float = 0.0
    batch_bytes: int = 1_000
    handover_seconds: float = 0.02
    seed: int = 0
    buffered: float = 0.0

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.step = 0
        self.peak_bytes = 0

    def supply(self, plan, work):
        """Batches/s; sets the seconds a batch computes and waits for a CPU."""
        if self.endless_threads:
            return self._supply_among_endless_threads(plan, work)
        alone = work.wait_seconds + work.cpu_seconds
        free = max(self.cpus - self.neighbour_cpus, 0.1)
        parallel = plan.loaders / alone if alone else math.inf
        by_cpu = free / work.cpu_seconds if work.cpu_seconds else math.inf
        computing = plan.loaders * work.cpu_seconds / alone if alone else 0.0
        if computing > free:
            by_cpu *= 1.0 - self.oversubscription * min(computing / free - 1.0, 4.0) / 4.0
        by_serial = 1.0 / work.serial_seconds if work.serial_seconds else math.inf
        # threads that hinder each other keep the CPUs busy anyway
        self.cpu_seconds = max(work.cpu_seconds, free / by_cpu if by_cpu < math.inf else 0.0)
        found = min(parallel, by_cpu, by_serial)
        self.queue_seconds = 0.0
        if found == by_cpu < math.inf:
            self.queue_seconds = max(
                plan.loaders / by_cpu - work.wait_seconds - self.cpu_seconds, 0.0
            )
        return found

    def _supply_among_endless_threads(self, plan, work):
        slower, cpu = 1.0, work.cpu_seconds
        for _ in range(50):  # converges: more who want a CPU, each slower
            runs = cpu * slower
            wants = plan.loaders * runs / max(work.wait_seconds + runs, 1e-9)
            slower = (slower + max((wants + self.endless_threads) / self.cpus, 1.0)) / 2
        self.cpu_seconds, self.queue_seconds = cpu, cpu * (slower - 1.0)
        parallel = plan.loaders / max(work.wait_seconds + cpu * slower, 1e-9)
        return min(parallel, 1.0 / work.serial_seconds if work.serial_seconds else math.inf)

    def one_step(self, plan):
        """Returns seconds, input wait, CPU seconds and seconds waiting for a CPU of one step."""
        work = self.work(self.step)
        factor = float(np.exp(self.noise * self.random.standard_normal()))
        rate = self.supply(plan, work) * factor
        self.peak_bytes = max(self.peak_bytes, (plan.prefetch + plan.loaders) * self.batch_bytes)
        device = work.device_seconds
        if work.burst > 1:
            device *= work.burst if self.step % work.burst == 0 else 0.0
        room = max(plan.prefetch - self.buffered, 0.0)
        self.buffered += min(rate * device, room)
        wait = max(1.0 - self.buffered, 0.0) / rate
        self.buffered = max(self.buffered - 1.0, 0.0)
        self.step += 1
        return device + wait, wait, self.cpu_seconds, self.queue_seconds

    def idle_cpus(self, seconds, cpu_seconds):
        if self.endless_threads:
            return 0.0
        used = cpu_seconds / max(seconds, 1e-9) + self.neighbour_cpus
        return max(self.cpus - used, 0.0)


@dataclasses.dataclass
class Outcome:
    steps_per_second: float
    plans: list[tuple[float, LoaderPlan]]
    idle_fraction_at_end: float
    seconds: float


def drive(plant, controller, steps, knows_cpu=True):
    """Trains `steps` steps; returns what happened, moves included in the time."""
    sums = StepSums(controller.next_window)
    now = waited = cpu = queue = 0.0
    tail = []
    plans = []
    for _ in range(steps):
        seconds, wait, cpu_seconds, queue_seconds = plant.one_step(controller.plan)
        now += seconds
        waited += wait
        tail.append((seconds, wait))
        counts = not sums.is_skipping
        full = sums.add(seconds, wait)
        cpu = cpu + cpu_seconds if counts else 0.0
        queue = queue + queue_seconds if counts else 0.0
        if not full:
            continue
        window = LoaderWindow(
            sums.steps,
            sums.seconds,
            sums.input_wait_seconds,
            plant.idle_cpus(sums.seconds, cpu),
            cpu if knows_cpu else None,
            plant.batch_bytes,
            sums.waiting_steps,
            queue if knows_cpu else None,
        )
        plan = controller.observe(window)
        if plan is not None:
            plans.append((now, plan))
            now += plant.handover_seconds
        sums.begin(controller.next_window)
        cpu = queue = 0.0
    last = tail[-max(steps // 5, 1) :]
    idle = sum(wait for _, wait in last) / sum(seconds for seconds, _ in last)
    return Outcome(steps / now, plans, idle, now)


def oracle(make_plant, make_fixed, steps):
    """Steps/s of the best fixed plan."""
    best = 0.0
    for loaders in (1, 2, 4, 8, 16, 32, 64):
        for prefetch in (2, 8, 32):
            controller = make_fixed(LoaderPlan(loaders, prefetch))
            best = max(best, drive(make_plant(), controller, steps).steps_per_second)
    return best
