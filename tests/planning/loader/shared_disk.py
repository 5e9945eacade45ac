"""Simulated jobs that read from one disk, each with a controller, on one clock."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from keras_het.planning.loader import (
    LoaderPlan,
    LoaderWindow,
    Reading,
    ReadingCeiling,
    ReadingJob,
    StepSums,
    TunerController,
)

START = LoaderPlan(2, 2)
SECONDS_BETWEEN_UPDATES = 1.0


@dataclasses.dataclass
class Job:
    """What a batch costs: time of the disk, other waiting, CPU time; and the device's part."""

    name: str
    disk_seconds: float
    wait_seconds: float
    device_seconds: float
    cpu_seconds: float = 0.0005
    starts: float = 0.0
    ends: float = math.inf
    disk: str = "disk"
    controller: Any = None

    def __post_init__(self):
        if self.controller is None:
            self.controller = TunerController(START, 16.0)
        self.clock, self.steps, self.plans, self.log = self.starts, 0, [], []
        self.reading = ReadingJob()
        self.sums = StepSums(self.controller.next_window)
        self.began, self.number, self.written = self.starts, -1, -math.inf
        self.known, self.known_number = None, -1

    @property
    def loaders(self):
        return self.controller.plan.loaders

    def rate(self, congestion):
        seconds = self.wait_seconds + self.cpu_seconds + self.disk_seconds * congestion
        return min(self.loaders / seconds, 1.0 / self.device_seconds)


@dataclasses.dataclass
class Host:
    """Disks that give their time to reads that wait, each thread the same, and lose some of it to
    too many of them.

    Args:
        jobs: the jobs.
        shares: whether they share the host by a `ReadingCeiling`.
        best_threads: reads at once from which a disk becomes slower, by `loss` for as many more.
        noise: of each step.
        given: ceiling that somebody set.
    """

    jobs: list[Job]
    shares: bool = True
    best_threads: int = 10**9
    loss: float = 0.0
    noise: float = 0.0
    seed: int = 0
    given: int | None = None
    speed: float = 1.0

    def __post_init__(self):
        self.ceiling = ReadingCeiling()
        self.random = np.random.default_rng(self.seed)
        self.now = 0.0
        self.ceilings = []
        self.known = {}

    def running(self):
        return [job for job in self.jobs if job.starts <= self.now < job.ends]

    def rates(self):
        """Steps/s of all jobs that run, by name."""
        rates = {}
        running = self.running()
        for disk in {job.disk for job in running}:
            jobs = [job for job in running if job.disk == disk]
            rates |= {job.name: job.rate(self.congestion(jobs)) for job in jobs}
        return rates

    def congestion(self, jobs):
        """By how much a read takes longer than alone, so that a disk is busy at most all time."""
        key = self.speed, *((job.name, job.loaders) for job in jobs)
        if key not in self.known:
            self.known[key] = self.find_congestion(jobs)
        return self.known[key]

    def find_congestion(self, jobs):
        reads = sum(job.loaders for job in jobs)
        slower = 1.0 + self.loss * max(reads / self.best_threads - 1.0, 0.0)
        low, high = 1.0 / self.speed, 1e6
        for _ in range(60):
            middle = math.sqrt(low * high)
            busy = sum(job.rate(middle) * job.disk_seconds for job in jobs) * slower / self.speed
            low, high = (middle, high) if busy > 1.0 else (low, middle)
        return high

    def run(self, until):
        """Trains all jobs up to a time."""
        while True:
            jobs = [job for job in self.jobs if job.clock < min(until, job.ends)]
            if not jobs:
                break
            job = min(jobs, key=lambda each: each.clock)
            self.now = job.clock
            self.step(job)
        self.now = until

    def step(self, job):
        rate = self.rates()[job.name] * float(np.exp(self.noise * self.random.standard_normal()))
        seconds = max(1.0 / rate, job.device_seconds)
        wait = seconds - job.device_seconds
        job.clock += seconds
        job.steps += 1
        job.log.append((job.clock, seconds, job.loaders))
        if job.sums.add(seconds, wait):
            self.decide(job)

    def decide(self, job):
        sums = job.sums
        # a thread that computes alone keeps a CPU busy
        cpu = job.cpu_seconds * sums.steps
        idle = max(16.0 - cpu / sums.seconds, 0.0)
        window = LoaderWindow(
            sums.steps,
            sums.seconds,
            sums.input_wait_seconds,
            idle,
            cpu,
            1_000,
            sums.waiting_steps,
            0.0,
        )
        if self.shares:
            self.share(job, window)
        plan = job.controller.observe(window)
        if plan is not None:
            job.plans.append((job.clock, plan))
            job.clock += 0.02
        job.sums.begin(job.controller.next_window)
        job.began, job.number = job.clock, job.known_number

    def share(self, job, window):
        job.reading.observe(job.loaders, window)
        if job.clock - job.written < SECONDS_BETWEEN_UPDATES:
            return
        job.written = job.clock
        job.known = None
        if job.reading.reads:
            job.known = Reading(
                job.loaders,
                window.steps,
                window.seconds,
                window.idle_fraction,
                job.began,
                job.clock,
                job.number,
            )
        self.now = job.clock
        readings = {each.name: each.known for each in self.running() if each.known is not None}
        # a job whose state goes through the file, each time
        self.ceiling = ReadingCeiling.from_dict(self.ceiling.to_dict())
        self.ceiling.update(job.name, readings, job.clock, self.given)
        job.controller.set_reading_loaders(self.ceiling.parts.get(job.name))
        job.known_number = self.ceiling.number
        self.ceilings.append((job.clock, self.ceiling.threads, dict(self.ceiling.parts)))


def throughput(job, start, end):
    """Steps/s of a job between two times."""
    return sum(start < when <= end for when, _, _ in job.log) / (end - start)


def mean_loaders(job, start, end):
    """Loaders of a job between two times, on average over its steps."""
    found = [(seconds, loaders) for when, seconds, loaders in job.log if start < when <= end]
    return sum(s * n for s, n in found) / sum(s for s, _ in found)
