"""The worker's own optimizer runs; its weight change is added to the center."""

from __future__ import annotations

import copy
from typing import ClassVar

from keras_het.asynchronous.rules.update_rule import PushMeta, SendsChange, Slots, Update
from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number


class Delta(SendsChange):
    r"""Sum of the workers' changes: :math:`c \leftarrow c + s\,\Delta_i`, answered with :math:`c`.

    A worker runs any optimizer on its weights, sends the difference from the weights it last
    received, and continues from the answer. With s = 1 every worker's progress counts in full, as
    in BytePS's asynchronous mode. A worker whose steps have only a fraction f of the global batch
    sends :math:`f \Delta_i`, so that a sample moves the center equally far on every worker.

    Workers that train on alone while the service is lost all start from the same weights; a worker
    therefore keeps 1 / n of that progress (`after_absence`), else the changes would add up.

    Args:
        scale: factor s; 1 / number of workers averages.

    Raises:
        ValueError: if `scale` is not positive.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020; asynchronous mode of its implementation.
    """

    name: ClassVar[str] = "delta"
    settings = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        check_number("scale", scale, above=0)
        self.scale = float(scale)
        self.step_fraction = 1.0

    def for_steps_of(self, fraction: float) -> Delta:
        own = copy.copy(self)
        own.step_fraction = float(fraction)
        return own

    def message(self, weights: Vector, seen: Vector) -> Vector:
        change = super().message(weights, seen)
        return change if self.step_fraction == 1 else self.step_fraction * change

    def after_absence(self, weights: Vector, start: Vector, num_workers: int) -> Vector:
        """Return weights with which the center moves by the average of n such changes."""
        return start + min(1.0, 1.0 / (num_workers * self.scale)) * (weights - start)

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        center = center + (change if self.scale == 1 else self.scale * change)
        return Update(center, slots, center)
