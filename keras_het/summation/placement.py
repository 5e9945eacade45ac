"""Cut a vector into messages and assign each to the machine that sums it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from keras_het.planning import SummationPlan, apportion, plan_summation

_FIRST_PARTS = 4
"""How many times smaller the first messages to a machine are, see `cut`."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The machine (workers first) that sums each partition of a vector, and their order."""

    # `waits`: whose sums must be back before a partition is sent. Bytes of the plan are elements.

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    plan: SummationPlan


def place_partitions(
    num_elements: int,
    worker_rates: Sequence[float],
    spare_rates: Sequence[float],
    largest_partition: int,
    workers_sum: bool = True,
    in_flight: int = 1,
) -> Placement:
    """Cut a vector so that every machine sums exactly what `plan_summation` assigns to it."""
    # At any position all machines are equally far through their partitions: every link is busy from
    # the front layers to the last. `in_flight`: to the machine that sums the most.
    plan = plan_summation(num_elements, worker_rates, spare_rates)
    if not workers_sum:
        plan = dataclasses.replace(
            plan,
            worker_bytes=(0,) * len(worker_rates),
            spare_bytes=apportion(num_elements, spare_rates),
        )
    flights = share_in_flight(plan.machine_bytes, in_flight)
    ordered: list[tuple[Fraction, int, int]] = []
    for machine, elements in enumerate(plan.machine_bytes):
        start = 0
        for size in cut(elements, largest_partition, flights[machine]):
            ordered.append((Fraction(2 * start + size, 2 * elements), machine, size))
            start += size
    ordered.sort()
    sizes = tuple(size for _, _, size in ordered)
    owners = tuple(machine for _, machine, _ in ordered)
    return Placement(sizes, owners, _waits(sizes, owners, len(flights), flights), plan)


def cut(elements: int, largest: int, num_first: int) -> list[int]:
    """Cut a machine's part of the vector into messages, smaller ones first."""
    # Those in flight together arrive together: its link would be idle during large first ones.
    first = [largest // _FIRST_PARTS] * num_first
    if not all(first) or elements < sum(first) + largest:
        first = []
    rest = elements - sum(first)
    count = -(-rest // largest)
    return first + [rest * (i + 1) // count - rest * i // count for i in range(count)]


def share_in_flight(machine_bytes: Sequence[int], most: int) -> tuple[int, ...]:
    r"""Share messages in flight among machines, :math:`\max(1, F x_m / \max_j x_j)`."""
    # Messages that share a link get equal parts of it; so all machines finish at the same time.
    largest = max(machine_bytes)
    return tuple(max(1, round(most * own / largest)) for own in machine_bytes)


def _waits(
    sizes: Sequence[int], owners: Sequence[int], num_machines: int, flights: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each partition, those that must be back before it is sent."""
    # Of its own machine, the partition F before it, which keeps F in flight. Of another machine m,
    # which sums x_m elements, the last that ends a window F_m max(s_p of m) / x_m before this one's
    # start: connections share links regardless of how much each still has to carry.
    through = [_Progress() for _ in range(num_machines)]
    for number, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        through[owner].add(number, size)
    sent = [0] * num_machines
    waits = []
    for owner in owners:
        own = through[owner]
        place = sent[owner]
        sent[owner] += 1
        found = [own.numbers[place - flights[owner]]] if place >= flights[owner] else []
        start = Fraction(own.starts[place], own.elements)
        for machine, other in enumerate(through):
            if machine != owner and other.numbers:
                found += other.last_before(start, flights[machine])
        waits.append(tuple(sorted(found)))
    return tuple(waits)


class _Progress:
    """A machine's progress after each of its partitions."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.starts: list[int] = []
        self.elements = 0
        self._largest = 0

    def add(self, number: int, size: int) -> None:
        self.numbers.append(number)
        self.starts.append(self.elements)
        self.elements += size
        self._largest = max(self._largest, size)

    def last_before(self, part: Fraction, flight: int) -> list[int]:
        """Return the last partition that ends a window before a fraction of the total, if any."""
        end = part * self.elements - flight * self._largest
        ended = bisect.bisect_right([*self.starts[1:], self.elements], end)
        return self.numbers[:ended][-1:]
