"""What a log knows of async workers: how old their weights are, how long an exchange takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from keras_het.launch.report.plain_text import plain

_LARGEST = 1e18


@dataclasses.dataclass(frozen=True)
class WorkerExchanges:
    """The exchanges of an async worker, as it was heard of; NaN where a number was not logged."""

    worker: str
    number: int
    samples_per_second: float
    staleness: float
    most_staleness: float
    seconds: float
    last_step: int


def worker_exchanges(entries: Iterable[Mapping[str, Any]]) -> tuple[WorkerExchanges, ...]:
    """Put the exchanges of each worker together, sorted by worker."""
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for each in entries:
        by_worker.setdefault(plain(str(each.get("worker", "?"))), []).append(each)
    found = []
    for worker in sorted(by_worker, key=lambda name: (len(name), name)):
        of_worker = by_worker[worker]
        staleness = _numbers(of_worker, "staleness")
        found.append(
            WorkerExchanges(
                worker,
                len(of_worker),
                _median(_numbers(of_worker, "samples_per_second")),
                _median(staleness),
                max(staleness, default=np.nan),
                _median(_numbers(of_worker, "exchange_seconds")),
                max(int(each.get("step", 0)) for each in of_worker),
            )
        )
    return tuple(found)


def _numbers(entries: list[Mapping[str, Any]], name: str) -> list[float]:
    values = (each.get(name) for each in entries)
    return [
        float(value)
        for value in values
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < _LARGEST  # NaN is not, nor is a whole number that has no float
    ]


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else np.nan
