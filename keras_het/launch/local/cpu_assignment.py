"""Assignment of CPUs and numbers of threads to local workers."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from keras_het.usable_cpus import own_cpus


@dataclass(frozen=True)
class CpuAssignment:
    """CPUs of each worker."""

    cpu_sets: tuple[tuple[int, ...], ...] | None
    threads_per_worker: tuple[int, ...]


def available_cpus() -> tuple[int, ...]:
    """Return the ids of the CPUs that this process may use."""
    return tuple(sorted(own_cpus()))


def assign_cpus(
    num_workers: int,
    cpus: Sequence[int],
    cpus_per_worker: int | None = None,
    pin: bool | None = None,
    usable: float = math.inf,
) -> CpuAssignment:
    """Assign the CPUs to the workers round robin.

    Without `cpus_per_worker` every CPU goes to exactly one worker, or, if there are more workers
    than CPUs, worker `i` gets CPU `i` modulo their number. With it, each worker gets that many, and
    CPUs are shared once all are assigned. A quota below the number of CPUs is divided too, into
    threads: the system would only throttle more.
    """
    if cpus_per_worker is not None and not 1 <= cpus_per_worker <= len(cpus):
        raise ValueError(
            "Each worker needs at least one CPU and at most all of them. Received: "
            f"cpus_per_worker={cpus_per_worker}; expected 1 to {len(cpus)}."
        )
    can_pin = hasattr(os, "sched_setaffinity")
    if pin and not can_pin:
        raise ValueError(
            "This operating system cannot bind processes to CPUs. Received: pin=True. Leave it out."
        )
    sets = tuple(
        _cpus_of(worker, num_workers, cpus, cpus_per_worker) for worker in range(num_workers)
    )
    if pin is None:
        pin = can_pin and sum(len(own) for own in sets) <= len(cpus)
    threads = [len(own) for own in sets]
    if cpus_per_worker is None and usable < len(cpus):
        most = max(1, math.floor(usable / num_workers))
        threads = [min(number, most) for number in threads]
    return CpuAssignment(sets if pin else None, tuple(threads))


def _cpus_of(
    worker: int, num_workers: int, cpus: Sequence[int], cpus_per_worker: int | None
) -> tuple[int, ...]:
    if cpus_per_worker is None:
        return tuple(cpus[worker::num_workers]) or (cpus[worker % len(cpus)],)
    first = worker * cpus_per_worker
    return tuple(cpus[(first + offset) % len(cpus)] for offset in range(cpus_per_worker))
