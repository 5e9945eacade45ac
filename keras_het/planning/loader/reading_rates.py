"""What the jobs of a host read between two changes, and what a change was worth to all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from keras_het.planning.loader.reading import Reading, needed_loaders

ROUND_SECONDS = 2.0
"""Time of each job's windows from which a change can be told from noise, if they agree."""
LONGEST_ROUND_SECONDS = 6.0
"""The same if they do not: what each job has of a disk goes up and down within seconds."""
LOSS_SECONDS = 0.5
"""Time of each job's windows from which a great loss can be told."""
NOISE = 0.03
"""Relative throughput of all jobs that is not told from noise."""
LOSES = 0.15
"""Relative throughput of all jobs whose loss is seen at once."""
_RESTARTS = 3
"""Moves of all jobs in one round after which they are not waited for any more."""
PAYS = 0.08
"""Relative throughput of all jobs for which more threads are kept."""


@dataclasses.dataclass
class ReadingRate:
    """Sum of a job's windows.

    Args:
        steps: number of steps.
        seconds: their time.
        wait_seconds: part of it in which the device waited.
        loader_seconds: their time, times the loaders in effect.
    """

    steps: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    loader_seconds: float = 0.0

    def add(self, reading: Reading) -> None:
        """Takes a window."""
        self.steps += reading.steps
        self.seconds += reading.seconds
        self.wait_seconds += reading.idle_fraction * reading.seconds
        self.loader_seconds += reading.loaders * reading.seconds

    @property
    def loaders(self) -> float:
        """Loaders in effect, n, on average."""
        return self.loader_seconds / self.seconds

    @property
    def steps_per_second(self) -> float:
        """Throughput, X."""
        return self.steps / self.seconds

    @property
    def idle_fraction(self) -> float:
        """Part of the time in which the device waited."""
        return min(self.wait_seconds / self.seconds, 1.0)

    @property
    def need(self) -> float:
        """Threads that the job needs; see `needed_loaders`."""
        return needed_loaders(self.loaders, self.idle_fraction)


class ReadingRound:
    """Gathers windows of all jobs that lie between two changes.

    A job that moves is a change for all. But jobs that move again and again are measured while they
    do: their loaders then count on average.

    Args:
        values: what `to_dict` gave, None to begin.

    Attributes:
        rates: sums so far, by job.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        values = values or {"since": 0.0, "rates": {}, "latest": {}, "restarts": 0}
        self._since = float(values["since"])
        self.rates = rates_of(values["rates"])
        self._restarts = int(values["restarts"])
        self._latest = {name: (int(n), float(end)) for name, (n, end) in values["latest"].items()}

    @property
    def newest(self) -> float:
        """End of the latest window, or the beginning of the round."""
        return max((end for _, end in self._latest.values()), default=self._since)

    def forget_others(self, names: Collection[str]) -> None:
        """Forgets the windows of jobs that are not among these."""
        self._latest = {name: latest for name, latest in self._latest.items() if name in names}

    def begin(self, since: float | None = None) -> None:
        """Starts a new round.

        Args:
            since: time of a change, None if nothing has changed.
        """
        self.rates = {}
        self._since = self._since if since is None else since
        self._restarts = 0

    def take(self, name: str, reading: Reading, number: int) -> None:
        """Takes a window, if it is a new one.

        Args:
            name: the job.
            reading: its window.
            number: number of the division in effect.
        """
        loaders, ended = self._latest.get(name, (reading.loaders, -math.inf))
        if reading.ended <= ended:
            return
        self._latest[name] = reading.loaders, reading.ended
        if loaders != reading.loaders and self._restarts < _RESTARTS:
            self.rates = {}
            self._since = max(self._since, reading.began)
            self._restarts += 1
        if reading.began >= self._since and reading.number == number:
            self.rates.setdefault(name, ReadingRate()).add(reading)

    def has(self, names: Iterable[str], seconds: float) -> bool:
        """Whether each of these jobs was measured for a while.

        Args:
            names: the jobs.
            seconds: how long, 0 for at least a window.
        """
        return all(name in self.rates and self.rates[name].seconds >= seconds for name in names)

    def to_dict(self) -> dict[str, Any]:
        """What is known, as plain Python values, for JSON."""
        return {
            "since": self._since,
            "rates": rates_to_dict(self.rates),
            "latest": self._latest,
            "restarts": self._restarts,
        }


def rates_to_dict(rates: Mapping[str, ReadingRate]) -> dict[str, Any]:
    """Rates as plain Python values, for JSON."""
    return {name: dataclasses.asdict(rate) for name, rate in rates.items()}


def rates_of(values: Mapping[str, Any]) -> dict[str, ReadingRate]:
    """The rates of which `rates_to_dict` gave these values."""
    return {name: ReadingRate(**rate) for name, rate in values.items()}


def change_of(
    before: Mapping[str, ReadingRate], after: Mapping[str, ReadingRate]
) -> tuple[float, bool]:
    """What a change was worth to all jobs together, and whether it was fair.

    Batches of different jobs are not comparable; the time that a thread spends for one is. While
    a device is saturated a batch of job j takes it n_j / X_j of the time of a thread, so that

        sum_j n_j / N (X'_j / X_j - 1)

    is 0 if jobs only take from each other, whatever they read.

    Args:
        before: the jobs before the change.
        after: the same jobs after it.

    Returns:
        Relative change of all; whether what a job lost by it went to another. It did not if they
        read from different devices.
    """
    total = sum(rate.loaders for rate in before.values())
    ratios = {
        name: after[name].steps_per_second / rate.steps_per_second for name, rate in before.items()
    }
    changes = [before[name].loaders / total * (ratio - 1.0) for name, ratio in ratios.items()]
    losses = -sum(min(change, 0.0) for change in changes)
    gains = sum(max(change, 0.0) for change in changes)
    is_fair = min(ratios.values()) >= 0.9 or gains >= losses / 2
    return gains - losses, is_fair
