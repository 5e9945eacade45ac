"""Divide a host's CPUs by marginal gain, and its reading threads by need, among its jobs."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from keras_het.planning.argument_checks import check_number
from keras_het.planning.loader.controller import LoaderWindow
from keras_het.planning.loader.throughput_model import JobModel

_WAITS = 0.1
"""Idle fraction above which all threads of a pipeline are busy or waiting."""
_HIGHEST_IDLE_FRACTION = 0.99
_AVERAGED_SECONDS = 4.0
"""Averaging time: each job's share of a disk fluctuates within seconds."""
_CHANGED = 1.25
"""Ratio above which a need counts as changed: each division costs handovers."""
_SHORTEST_SECONDS = 15.0
_SHORTEST_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Steps of the buffer, and of the window after it."""


@dataclasses.dataclass(frozen=True)
class ReadingNeed:
    """Announcement to the host's other jobs by a job whose loaders mostly wait for I/O.

    Args:
        threads: number of loaders with which its device would not wait, r; 1 or more.
        until: time after which it no longer counts as reading unless it announces again, in seconds
            of a clock that all jobs share.

    Raises:
        ValueError: if it needs no thread.
    """

    threads: float
    until: float

    def __post_init__(self) -> None:
        check_number("threads", self.threads, least=1)


class ReadingJob:
    """Whether a job's loaders mostly wait for I/O, from window to window, and its need.

    While the device waits, every loader is busy: time in which it neither computes nor waits for a
    CPU is I/O wait. While the device does not wait, loaders rest, and the earlier finding holds.

    While it waits, the device works a fraction 1 - idle = n / r of the time, so r = n / (1 - idle).
    """

    def __init__(self) -> None:
        self._reads = False
        self._work = 0.0
        self._told = 0.0

    def observe(self, loaders: int, window: LoaderWindow, now: float) -> ReadingNeed | None:
        """Take a window.

        Args:
            loaders: loaders in effect, n.
            window: the measurements.
            now: time, in seconds of a clock that all jobs share.

        Returns:
            The job's need, unchanged unless it differs by a quarter; None if its loaders do not
            mostly wait for I/O.
        """
        did_read, self._reads = self._reads, self._still_reads(loaders, window)
        if not self._reads:
            return None
        work = (1.0 - min(window.idle_fraction, _HIGHEST_IDLE_FRACTION)) / loaders
        weight = min(window.seconds / _AVERAGED_SECONDS, 1.0) if did_read else 1.0
        self._work += weight * (work - self._work)
        need = 1.0 / self._work
        if not did_read or not 1.0 / _CHANGED < need / self._told < _CHANGED:
            self._told = need
        return ReadingNeed(self._told, now + _seconds_until_the_next(loaders, window))

    def _still_reads(self, loaders: int, window: LoaderWindow) -> bool:
        if window.loader_cpu_seconds is None:
            return False  # nothing distinguishes reading from computing
        if window.idle_fraction <= _WAITS:
            return self._reads
        runs = window.loader_cpu_seconds + (window.loader_queue_seconds or 0.0)
        # Hysteresis: a borderline job keeps its classification.
        limit = 0.6 if self._reads else 0.5
        return runs < limit * loaders * window.seconds


def _seconds_until_the_next(loaders: int, window: LoaderWindow) -> float:
    """Return the time within which a reading job has another window: it may validate or save.

    A job in the middle of a move reads too, but has no window until its loaders' batches are used.
    """
    move = (2 * loaders + _OTHER_STEPS_OF_A_MOVE) * window.seconds / window.steps
    return max(_SHORTEST_SECONDS, _SHORTEST_IN_WINDOWS * window.seconds, 1.5 * move)


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
