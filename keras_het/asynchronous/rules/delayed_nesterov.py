"""DiLoCo in which nobody waits: the outer momentum comes once for each round of samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from keras_het.asynchronous.rules.diloco import check_outer_step
from keras_het.asynchronous.rules.update_rule import PushMeta, SendsChange, Slots, Update
from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number

_ROUNDING = 1e-4  # the weights of a round's pushes sum to 1 but for that


@dataclasses.dataclass(eq=False)
class DelayedNesterov(SendsChange):
    r"""Asynchronous DiLoCo: each change moves the center at once, their momentum once a round.

    Worker i sends the change :math:`\Delta_i` of its weights since the last answer, of which the
    center takes the part that its :math:`n_i` samples are of the latest pushes of all workers,

    .. math::
        w_i = n_i \Big/ \textstyle\sum_j n_j, \qquad c \leftarrow c + \eta w_i \Delta_i,
        \qquad s \leftarrow s - w_i \Delta_i,

    where a worker that has not pushed yet counts as much as the average of those that have. A round
    is over when the weights of its pushes sum to 1: after one push of each worker, if all push
    equally often. Then comes the momentum that DiLoCo adds with each outer step,

    .. math:: u \leftarrow \mu u + s, \qquad c \leftarrow c - \eta \mu u, \qquad s \leftarrow 0.

    Momentum with every push would amplify stale directions, by which plain asynchronous training
    loses to `DiLoCo` in the paper. If all workers push from the same center, a round is exactly an
    outer step of `DiLoCo`.

    A worker continues from the answer plus what it has moved meanwhile. A lost one costs its own
    samples only: rounds of the others become longer. It may come back at any time.

    Args:
        period: local steps H of the slowest worker from one exchange to the next. With
            `period="auto"` of `HybridAggregation`, the default, faster workers take more in the
            same time (dynamic local updates).
        learning_rate: outer :math:`\eta`.
        momentum: outer :math:`\mu`, from 0 to below 1.
        num_workers: number of workers.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv 2401.09135
        (delayed Nesterov with c = 0, and dynamic local updates). The weights by samples are ours.
    """

    name: ClassVar[str] = "delayed_nesterov"
    settings = ("period", "learning_rate", "momentum", "num_workers")

    num_workers: int
    period: int = 50
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_outer_step(self.learning_rate, self.momentum)
        check_number("num_workers", self.num_workers, least=1)
        check_number("period", self.period, least=1)

    @property
    def least_period(self) -> int:
        return self.period

    def create_slots(self, center: Vector) -> Slots:
        return {
            "velocity": np.zeros_like(center),
            "gradient": np.zeros_like(center),
            "samples": np.zeros(self.num_workers, np.float32),
            "round": np.zeros((), np.float32),
        }

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        weight, samples = self._weight(slots["samples"], meta)
        center = center + np.float32(self.learning_rate) * weight * change
        gradient = slots["gradient"] - weight * change
        velocity, done = slots["velocity"], np.asarray(slots["round"] + weight)
        if done >= np.float32(1 - _ROUNDING):
            velocity = np.float32(self.momentum) * velocity + gradient
            center = center - np.float32(self.learning_rate * self.momentum) * velocity
            gradient, done = np.zeros_like(gradient), np.zeros_like(done)
        new = {"velocity": velocity, "gradient": gradient, "samples": samples, "round": done}
        return Update(center, new, center)

    def _weight(self, samples: Vector, meta: PushMeta) -> tuple[np.float32, Vector]:
        """Return the part of a round that a push is, and the latest samples of all workers."""
        own = np.float32(meta.samples)
        if not own > 0:
            return np.float32(0), samples
        samples = samples.copy()
        samples[meta.worker] = own
        return own / (samples[samples > 0].mean() * np.float32(self.num_workers)), samples
