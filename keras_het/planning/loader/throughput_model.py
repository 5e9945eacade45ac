"""A-Dloader: a job's steps/s with n loaders, and the division of a host among its jobs."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

SHARPNESS = 4.0
"""Exponent of the smooth minimum: 16 % below supply and demand if they are equal, 1.5 % below
the smaller if the other is twice as large."""


@dataclasses.dataclass(frozen=True)
class JobModel:
    """Steps/s of a job as a function of its number of loaders.

    n loaders supply batches at S(n) = 1 / (L / n + R), bounded by C: S(n) <= cpus / C. The device
    takes 1 / T. Together they give X(n) = (S^-g + T^g)^(-1/g) with g = 4.

    Args:
        loader_seconds: L, time of a single loader for a batch, in seconds.
        device_seconds: T, time of a step with its batch at hand, in seconds.
        cpu_seconds: C, CPU time for a batch, in seconds.
        serial_seconds: R, time per batch that more loaders do not reduce, in seconds: the disk, the
            network, a serial stage.
        weight: weight of this job's throughput among others.

    Reference:
        Jia et al. (A-Dloader), IEEE CLOUD 2022, https://doi.org/10.1109/CLOUD55607.2022.00068
    """

    loader_seconds: float
    device_seconds: float
    cpu_seconds: float = 0.0
    serial_seconds: float = 0.0
    weight: float = 1.0

    def supply(self, loaders: float, cpus: float = math.inf) -> float:
        """Return the batches/s of n loaders with this many CPUs, S(n)."""
        seconds = self.loader_seconds / max(loaders, 1e-9) + self.serial_seconds
        seconds = max(seconds, self.cpu_seconds / cpus, 1e-9)
        return 1.0 / seconds

    def throughput(self, loaders: float, cpus: float = math.inf) -> float:
        """Return the steps/s with n loaders, X(n)."""
        slower, faster = sorted((self.supply(loaders, cpus), 1.0 / max(self.device_seconds, 1e-9)))
        return float(slower * (1.0 + (slower / faster) ** SHARPNESS) ** (-1.0 / SHARPNESS))

    @property
    def cpus_per_loader(self) -> float:
        """CPUs that one busy loader uses, from 0 (it only waits) to 1."""
        if self.loader_seconds <= 0:
            return 1.0
        return min(self.cpu_seconds / self.loader_seconds, 1.0)

    def enough_loaders(self, most: int, cpus: float = math.inf, gain: float = 0.02) -> int:
        """Return the number of loaders from which a quarter more gains less than `gain`.

        Args:
            most: largest possible number, the upper limit of the result.
            cpus: CPUs that the loaders may use.
            gain: relative throughput that justifies a quarter more.
        """
        loaders = 1
        while loaders < most:
            more = min(max(loaders + 1, math.ceil(loaders * 1.25)), most)
            if self.throughput(more, cpus) < (1.0 + gain) * self.throughput(loaders, cpus):
                break
            loaders = more
        return loaders


class ThroughputModel:
    """Fit of a `JobModel` to measurements while the job runs.

    Steps take 1 / X = L / n + R while the device waits: windows with a wait give points of that
    line, the latest of which are kept. A single number of loaders gives L with R = 0; two or more
    give both by least squares with L, R >= 0.

    Args:
        memory: how many numbers of loaders are kept.
    """

    def __init__(self, memory: int = 6) -> None:
        # The latest step time for each number of loaders, the oldest number first.
        self._points: dict[int, float] = {}
        self._memory = memory
        self._device_seconds = 0.0
        self._cpu_seconds = 0.0

    def observe(
        self,
        loaders: int,
        steps_per_second: float,
        idle_fraction: float,
        device_seconds: float,
        cpu_seconds: float | None,
    ) -> None:
        """Record one window.

        Args:
            loaders: loaders in effect, n.
            steps_per_second: throughput, X.
            idle_fraction: fraction of the time in which the device waited.
            device_seconds: time of a step without the wait.
            cpu_seconds: CPU time of the loaders for a batch, None if unknown.
        """
        self._device_seconds = device_seconds
        if cpu_seconds is not None:
            self._cpu_seconds = cpu_seconds
        # If waits are short, throughput says more about the device than about the loaders; it is
        # better than nothing.
        if idle_fraction > (0.1 if self._points else 0.03):
            before = self._points.pop(loaders, 1.0 / steps_per_second)
            self._points[loaders] = (before + 1.0 / steps_per_second) / 2
            while len(self._points) > self._memory:
                del self._points[next(iter(self._points))]

    def forget(self) -> None:
        """Drop all points, because the job has changed."""
        self._points.clear()

    @property
    def is_fitted(self) -> bool:
        """Whether the device has waited since the start, or since the last change."""
        return bool(self._points)

    @property
    def has_line(self) -> bool:
        """Whether two or more numbers of loaders were measured while the device waited."""
        return len(self._points) > 1

    @property
    def job(self) -> JobModel:
        """Return the current model; without a point, one loader is assumed to be enough."""
        loader, serial = self._line()
        return JobModel(
            loader_seconds=max(loader, 1e-9),
            device_seconds=self._device_seconds,
            cpu_seconds=self._cpu_seconds,
            serial_seconds=serial,
        )

    def _line(self) -> tuple[float, float]:
        if not self._points:
            return self._device_seconds, 0.0
        inverse = np.array([1.0 / loaders for loaders in self._points])
        seconds = np.array(list(self._points.values()))
        flat = float(seconds.mean())
        through_origin = float((inverse * seconds).sum() / (inverse**2).sum())
        if not self.has_line:
            return through_origin, 0.0
        slope, offset = np.polyfit(inverse, seconds, 1)
        if slope <= 0:
            return 1e-9, flat
        return (float(slope), float(offset)) if offset > 0 else (through_origin, 0.0)


def allocate_loaders(
    jobs: Sequence[JobModel], cpus: float, max_loaders: int = 128, min_gain: float = 0.002
) -> tuple[int, ...]:
    """Assign loaders to jobs one at a time, each to the job that gains most.

    Each job j gets one. The next goes to the job with the largest gain of its weighted, normalized
    throughput, w_j [X_j(n + 1) - X_j(n)] / X_j^max, per CPU that it takes, while sum_j n_j u_j <=
    cpus, with u_j = C_j / L_j the CPU use of a busy loader of the job. X_j is concave, so for jobs
    with equal u_j the result is optimal. Loaders that only wait for I/O use no CPU and are bounded
    by their gain alone. CPUs from which no job gains stay idle.

    Args:
        jobs: the model of each job.
        cpus: number of the host's CPUs that loaders may use.
        max_loaders: largest number of loaders of one job.
        min_gain: smallest relative gain that justifies a further loader.

    Returns:
        The number of loaders of each job, at least 1.

    Raises:
        ValueError: if there is no CPU.

    Reference:
        Jia et al. (A-Dloader), IEEE CLOUD 2022, https://doi.org/10.1109/CLOUD55607.2022.00068
    """
    if not cpus > 0:
        raise ValueError(f"There must be CPUs to divide. Received: cpus={cpus}.")
    loaders = [1] * len(jobs)
    used = sum(job.cpus_per_loader for job in jobs)
    queue = [_entry(index, job, 1) for index, job in enumerate(jobs)]
    heapq.heapify(queue)
    while queue:
        _, gain, index = heapq.heappop(queue)
        job = jobs[index]
        too_many = used + job.cpus_per_loader > cpus * (1 + 1e-9)
        if gain < min_gain * job.weight or loaders[index] >= max_loaders or too_many:
            continue  # done: the next loader of a concave job gains even less
        loaders[index] += 1
        used += job.cpus_per_loader
        heapq.heappush(queue, _entry(index, job, loaders[index]))
    return tuple(loaders)


def _entry(index: int, job: JobModel, loaders: int) -> tuple[float, float, int]:
    """Return the heap entry of a job's next loader: the largest gain per CPU comes first."""
    most = job.throughput(1e9)
    gain = job.weight * (job.throughput(loaders + 1) - job.throughput(loaders)) / most
    return -gain / max(job.cpus_per_loader, 1e-3), gain, index


def allocate_readers(needs: Sequence[float], threads: int) -> tuple[int, ...]:
    """Assign reading threads to jobs one at a time, each to the job that gains most.

    Job j needs r_j threads to keep its device from waiting; with n_j of them the device works a
    fraction f(n_j / r_j) of the time, f(u) = (u^-4 + 1)^(-1/4). The division is optimal for

        max sum_j r_j f(n_j / r_j)  with  sum_j n_j <= threads, n_j >= 1.

    A job's gain is weighted by its device's need, and if the threads do not suffice, all devices
    work the same fraction of the time: a device that takes twice the samples gets twice the
    threads. All threads are assigned.

    Args:
        needs: number of threads that each job needs, r_j; above 0.
        threads: number of threads of all jobs together.

    Returns:
        The number of threads of each job, at least 1.

    Raises:
        ValueError: if there is no thread, or a job needs none.

    Reference:
        Jia et al. (A-Dloader), IEEE CLOUD 2022, https://doi.org/10.1109/CLOUD55607.2022.00068
    """
    if threads < 1 or not all(need > 0 for need in needs):
        raise ValueError(
            "There must be threads, and jobs that need them. Received: "
            f"threads={threads}, needs={list(needs)}."
        )
    # A thread takes a unit of the budget like a computing loader takes a CPU. A step takes as long
    # as `need` threads take to read its batch.
    jobs = [
        JobModel(loader_seconds=need, device_seconds=1.0, cpu_seconds=need, weight=need)
        for need in needs
    ]
    return allocate_loaders(jobs, float(threads), max_loaders=threads, min_gain=0.0)
