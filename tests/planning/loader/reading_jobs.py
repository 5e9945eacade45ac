"""Simulated jobs that read from one disk, each with a controller, on one clock."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from keras_het.planning.loader import (
    LoaderPlan,
    LoaderWindow,
    ReadingJob,
    StepSums,
    TunerController,
    allocate_readers,
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

    def __post_init__(self):
        self.controller = TunerController(START, 16.0)
        self.clock, self.log = 0.0, []
        self.reading, self.need, self.written = ReadingJob(), None, -math.inf
        self.sums = StepSums(self.controller.next_window)

    @property
    def loaders(self):
        return self.controller.plan.loaders

    def rate(self, congestion):
        seconds = self.wait_seconds + self.cpu_seconds + self.disk_seconds * congestion
        return min(self.loaders / seconds, 1.0 / self.device_seconds)


@dataclasses.dataclass
class Host:
    """A disk that gives its time to the reads that wait, each thread the same.

    Args:
        jobs: the jobs.
        max_reader_threads: threads of all of them together.
        noise: of each step.
    """

    jobs: list[Job]
    max_reader_threads: int
    noise: float = 0.0

    def __post_init__(self):
        self.random = np.random.default_rng(0)
        self.parts = []
        self.known = {}

    def congestion(self):
        """By how much a read takes longer than alone, so that the disk is busy at most all time."""
        key = tuple(job.loaders for job in self.jobs)
        if key not in self.known:
            low, high = 1.0, 1e6
            for _ in range(60):
                middle = math.sqrt(low * high)
                busy = sum(job.rate(middle) * job.disk_seconds for job in self.jobs)
                low, high = (middle, high) if busy > 1.0 else (low, middle)
            self.known[key] = high
        return self.known[key]

    def run(self, until):
        """Trains all jobs up to a time."""
        while True:
            job = min(self.jobs, key=lambda each: each.clock)
            if job.clock >= until:
                break
            self.step(job)

    def step(self, job):
        noise = float(np.exp(self.noise * self.random.standard_normal()))
        seconds = max(1.0 / (job.rate(self.congestion()) * noise), job.device_seconds)
        job.clock += seconds
        job.log.append((job.clock, job.loaders))
        if job.sums.add(seconds, seconds - job.device_seconds):
            self.decide(job)

    def decide(self, job):
        sums = job.sums
        # a thread that computes alone keeps a CPU busy
        cpu = job.cpu_seconds * sums.steps
        idle = max(16.0 - cpu / sums.seconds, 0.0)
        numbers = sums.steps, sums.seconds, sums.input_wait_seconds
        window = LoaderWindow(*numbers, idle, cpu, 1_000, sums.waiting_steps, 0.0)
        need = job.reading.observe(job.loaders, window, job.clock)
        if job.clock - job.written >= SECONDS_BETWEEN_UPDATES:
            job.need, job.written = need, job.clock
            self.divide(job)
        if job.controller.observe(window) is not None:
            job.clock += 0.02
        job.sums.begin(job.controller.next_window)

    def divide(self, job):
        reading = [each for each in self.jobs if each.need and job.clock <= each.need.until]
        found = allocate_readers([each.need.threads for each in reading], self.max_reader_threads)
        parts = {each.name: part for each, part in zip(reading, found, strict=True)}
        job.controller.set_reading_loaders(parts.get(job.name))
        self.parts.append((job.clock, parts))


def throughput(job, start, end):
    """Steps/s of a job between two times."""
    return sum(start < when <= end for when, _ in job.log) / (end - start)
