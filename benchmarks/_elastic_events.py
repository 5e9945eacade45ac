"""What the processes of benchmarks/elastic.py have written, and what follows from it."""

from __future__ import annotations

import bisect
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
# What a process of a new group writes -> what it has done until then.
PARTS = {
    "function": "start_and_import",
    "strategy": "agree",
    "model": "build",
    "restored": "restore",
    "step": "trace",
    "new_step": "repeat",
}


class Events:
    """Reads what is new in the files of all processes.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[Path, int]()
        self.all: list[Event] = []

    def update(self) -> list[Event]:
        """Return the steps so far, in order of time."""
        for path in self._folder.glob("events-*"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            whole = lines[: lines.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.all += map(json.loads, whole.splitlines())
        return sorted(
            (event for event in self.all if event["event"] == "step"), key=lambda one: one["time"]
        )


def progress(steps: Iterable[Event]) -> list[tuple[float, int]]:
    """Return when each step was first finished; one that is repeated is no progress."""
    found: list[tuple[float, int]] = []
    for event in steps:
        if not found or event["step"] > found[-1][1]:
            found.append((event["time"], event["step"]))
    return found


def at(steps: Sequence[tuple[float, int]], time: float) -> int:
    """Return the newest step at a time."""
    index = bisect.bisect_right([each for each, _ in steps], time)
    return steps[index - 1][1] if index else 0


def step_seconds(steps: Sequence[tuple[float, int]], until: float) -> float:
    """Return the median seconds of a step before the first disturbance."""
    times = [time for time, _ in steps if time < until]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def longest_gap(steps: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """Return the longest time without progress after a disturbance, at most until `end`."""
    times = [time for time, _ in steps]
    first = max(0, bisect.bisect_right(times, start) - 1)
    inside = [*(time for time in times[first:] if time < end)]
    # a gap that the next disturbance cuts is as long as it was until then
    return max(b - a for a, b in zip(inside, [*inside[1:], end], strict=True))


def useful_seconds(
    steps: Sequence[tuple[float, int]], start: float, end: float, seconds: float
) -> float:
    """Return the part of a time that went into steps which were kept, of so many seconds each."""
    return (at(steps, end) - at(steps, start)) * seconds


def breakdown(events: Iterable[Event], disturbed: float, end: float) -> dict[str, float]:
    """Return where the seconds of an interruption went, {} if there was none that ended.

    Each part ends when the last process of the new group has come so far. What comes before its
    processes is how long it took to notice the loss and to end the old group; what comes last are
    steps since the newest backup.
    """
    in_order = sorted(events, key=lambda one: one["time"])
    started: dict[int, float] = {}
    reached: dict[int, dict[str, float]] = {}
    newest = max((e["step"] for e in in_order if "step" in e and e["time"] < disturbed), default=0)
    for event in in_order:
        name, pid = event["event"], event["pid"]
        if name == "process":
            started[pid] = event["time"]
        elif disturbed < event["time"] < end:
            marks = reached.setdefault(pid, {})
            marks.setdefault(name, event["time"])
            if event.get("step", 0) > newest:
                marks.setdefault("new_step", event["time"])
    group = {pid: marks for pid, marks in reached.items() if PARTS.keys() <= marks.keys()}
    if not group:
        return {}
    times = [disturbed, max(disturbed, min(started[pid] for pid in group))]
    times += [max(marks[mark] for marks in group.values()) for mark in PARTS]
    names = ("notice_and_end", *PARTS.values())
    return {
        f"{name}_seconds": round(b - a, 2)
        for name, (a, b) in zip(names, itertools.pairwise(times), strict=True)
    }
