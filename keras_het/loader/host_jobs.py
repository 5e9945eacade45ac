"""Which jobs of a host compete for the same CPUs, and how they divide them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from keras_het.planning.loader import JobModel, Reading, allocate_loaders

logger = logging.getLogger("keras_het")

_FEWEST_CPUS = 0.1


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a job tells the others.

    Args:
        job: its model.
        cpus: CPUs that it may use, quotas included; above 0.
        cpu_set: ids of the CPUs that it may run on, at least one.
        reading: its latest window if its loaders mostly wait for I/O, None if they do not.
        io_budget: reading threads of all jobs of the host, None if its user gave none.

    Raises:
        ValueError: if it may use no CPU.
    """

    job: JobModel
    cpus: float
    cpu_set: frozenset[int]
    reading: Reading | None = None
    io_budget: int | None = None

    def __post_init__(self) -> None:
        if not (self.cpus > 0 and self.cpu_set):
            raise ValueError(f"A job must have CPUs. Received: {self.cpus} of {self.cpu_set}.")

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain Python values, for JSON."""
        return {
            "job": dataclasses.asdict(self.job),
            "cpus": self.cpus,
            "cpu_set": sorted(self.cpu_set),
            "reading": None if self.reading is None else dataclasses.asdict(self.reading),
            "io_budget": self.io_budget,
        }

    @property
    def quota(self) -> float:
        """What bounds its CPUs beside their number, infinity if nothing does."""
        return self.cpus if self.cpus < len(self.cpu_set) else math.inf


def entry_of(values: Any) -> Entry | None:
    """The entry that a job wrote, None if another version of this package wrote it otherwise.

    Args:
        values: what `Entry.to_dict` gave.
    """
    try:
        numbers = {name: float(value) for name, value in values["job"].items()}
        if not all(0.0 <= number < math.inf for number in numbers.values()):
            raise ValueError(f"numbers of 0 or more were expected, received: {numbers}")
        cpu_set = frozenset(map(int, values["cpu_set"]))
        reading, io_budget = values["reading"], values["io_budget"]
        return Entry(
            JobModel(**numbers),
            float(values["cpus"]),
            cpu_set,
            None if reading is None else Reading(**reading),
            None if io_budget is None else int(io_budget),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        logger.debug("An entry of another job cannot be read (%r): %r", error, values)
        return None


def part_of(name: str, entries: Mapping[str, Entry]) -> tuple[float, int]:
    """A job's part of the CPUs for which it competes.

    Jobs compete if their sets of CPUs overlap, or each overlaps that of a third. All of them divide
    the CPUs of all their sets, at most their quota, by marginal gain; what nobody gains from is
    divided evenly. All compute the same.

    Args:
        name: the job.
        entries: all jobs of the host, by name.

    Returns:
        CPUs for its loaders, at most those that it may use; number of jobs that compete.
    """
    names = sorted(_competitors(name, entries))
    own = entries[name]
    if len(names) == 1:
        return own.cpus, 1
    return _parts({each: entries[each] for each in names})[name], len(names)


def _parts(rivals: dict[str, Entry]) -> dict[str, float]:
    all_cpus = len(frozenset().union(*(entry.cpu_set for entry in rivals.values())))
    total = min(all_cpus, max(entry.quota for entry in rivals.values()))
    parts: dict[str, float] = {}
    while rivals:
        division = _division([entry.job for entry in rivals.values()], total)
        found = dict(zip(rivals, division, strict=True))
        # what is more than a job may use is for the others
        full = {name for name, part in found.items() if part > rivals[name].cpus}
        parts.update({name: min(part, rivals[name].cpus) for name, part in found.items()})
        if not full:
            break
        total = max(total - sum(rivals[name].cpus for name in full), _FEWEST_CPUS)
        rivals = {name: entry for name, entry in rivals.items() if name not in full}
    return parts


def _division(jobs: list[JobModel], total: float) -> list[float]:
    given = allocate_loaders(jobs, total)
    parts = [count * job.cpus_per_loader for count, job in zip(given, jobs, strict=True)]
    spare = max(total - sum(parts), 0.0) / len(parts)
    return [max(part + spare, _FEWEST_CPUS) for part in parts]


def _competitors(name: str, entries: Mapping[str, Entry]) -> set[str]:
    found, cpus = {name}, set(entries[name].cpu_set)
    while True:
        more = {other for other, entry in entries.items() if entry.cpu_set & cpus} - found
        if not more:
            return found
        found |= more
        cpus.update(*(entries[other].cpu_set for other in more))
