"""Asynchronous gradient descent that corrects stale gradients to first order."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from keras_het.asynchronous.rules.update_rule import PushMeta, SendsGradient, Slots, Update
from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number

_EPSILON = 1e-7


@dataclasses.dataclass(eq=False)
class DelayCompensated(SendsGradient):
    r"""DC-ASGD, which adds the gradient's estimated change since the worker saw the center.

    With :math:`w_i` the center at which worker i computed its gradient, elementwise,

    .. math:: c \leftarrow c - \eta\,\bigl(g_i + \lambda\, g_i \odot g_i \odot (c - w_i)\bigr),
              \qquad w_i \leftarrow c.

    With a `decay` this is DC-ASGD-a: :math:`\lambda` becomes
    :math:`\lambda / \sqrt{s_i + 10^{-7}}`, where
    :math:`s_i \leftarrow d\,s_i + (1 - d)\,g_i \odot g_i`. The service keeps the last answer to
    each worker. A worker that has since received the center in another way (it joins or comes back,
    its push was too stale, or an answer was lost) has seen a different version: its first gradient
    is taken without compensation.

    Args:
        learning_rate: :math:`\eta`.
        compensation: :math:`\lambda`; the authors use 0.04 without and 2 with `decay` on CIFAR-10
            (from memory).
        num_workers: number of workers.
        decay: d of DC-ASGD-a, from 0 to below 1; None for DC-ASGD-c.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
        and the authors' updaters.
    """

    name: ClassVar[str] = "delay_compensated"
    settings = ("learning_rate", "compensation", "num_workers", "decay")

    learning_rate: float
    compensation: float
    num_workers: int
    decay: float | None = None

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("compensation", self.compensation, least=0)
        check_number("num_workers", self.num_workers, least=1)
        check_number("decay", self.decay, least=0, below=1, or_none=True)

    def create_slots(self, center: Vector) -> Slots:
        rows = ["seen"] if self.decay is None else ["seen", "mean_square"]
        names = [f"{row}_{worker}" for row in rows for worker in range(self.num_workers)]
        versions = np.zeros(self.num_workers, np.int64)
        return {**dict.fromkeys(names, np.zeros_like(center)), "seen_version": versions}

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        new, worker = dict(slots), meta.worker
        seen_version = meta.version - meta.staleness
        known = 0 < seen_version == slots["seen_version"][worker]
        square = change * change
        strength = np.float32(self.compensation)
        if self.decay is not None:
            mean = np.float32(self.decay) * slots[f"mean_square_{worker}"]
            mean += np.float32(1 - self.decay) * square
            new[f"mean_square_{worker}"] = mean
            strength = strength / np.sqrt(mean + np.float32(_EPSILON))
        moved = center - slots[f"seen_{worker}"] if known else np.float32(0)
        center = center - np.float32(self.learning_rate) * (change + strength * square * moved)
        new[f"seen_{worker}"] = center
        new["seen_version"] = slots["seen_version"].copy()
        new["seen_version"][worker] = meta.version + 1
        return Update(center, new, center)
