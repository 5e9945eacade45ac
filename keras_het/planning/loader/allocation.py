"""Divides a host's CPUs among the loaders of its jobs by marginal gain."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from keras_het.planning.loader.throughput_model import JobModel


def allocate_loaders(
    jobs: Sequence[JobModel], cpus: float, max_loaders: int = 128, min_gain: float = 0.002
) -> tuple[int, ...]:
    """Gives loaders to jobs, one after the other to whom it helps most.

    Each job j gets one. The next goes to the job with the largest gain of its weighted, normalised
    throughput, w_j [X_j(n + 1) - X_j(n)] / X_j^max, for each CPU that it takes, as long as
    sum_j n_j u_j <= cpus, where u_j = C_j / L_j is what a busy loader of the job uses. X_j is
    concave, so for jobs with equal u_j the result is the best there is. Loaders that only wait for
    I/O use no CPU and are bounded by their gain alone. What nobody gains from stays idle.

    Args:
        jobs: model of each job.
        cpus: CPUs of the host that loaders may use.
        max_loaders: most loaders of one job.
        min_gain: relative gain from which a further loader is given.

    Returns:
        Loaders of each job, at least 1.

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
            continue  # this job is done: the next loader of a concave job gives less still
        loaders[index] += 1
        used += job.cpus_per_loader
        heapq.heappush(queue, _entry(index, job, loaders[index]))
    return tuple(loaders)


def _entry(index: int, job: JobModel, loaders: int) -> tuple[float, float, int]:
    """Heap entry of a job's next loader: the largest gain for a CPU comes first."""
    most = job.throughput(1e9)
    gain = job.weight * (job.throughput(loaders + 1) - job.throughput(loaders)) / most
    return -gain / max(job.cpus_per_loader, 1e-3), gain, index


def allocate_readers(needs: Sequence[float], threads: int) -> tuple[int, ...]:
    """Gives reading threads to jobs, one after the other to whom it helps most.

    Job j would need r_j threads for its device not to wait; with n_j of them the device works a
    part f(n_j / r_j) of the time, f(u) = (u^-4 + 1)^(-1/4). The division is the best there is for

        max sum_j r_j f(n_j / r_j)  with  sum_j n_j <= threads, n_j >= 1.

    What a job gains counts by what its device needs, and all devices work the same part of the
    time where the threads do not suffice: a device that takes twice the samples gets twice the
    threads. All threads are given.

    Args:
        needs: threads that each job needs, r_j; above 0.
        threads: threads of all jobs together.

    Returns:
        Threads of each job, at least 1.

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
    # A thread takes a place of the budget as a loader that computes takes a CPU. A step is as long
    # as `need` threads take to read its batch.
    jobs = [
        JobModel(loader_seconds=need, device_seconds=1.0, cpu_seconds=need, weight=need)
        for need in needs
    ]
    return allocate_loaders(jobs, float(threads), max_loaders=threads, min_gain=0.0)
