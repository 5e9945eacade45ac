r"""Local steps, data and compression of workers with equal exchange rates (ASHL).

Between two exchanges, workers of different speed train as many steps as fit into the time of the
slowest one; their links use the rest of that time for a larger part of the update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keras_het.planning.argument_checks import check_number
from keras_het.planning.shares import FloatArray
from keras_het.planning.times.time_model import check_not_negative


@dataclasses.dataclass(frozen=True)
class LocalStepsPlan:
    """Every worker's work between two exchanges.

    Args:
        steps: local steps of every worker between two exchanges, H.
        compression_ratios: fraction of the update's values that every worker sends, R; at most 1.
        update_seconds: predicted time from one exchange to the next of every worker.
    """

    steps: tuple[int, ...]
    compression_ratios: tuple[float, ...]
    update_seconds: tuple[float, ...]

    @property
    def data_shares(self) -> tuple[float, ...]:
        """Fraction of the data of every worker, D_i = H_i / sum H."""
        return tuple(own / sum(self.steps) for own in self.steps)


def plan_local_steps(
    iteration_seconds: Sequence[float],
    push_seconds: Sequence[float],
    pull_seconds: Sequence[float],
    preset_steps: int,
    preset_ratio: float = 1.0,
    compress_seconds: float = 0.0,
) -> LocalStepsPlan:
    r"""Choose local steps first, then compression for the time that rounding and links leave.

    .. math::
        T_{update,i} &= T_{iter,i} H_{preset} + T_{push,i} + T_{pull,i} \\
        H_i &= round\left(\frac{\max_j T_{update,j} - T_{push,i} - T_{pull,i}}{T_{iter,i}}\right) \\
        T_{base,i} &= T_{iter,i} H_i + T_{compress} + T_{pull,i} \\
        T_{max} &= \max_i (T_{base,i} + T_{push,i} \, r_{preset}) \\
        R_i &= \min\left(1, \frac{T_{max} - T_{base,i}}{T_{push,i}}\right)

    The slowest worker keeps both presets, and no worker gets fewer steps or sends less; a worker
    that pushes in no time sends everything.

    Args:
        iteration_seconds: time of one local step of every worker, above 0.
        push_seconds: time in which every worker sends a full update, at least 0.
        pull_seconds: time in which every worker receives the center, at least 0.
        preset_steps: local steps of the slowest worker, at least 1.
        preset_ratio: fraction of its update that the slowest worker sends, above 0, at most 1.
        compress_seconds: time to compress an update, the same for all.

    Returns:
        The plan. Halves of steps are rounded up, which the paper does not state.

    Raises:
        ValueError: if a time is negative or not finite, a step takes no time, the lists differ in
            length, or a preset is outside its range.

    Reference:
        Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
        Heterogeneous Environments", IEEE Transactions on Computers, 2023, algorithms 1 and 2
        (doi 10.1109/TC.2023.3315847).
    """
    iteration, push, pull = _times(iteration_seconds, push_seconds, pull_seconds)
    check_number("preset_steps", preset_steps, least=1, whole=True)
    check_number("preset_ratio", preset_ratio, above=0, most=1)
    check_not_negative("compress_seconds", compress_seconds)
    communication = push + pull
    longest = float((iteration * preset_steps + communication).max())
    steps = tuple(math.floor(h + 0.5) for h in (longest - communication) / iteration)
    base = iteration * np.asarray(steps) + compress_seconds + pull
    left = (base + push * preset_ratio).max() - base
    with np.errstate(over="ignore"):  # push times close to zero
        full = np.divide(left, push, out=np.ones_like(push), where=push > 0)
    # The difference loses the preset to rounding if pushes take little of the time.
    ratios = np.clip(full, preset_ratio, 1.0)
    seconds = iteration * np.asarray(steps) + compress_seconds + push * ratios + pull
    return LocalStepsPlan(steps, tuple(ratios.tolist()), tuple(seconds.tolist()))


def _times(
    iteration_seconds: Sequence[float], push_seconds: Sequence[float], pull_seconds: Sequence[float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    iteration, push, pull = (
        np.asarray(times, np.float64) for times in (iteration_seconds, push_seconds, pull_seconds)
    )
    finite = np.isfinite(np.concatenate([iteration, push, pull])).all()
    if not 0 < len(iteration) == len(push) == len(pull) or not finite or min(iteration) <= 0:
        raise ValueError(
            "Every worker needs finite times of a step (above 0), a push and a pull. Received: "
            f"iteration_seconds={list(iteration_seconds)}, push_seconds={list(push_seconds)}, "
            f"pull_seconds={list(pull_seconds)}. Measure the workers again."
        )
    for name, times in (("push_seconds", push), ("pull_seconds", pull)):
        check_number(name, float(times.min()), least=0)
    return iteration, push, pull
