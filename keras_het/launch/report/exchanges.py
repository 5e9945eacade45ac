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
    """The exchanges of an async worker; NaN where a number was not logged.

    Args:
        worker: its index, or what the log has in its place.
        number: number of exchanges.
        staleness: median of the updates of others between two exchanges.
        most_staleness: the most of them.
        seconds: median time of an exchange.
        last_step: step of the sync group at the last exchange.
    """

    worker: str
    number: int
    staleness: float
    most_staleness: float
    seconds: float
    last_step: int


def worker_exchanges(entries: Iterable[Mapping[str, Any]]) -> tuple[WorkerExchanges, ...]:
    """Put the exchanges of each worker together, sorted by worker.

    Args:
        entries: exchanges, each with its "step" and "worker", and what is known of "staleness"
            and "exchange_seconds".
    """
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for each in entries:
        by_worker.setdefault(plain(str(each.get("worker", "?"))), []).append(each)
    found = []
    for worker in sorted(by_worker, key=lambda name: (len(name), name)):
        of_worker = by_worker[worker]
        staleness = _numbers(of_worker, "staleness")
        seconds = _numbers(of_worker, "exchange_seconds")
        found.append(
            WorkerExchanges(
                worker,
                len(of_worker),
                float(np.median(staleness)) if staleness else np.nan,
                max(staleness, default=np.nan),
                float(np.median(seconds)) if seconds else np.nan,
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
