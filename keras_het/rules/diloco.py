"""Few exchanges: an outer optimizer steps on the progress of many local steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number
from keras_het.rules.update_rule import (
    AllReduceSum,
    PushMeta,
    SendsChange,
    Slots,
    State,
    SynchronousRule,
    Update,
)

if TYPE_CHECKING:
    import tensorflow as tf


def check_outer_step(learning_rate: float, momentum: float) -> None:
    """Refuse an outer step that is not gradient descent with Nesterov momentum."""
    check_number("learning_rate", learning_rate, above=0)
    check_number("momentum", momentum, least=0, below=1)


@dataclasses.dataclass(eq=False)
class DiLoCo(SynchronousRule):
    r"""An outer step of gradient descent with Nesterov momentum every `period` local steps.

    With :math:`n_i` samples that worker i has used since the last exchange,

    .. math::
        D = \frac{\sum_i n_i (c - x_i)}{\sum_i n_i}, \qquad u \leftarrow \mu u + D, \qquad
        c \leftarrow c - \eta (D + \mu u), \qquad x_i \leftarrow c.

    Workers that take unequal numbers of steps in the same time are weighted by their samples. The
    workers' own optimizers (AdamW in the paper) keep their states. With :math:`\eta = 1, \mu = 0`
    this is plain averaging.

    Args:
        period: local steps H from one exchange to the next; the authors use 500.
        learning_rate: outer :math:`\eta`.
        momentum: outer :math:`\mu`, from 0 to below 1.
        overlap: number of steps taken while an exchange is in flight; their change is added.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023;
        Jaghouar et al., "OpenDiLoCo", 2024. The weights :math:`n_i` are ours.
    """

    name: ClassVar[str] = "diloco"
    settings: ClassVar[tuple[str, ...]] = ("period", "learning_rate", "momentum", "overlap")
    center_is_weights: ClassVar[bool] = True

    period: int = 500
    learning_rate: float = 0.7
    momentum: float = 0.9
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.period, self.overlap)
        check_outer_step(self.learning_rate, self.momentum)

    def initial_state(self, weights: tf.Tensor) -> State:
        import tensorflow as tf  # a process that serves does without

        return {"center": weights, "velocity": tf.zeros_like(weights)}

    def combine(
        self,
        weights: tf.Tensor,
        state: State,
        samples: float | tf.Tensor,
        all_reduce_sum: AllReduceSum,
    ) -> tuple[tf.Tensor, State]:
        import tensorflow as tf

        center, count = state["center"], tf.cast(samples, weights.dtype)
        # The number of samples travels in the same buffer: one message instead of two.
        total = all_reduce_sum(tf.concat([count * (center - weights), count[None]], 0))
        gradient = tf.math.divide_no_nan(total[:-1], total[-1])
        velocity = self.momentum * state["velocity"] + gradient
        center = center - self.learning_rate * (gradient + self.momentum * velocity)
        return center, {"center": center, "velocity": velocity}


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
            `period="auto"` of `AsyncWorkers`, the default, faster workers take more in the
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
        check_number("num_workers", self.num_workers, least=1, whole=True)
        check_number("period", self.period, least=1, whole=True)

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
