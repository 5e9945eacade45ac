"""Learns how many reading threads a host has use for, and divides them among its jobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_het.planning.loader.reader_allocation import (
    allocate_readers,
    fair_threads,
    working_fraction,
    working_fractions,
)
from keras_het.planning.loader.reading import Reading
from keras_het.planning.loader.reading_rates import (
    LONGEST_ROUND_SECONDS,
    LOSES,
    LOSS_SECONDS,
    NOISE,
    PAYS,
    ROUND_SECONDS,
    ReadingRate,
    ReadingRound,
    change_of,
    rates_of,
    rates_to_dict,
)
from keras_het.planning.loader.trials import Pauses

FEWER, MORE, DIVIDE = "fewer threads", "more threads", "other division"
_WAITS = 0.1
"""Idle fraction from which a device is worth a trial that costs the others time."""
_TRIAL = "any trial"
_FIRST_FACTOR = 0.5
"""Part of their threads that the first trial of fewer leaves to jobs."""
_FIRST_PAUSE_SECONDS = 10.0
CHANGED = 0.25
"""Relative change of a job's throughput from which everything may be tried again."""
_MEMORY_SECONDS = 600.0
"""How long a ceiling is remembered while there are not two jobs that read."""


@dataclasses.dataclass
class ReadingTrial:
    """A ceiling in effect that must still prove itself.

    Args:
        kind: `FEWER`, `MORE` or `DIVIDE`.
        threads: ceiling before, None if there was none.
        parts: division before.
        before: what the jobs read before; for `FEWER` before the first of several in a row.
    """

    kind: str
    threads: int | None
    parts: dict[str, int]
    before: dict[str, ReadingRate]

    def pays(self, after: Mapping[str, ReadingRate]) -> bool:
        """Whether the ceiling is kept: more must make all faster, fewer none slower.

        Args:
            after: what the jobs read under it.
        """
        change, is_fair = change_of(self.before, after)
        if self.kind == MORE:
            return change >= PAYS
        # jobs whose loaders somebody else fixed follow no ceiling, and prove nothing
        has_moved = self.kind == DIVIDE or _threads(after) < _threads(self.before)
        return change >= -NOISE and is_fair and has_moved


class ReadingCeiling:
    """Bounds the reading threads of all jobs of a host, if they compete for a disk or a network.

    One job that takes more threads sees its throughput rise, also if it only takes it from another
    one. So the jobs are looked at together, in rounds in which none of them moves:

    - Without a ceiling jobs grow as if each were alone. While a device waits, fewer threads of all
      are tried, divided by `allocate_readers`. That is kept if all jobs together are as fast as
      before, and if what one lost another gained: then they compete, and fewer suffice. Otherwise
      everything is as it was.
    - Under a ceiling more threads are tried from time to time, and kept if all jobs together
      become 8 % faster.
    - A trial that failed stays away for 10, 20, ... 120 s; the next one goes less far.
    - The division follows jobs that come and go, and needs that change.

    A job that reads alone is never bounded by a ceiling that was learned.

    Args:
        number: number to begin with.

    Attributes:
        number: number of the present division; jobs say which one they knew.
        threads: the ceiling, None if there is none.
        parts: most threads of each job that is bounded.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.threads: int | None = None
        self.parts: dict[str, int] = {}
        self._readers: frozenset[str] = frozenset()
        self._round = ReadingRound()
        self._trial: ReadingTrial | None = None
        self._chain: dict[str, ReadingRate] | None = None
        self._known: dict[str, ReadingRate] = {}
        self._pauses = Pauses(_FIRST_PAUSE_SECONDS)
        self._last = MORE
        self._factor = _FIRST_FACTOR
        self._division_failed = False
        self._seen = -math.inf

    def update(
        self, name: str, readings: Mapping[str, Reading], now: float, given: int | None = None
    ) -> None:
        """Takes the latest window of a job.

        Args:
            name: the job.
            readings: latest windows of all jobs that read, this one's included if it does.
            now: time, on the clock of the windows.
            given: ceiling that somebody set; then nothing is learned.
        """
        needs = {each: reading.need for each, reading in readings.items()}
        others = needs.keys() != self._readers
        if others:
            self._admit(needs, now)
        if given is not None and needs and (others or given != self.threads):
            self._trial = None
            self._divide(given, needs, now)
        if len(needs) < 2:
            if given is None and self.parts:
                self._put(None, {}, now)  # who gave it has left
            return
        self._seen = now
        if name in readings:
            self._round.take(name, readings[name], self.number)
        rates = self._round.rates
        if self._is_known(needs, rates) or self._fails(rates):
            self._round.begin()
            self._decide(rates, now, given is None)

    def _admit(self, needs: Mapping[str, float], now: float) -> None:
        """Other jobs read than before: what was being tried can no longer be compared."""
        self._readers = frozenset(needs)
        if self._trial is not None:
            self.threads = self._trial.threads
        if now - self._seen > _MEMORY_SECONDS:
            self.threads = None
        self._trial = self._chain = None
        self._known = {}
        self._pauses.end()
        self._factor, self._last = _FIRST_FACTOR, MORE
        self._round.forget_others(needs)
        self._divide(self.threads, needs if len(needs) > 1 else {}, now)

    def _is_known(self, jobs: Iterable[str], rates: Mapping[str, ReadingRate]) -> bool:
        """Whether the round has shown enough; what just seems to lose is looked at longer."""
        trial = self._trial
        if trial is None:
            # what trials are compared with has the same errors as they
            return self._round.has(jobs, 2 * ROUND_SECONDS)
        if not self._round.has(jobs, ROUND_SECONDS):
            return False
        is_clear = trial.kind == MORE or trial.pays(rates)
        return is_clear or self._round.has(jobs, LONGEST_ROUND_SECONDS)

    def _fails(self, rates: Mapping[str, ReadingRate]) -> bool:
        """Whether a trial loses so much that it needs no second look."""
        trial = self._trial
        if trial is None or trial.kind == MORE or not self._round.has(trial.before, LOSS_SECONDS):
            return False
        change, is_fair = change_of(trial.before, rates)
        return change < -LOSES or not is_fair

    def _decide(self, rates: dict[str, ReadingRate], now: float, learns: bool) -> None:
        if self._trial is not None:
            self._judge(self._trial, rates, now)
            return
        if _have_changed(self._known, rates):
            self._pauses.end()
            self._factor = _FIRST_FACTOR
        self._known = rates
        if not self._pauses.allow(_TRIAL, now):
            return
        # a division that fails again and again keeps no other trial away
        failed, self._division_failed = self._division_failed, False
        if not (failed and learns) and self._try_division(rates, now):
            return
        if learns:
            self._try_threads(rates, now)

    def _judge(self, trial: ReadingTrial, rates: dict[str, ReadingRate], now: float) -> None:
        self._trial = self._chain = None
        if not trial.pays(rates):
            self._pauses.start(_TRIAL, now)
            self._division_failed = trial.kind == DIVIDE
            if trial.kind == FEWER:
                self._factor = (1.0 + self._factor) / 2
            self._put(trial.threads, trial.parts, now)
            return
        self._pauses.end()
        self._known = rates
        if trial.kind == FEWER:
            self._factor = max(self._factor / 2, 0.25)
            # several in a row may lose no more than one
            is_faster = change_of(trial.before, rates)[0] > 0
            self._chain = rates if is_faster else trial.before
            self._last = MORE
            self._try_threads(rates, now)

    def _try_division(self, rates: dict[str, ReadingRate], now: float) -> bool:
        """Follows needs that have changed; returns whether they have."""
        if self.threads is None:
            return False
        names = sorted(rates)
        needs = [rates[name].need for name in names]
        have = [self.parts[name] for name in names]
        could = allocate_readers(needs, self.threads)
        # far too few threads are worth the same in any division: then the poorest job counts
        gains_all = working_fraction(needs, could) >= (1.0 + NOISE) * working_fraction(needs, have)
        if not gains_all and _least(needs, could) < (1.0 + CHANGED) * _least(needs, have):
            return False
        self._begin_trial(DIVIDE, self.threads, rates, rates, now)
        return True

    def _try_threads(self, rates: dict[str, ReadingRate], now: float) -> None:
        """Tries fewer threads and more of them in turns, while a device waits."""
        if max(rate.idle_fraction for rate in rates.values()) <= _WAITS:
            return
        present = _threads(rates)
        needs = [rate.need for rate in rates.values()]
        fewer = fair_threads(needs, max(math.ceil(self._factor * present), len(rates)))
        can_grow = self.threads is not None and present >= 0.9 * self.threads
        can_shrink = fewer < present
        if can_shrink and (self._last == MORE or not can_grow):
            self._begin_trial(FEWER, fewer, rates, self._chain or rates, now)
        elif can_grow:
            self._begin_trial(MORE, fair_threads(needs, math.ceil(2 * present)), rates, rates, now)

    def _begin_trial(
        self,
        kind: str,
        threads: int,
        rates: Mapping[str, ReadingRate],
        before: dict[str, ReadingRate],
        now: float,
    ) -> None:
        self._last = kind if kind != DIVIDE else self._last
        self._trial = ReadingTrial(kind, self.threads, self.parts, before)
        self._divide(threads, {name: rate.need for name, rate in rates.items()}, now)

    def _divide(self, threads: int | None, needs: Mapping[str, float], now: float) -> None:
        parts: dict[str, int] = {}
        if threads is not None and needs:
            names = sorted(needs)
            found = allocate_readers([needs[name] for name in names], threads)
            parts = dict(zip(names, found, strict=True))
        self._put(threads, parts, now)

    def _put(self, threads: int | None, parts: dict[str, int], now: float) -> None:
        self.threads, self.parts = threads, parts
        self.number += 1
        self._round.begin(now)

    # --- for the file of the host

    @property
    def newest(self) -> float:
        """The latest time that is known here."""
        return max(self._seen, self._round.newest)

    def to_dict(self) -> dict[str, Any]:
        """What is known, as plain Python values, for JSON."""
        return {
            "number": self.number,
            "threads": self.threads,
            "parts": self.parts,
            "readers": sorted(self._readers),
            "round": self._round.to_dict(),
            "trial": None if self._trial is None else dataclasses.asdict(self._trial),
            "chain": None if self._chain is None else rates_to_dict(self._chain),
            "known": rates_to_dict(self._known),
            "pauses": self._pauses.to_dict(),
            "last": self._last,
            "factor": self._factor,
            "division_failed": self._division_failed,
            "seen": self._seen,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReadingCeiling:
        """The object of which `to_dict` gave these values.

        Args:
            values: the values.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: if another version wrote them.
        """
        ceiling = cls()
        threads = values["threads"]
        ceiling.number, ceiling.threads = int(values["number"]), threads and int(threads)
        ceiling.parts = {name: int(part) for name, part in values["parts"].items()}
        ceiling._readers = frozenset(values["readers"])
        ceiling._round = ReadingRound(values["round"])
        trial, chain = values["trial"], values["chain"]
        if trial is not None:
            ceiling._trial = ReadingTrial(**{**trial, "before": rates_of(trial["before"])})
        ceiling._chain = None if chain is None else rates_of(chain)
        ceiling._known = rates_of(values["known"])
        ceiling._pauses.load(values["pauses"])
        ceiling._last = str(values["last"])
        ceiling._factor, ceiling._seen = float(values["factor"]), float(values["seen"])
        ceiling._division_failed = bool(values["division_failed"])
        return ceiling


def _threads(rates: Mapping[str, ReadingRate]) -> float:
    return sum(rate.loaders for rate in rates.values())


def _least(needs: Sequence[float], parts: Sequence[int]) -> float:
    return min(working_fractions(needs, parts))


def _have_changed(before: Mapping[str, ReadingRate], after: Mapping[str, ReadingRate]) -> bool:
    """Whether a job is another one than when it was last looked at."""
    ratios = [
        after[name].steps_per_second / rate.steps_per_second
        for name, rate in before.items()
        if name in after
    ]
    return any(abs(ratio - 1.0) > CHANGED for ratio in ratios)
