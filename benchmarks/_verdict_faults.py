"""Faults that are injected into a training, and what a verdict on it has to say."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

EVERY = 5  # steps between two diagnoses
WITHIN = 50  # steps after the injection until which a fault has to be named
LASTS, GROWS = 60, 40
SHAPES = ("static", "temporary", "creeping")
# What is named, and where: a device of a process, or a worker. No link is named among several.
EXPECTED = {
    "compute": ("slow_device", "device", 2),
    "input": ("input", "worker", 1),
    "host": ("host", "worker", 1),
    "link": ("link", "device", None),
    # What all workers have; that all compute longer is said, and no device is named for it.
    "all input": ("input", "", None),
    "all callbacks": ("other", "", None),
    "all compute": ("", "", None),
}
ALL_COMPUTE = "all devices are"


@dataclasses.dataclass(frozen=True)
class Training:
    """A training with a fault, or without one.

    Args:
        kind: what can fail in it, of `EXPECTED`.
        shape: "static" from the first step on, "temporary" for 60 steps, "creeping" (it grows for
            40 steps and stays), or empty: nothing fails.
        begin: step from which on it fails.
        steps: its length.
        processes: that train.
        busy: whether other programs keep the machine busy meanwhile.
    """

    kind: str
    shape: str
    begin: int
    steps: int
    processes: int = 2
    busy: bool = False

    @property
    def case(self) -> str:
        if self.kind.startswith("all "):
            where = "one process" if self.processes == 1 else f"{self.processes} processes"
            return f"{self.kind}, {self.shape}, {where}, {'busy' if self.busy else 'quiet'}"
        return f"{self.kind}, {self.shape}" if self.shape else f"undisturbed, {self.kind}"

    def strength(self, step: int) -> float:
        """Return how much of the fault there is in a step, from 0 to 1."""
        since = step - self.begin
        if not self.shape or since < 0:
            return 0.0
        if self.shape == "creeping":
            return min((since + 1) / GROWS, 1.0)
        return float(self.shape == "static" or since < LASTS)


def trainings(kind: str, quick: bool) -> list[Training]:
    """Return the trainings of one kind: three with faults, five without.

    What all workers have fails in one process and in two, on a quiet machine and on a busy one.
    """
    begin, after, undisturbed = (20, 30, 1) if quick else (120, WITHIN + 10, 5)
    if kind.startswith("all "):
        # What always was slow on all devices looks like their speed.
        shapes = ("temporary",) if kind == "all compute" else ("static", "temporary")
        ways = list(itertools.product(shapes, (1, 2), (False, True)))
        return [
            Training(kind, shape, start, start + after, processes, busy)
            for shape, processes, busy in (ways[-1:] if quick else ways)
            for start in [0 if shape == "static" else begin]
        ]
    shapes = SHAPES[list(EXPECTED).index(kind) % 3 :][:1] if quick else SHAPES
    processes = 1 if kind == "compute" else 2
    faulty = [
        Training(kind, shape, start, start + after, processes)
        for shape in shapes
        for start in [0 if shape == "static" else begin]
    ]
    return [*faulty, *[Training(kind, "", 0, begin + after, processes)] * undisturbed]


def rows_of(done: Sequence[Training], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each training."""
    pairs = list(zip(done, results, strict=True))
    rows = [fault_row(training, result) for training, result in pairs if training.shape]
    rows += [undisturbed_row(training, result) for training, result in pairs if not training.shape]
    return rows


def fault_row(training: Training, result: dict[str, Any]) -> dict[str, Any]:
    """Return whether and when a fault was named, for good."""
    last = min(training.begin + WITHIN, training.steps)
    after = [each for each in result["said"] if training.begin < each["step"] <= last]
    before = [each for each in result["said"] if each["step"] <= training.begin]
    needed = None
    for each in reversed(after):
        if not is_right(training.kind, each):
            break
        needed = each["step"] - training.begin
    return {
        "case": training.case,
        "named": needed is not None,
        "kind_said": after[-1]["kind"] if after else "",
        "steps_needed": needed,
        "alarms_before": sum(bool(each["kind"]) for each in before),
        "other_cpus": result["other_cpus"],
        "step_milliseconds": result["step_milliseconds"],
        "said": after[-1]["text"] if after else "",
    }


def undisturbed_row(training: Training, result: dict[str, Any]) -> dict[str, Any]:
    """Return how many diagnoses of a training without a fault named one."""
    alarms = [each for each in result["said"] if each["kind"]]
    return {
        "case": training.case,
        "false_alarms": len(alarms),
        "diagnoses": len(result["said"]),
        "other_cpus": result["other_cpus"],
        "step_milliseconds": result["step_milliseconds"],
        "said": alarms[0]["text"] if alarms else "",
    }


def is_right(kind: str, said: dict[str, Any]) -> bool:
    """Tell whether the first cause of a verdict is the fault."""
    cause, place, index = EXPECTED[kind]
    if kind == "all compute":
        return bool(not said["kind"] and ALL_COMPUTE in said["text"])
    return bool(said["kind"] == cause and (not place or said[place] == index))
