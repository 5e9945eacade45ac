"""A plan of a pipeline: its stages, the devices of each, the orders of passes, and their time."""

# 1F1B ("one forward, one backward"; Fan et al., "DAPPLE", PPoPP 2021; Narayanan et al.,
# "PipeDream", SOSP 2019): the forward pass of micro-batch m' comes before the backward pass of m if
# m' - m <= V_s, V_s = A_s + r_s - 1, with A_s devices in later stages and r_s in the stage itself;
# in the last stage V = 0.
# Such an order cannot lock up, whoever takes which micro-batch: the forward passes of stage s get
# the number 2 m - V_s and the backward passes 2 m + V_s + 1. Because V falls from stage to stage,
# every pass has a greater number than all that it waits for.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.argument_checks import check_number, check_one_of

SCHEDULES = ("1f1b", "gpipe")
RECOMPUTE = ("auto", "never", "always")


def check_plan_options(num_micro_batches: int, schedule: str, recompute: str) -> None:
    check_number("num_micro_batches", num_micro_batches, least=1, whole=True)
    check_one_of("schedule", schedule, SCHEDULES)
    check_one_of("recompute", recompute, RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Units of the model that run on the same devices.

    Args:
        first: first unit.
        end: the unit after the last one.
        devices: replicas of the stage, as indices into `Devices`, [replicas].
        routes: position in `devices` of the replica that takes micro-batch m, [num_micro_batches].
        recomputed: units whose activations are dropped after the forward pass and computed again
            before the backward pass.
        ahead: in the schedule "1f1b", how far forward passes may be ahead: micro-batch m + ahead
            may go forward before m has come back. By default one less than the number of devices
            from this stage on, and 0 in the last stage.
    """

    first: int
    end: int
    devices: tuple[int, ...]
    routes: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    ahead: int | None = None


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How a model is split over devices; `str()` is a table.

    Args:
        stages: stages from the model's inputs to its outputs.
        num_micro_batches: micro-batches of a step, M.
        schedule: order of the passes, "1f1b" or "gpipe".
        step_seconds: predicted time of a step.
        memory_bytes: predicted use of each device, [D].
        alternatives: other ways to train the model and the predicted time of a step of each;
            infinite where a device would run out of memory.
        layer_names: name of each unit, [L], for the table.
        device_names: name of each device, [D], for the table.
    """

    stages: tuple[Stage, ...]
    num_micro_batches: int
    schedule: str
    step_seconds: float
    memory_bytes: tuple[float, ...]
    alternatives: tuple[tuple[str, float], ...] = ()
    layer_names: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("stage", "layers", "devices", "micro-batches", "recomputed", "memory")]
        for number, stage in enumerate(self.stages):
            for replica, device in enumerate(stage.devices):
                rows.append(
                    (
                        *((str(number), self._layers(stage)) if not replica else ("", "")),
                        self._device(device),
                        str(stage.routes.count(replica)),
                        self._recomputed(stage) if not replica else "",
                        readable_bytes(self.memory_bytes[device]),
                    )
                )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        used = {device for stage in self.stages for device in stage.devices}
        if unused := [device for device in range(len(self.memory_bytes)) if device not in used]:
            lines.append(f"not used: {', '.join(map(self._device, unused))}")
        lines.append(
            f"predicted step: {readable_seconds(self.step_seconds)} "
            f"({self.num_micro_batches} micro-batches, {self.schedule})"
        )
        for name, seconds in self.alternatives:
            lines.append(f"  {name}: {readable_seconds(seconds)}")
        return "\n".join(lines)

    def _layer(self, unit: int) -> str:
        return self.layer_names[unit] if self.layer_names else str(unit)

    def _layers(self, stage: Stage) -> str:
        first, last = self._layer(stage.first), self._layer(stage.end - 1)
        return first if stage.end - stage.first == 1 else f"{first} .. {last}"

    def _device(self, device: int) -> str:
        return self.device_names[device] if self.device_names else str(device)

    def _recomputed(self, stage: Stage) -> str:
        number = len(stage.recomputed)
        if not number:
            return "none"
        if number == stage.end - stage.first:
            return "all"
        names = list(map(self._layer, stage.recomputed))
        return ", ".join(names) if number <= 3 else f"{', '.join(names[:2])} and {number - 2} more"


def readable_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def readable_seconds(seconds: float) -> str:
    if seconds == float("inf"):
        return "does not fit"
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


Pass = tuple[str, int]


def routes(seconds_per_micro_batch: ArrayLike, num_micro_batches: int) -> tuple[int, ...]:
    """Give each micro-batch to the replica that would finish it first.

    No other distribution of whole micro-batches ends sooner. Of replicas that would finish at the
    same time, the first one takes it.

    Args:
        seconds_per_micro_batch: time of each replica for one micro-batch, float64 [replicas].
        num_micro_batches: number of micro-batches, M.

    Returns:
        Position of the replica that takes micro-batch m, [M].

    Raises:
        ValueError: if there is no replica, no micro-batch, or a time is negative or not finite.
    """
    seconds = np.asarray(seconds_per_micro_batch, np.float64)
    if seconds.ndim != 1 or not len(seconds) or not np.isfinite(seconds).all():
        raise ValueError(
            "Each replica needs a finite time for one micro-batch. "
            f"Received: {seconds_per_micro_batch!r}. Give a list with one number per replica."
        )
    check_number("num_micro_batches", num_micro_batches, least=1, whole=True)
    if (seconds < 0).any():
        raise ValueError(
            f"Times must not be negative. Received: {seconds.tolist()}. Measure the stage again."
        )
    return routes_of(np.maximum(seconds, 1e-15).tolist(), num_micro_batches)


def routes_of(seconds: Sequence[float], num_micro_batches: int) -> tuple[int, ...]:
    """Return `routes` of positive times."""
    result, taken, ends = [], [1] * len(seconds), list(seconds)
    for _ in range(num_micro_batches):
        replica = ends.index(min(ends))
        result.append(replica)
        taken[replica] += 1
        ends[replica] = taken[replica] * seconds[replica]
    return tuple(result)


def stage_order(
    stages: Sequence[Stage], position: int, replica: int, schedule: str = "1f1b"
) -> tuple[Pass, ...]:
    """Return the order of the passes of one replica of a stage.

    Args:
        stages: all stages of the plan.
        position: which of them.
        replica: position in the `devices` of the stage.
        schedule: "1f1b", or "gpipe": all forward passes before all backward passes.

    Returns:
        ("forward", m) and ("backward", m) for each micro-batch m that the replica takes.

    Raises:
        ValueError: if the schedule is unknown.
    """
    check_one_of("schedule", schedule, SCHEDULES)
    stage = stages[position]
    mine = [m for m, taker in enumerate(stage.routes) if taker == replica]
    if schedule == "gpipe":
        return (*(("forward", m) for m in mine), *(("backward", m) for m in mine))
    ahead = ahead_of(stages, position)
    keyed = [(2 * m - ahead, ("forward", m)) for m in mine]
    keyed += [(2 * m + ahead + 1, ("backward", m)) for m in mine]
    return tuple(entry for _, entry in sorted(keyed))


def ahead_of(stages: Sequence[Stage], position: int) -> int:
    """Return V of a stage: how far its forward passes may be ahead."""
    if (ahead := stages[position].ahead) is not None:
        return ahead
    later = sum(len(other.devices) for other in stages[position + 1 :])
    return later + len(stages[position].devices) - 1 if later else 0


def in_flight(stages: Sequence[Stage], position: int, replica: int, schedule: str = "1f1b") -> int:
    """Return the most micro-batches that a replica holds between forward and backward."""
    stage = stages[position]
    if schedule == "gpipe":
        return stage.routes.count(replica)
    return most_in_flight(stage.routes, len(stage.devices), ahead_of(stages, position))[replica]


@functools.lru_cache(maxsize=8192)
def most_in_flight(taken: tuple[int, ...], replicas: int, ahead: int) -> tuple[int, ...]:
    """Return the most micro-batches of each replica in flight in "1f1b", from routes and V."""
    result = []
    for replica in range(replicas):
        mine = [m for m, taker in enumerate(taken) if taker == replica]
        most = forward = 0
        for back, m in enumerate(mine):
            while forward < len(mine) and mine[forward] <= m + ahead:
                forward += 1
            most = max(most, forward - back)
        result.append(most)
    return tuple(result)
