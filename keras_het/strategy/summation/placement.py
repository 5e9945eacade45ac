"""Cuts a vector into messages and gives each to the machine that sums it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from keras_het.planning import SummationPlan, apportion, plan_summation


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where every partition of a vector is summed.

    Args:
        sizes: elements of each partition, in the order of the vector.
        owners: machine of each, workers first, then spare machines.
        in_flight: partitions that a worker has on their way to each machine at most.
        plan: what it was made from; its bytes are elements here.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    in_flight: tuple[int, ...]
    plan: SummationPlan


def place_partitions(
    num_elements: int,
    worker_rates: Sequence[float],
    spare_rates: Sequence[float],
    largest_partition: int,
    workers_sum: bool = True,
    in_flight: int = 1,
) -> Placement:
    """Cuts a vector so that every machine sums exactly what `plan_summation` gives it.

    A machine's elements are cut into equal partitions. They follow each other in the vector such
    that all machines are equally far through theirs at any place of it: every link is busy from the
    first partition (the front layers) to the last.

    Args:
        num_elements: elements of the vector, at least 1.
        worker_rates: rate of each worker's link.
        spare_rates: the same of each spare machine.
        largest_partition: elements of a partition at most.
        workers_sum: whether the workers' machines sum too, or the spare ones alone.
        in_flight: partitions on their way to the machine that sums most, see `share_in_flight`.
    """
    plan = plan_summation(num_elements, worker_rates, spare_rates)
    if not workers_sum:
        plan = dataclasses.replace(
            plan,
            worker_bytes=(0,) * len(worker_rates),
            spare_bytes=apportion(num_elements, spare_rates),
        )
    ordered: list[tuple[Fraction, int, int]] = []
    for machine, elements in enumerate(plan.machine_bytes):
        count = -(-elements // largest_partition)
        for index in range(count):
            size = elements * (index + 1) // count - elements * index // count
            ordered.append((Fraction(2 * index + 1, 2 * count), machine, size))
    ordered.sort()
    return Placement(
        sizes=tuple(size for _, _, size in ordered),
        owners=tuple(machine for _, machine, _ in ordered),
        in_flight=share_in_flight(plan.machine_bytes, in_flight),
        plan=plan,
    )


def share_in_flight(machine_bytes: Sequence[int], most: int) -> tuple[int, ...]:
    r"""How many messages to each machine may be under way, so that all are done together.

    .. math:: \max(1, F x_m / \max_j x_j)

    Messages that share a link get equal parts of it. Were as many under way to a machine that sums
    little as to one that sums much, the first would be done early, and the links of the second have
    too much left in the end.

    Args:
        machine_bytes: what each machine sums, x.
        most: messages under way to the machine that sums most, F.
    """
    largest = max(machine_bytes)
    return tuple(max(1, round(most * own / largest)) for own in machine_bytes)
