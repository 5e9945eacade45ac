r"""Orders of forward and backward passes, as pure functions of a plan's stages.

The order of a replica in the synchronous schedule 1F1B ("one forward, one backward"): the forward
pass of micro-batch m' comes before the backward pass of m if

.. math:: m' - m \le V_s, \qquad V_s = A_s + r_s - 1,

where A_s is the number of devices in later stages and r_s that of the stage itself; in the last
stage V = 0. With equal replicas, each holds at most ceil((A_s + r_s) / r_s) micro-batches between
forward and backward, PipeDream's and DAPPLE's warm-up.

Such an order cannot lock up, whichever replica takes which micro-batch: the forward passes of stage
s get the number 2 m - V_s and the backward passes 2 m + V_s + 1. Because V falls from stage to
stage, every pass has a greater number than all that it waits for.

References:
    Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021.
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019.
    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from keras_het.planning.argument_checks import check_number, check_one_of
from keras_het.planning.pipeline.plan import SCHEDULES, Stage

Pass = tuple[str, int]


def routes(seconds_per_micro_batch: ArrayLike, micro_batches: int) -> tuple[int, ...]:
    """Give each micro-batch to the replica that would finish it first.

    No other distribution of whole micro-batches ends sooner. Of replicas that would finish at the
    same time, the first one takes it.

    Args:
        seconds_per_micro_batch: time of each replica for one micro-batch, float64 [replicas].
        micro_batches: number of micro-batches, M.

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
    check_number("micro_batches", micro_batches, least=1, whole=True)
    if (seconds < 0).any():
        raise ValueError(
            f"Times must not be negative. Received: {seconds.tolist()}. Measure the stage again."
        )
    seconds = np.maximum(seconds, 1e-15)
    taken = np.zeros(len(seconds), np.int64)
    result = []
    for _ in range(micro_batches):
        replica = int(((taken + 1) * seconds).argmin())
        taken[replica] += 1
        result.append(replica)
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
    ahead = stage.ahead  # V
    if ahead is None:
        later = sum(len(other.devices) for other in stages[position + 1 :])
        ahead = later + len(stage.devices) - 1 if later else 0
    keyed = [(2 * m - ahead, ("forward", m)) for m in mine]
    keyed += [(2 * m + ahead + 1, ("backward", m)) for m in mine]
    return tuple(entry for _, entry in sorted(keyed))


def in_flight(stages: Sequence[Stage], position: int, replica: int, schedule: str = "1f1b") -> int:
    """Return the most micro-batches that a replica holds between forward and backward."""
    most = now = 0
    for kind, _ in stage_order(stages, position, replica, schedule):
        now += 1 if kind == "forward" else -1
        most = max(most, now)
    return most
