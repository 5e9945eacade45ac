"""Divides the reading threads of a host among its jobs by marginal gain."""

from __future__ import annotations

from collections.abc import Sequence

from keras_het.planning.loader.allocation import allocate_loaders
from keras_het.planning.loader.throughput_model import JobModel


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
