"""The worker's own optimizer runs; its weight change is added to the center."""

from __future__ import annotations

import copy
from typing import ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.update_rule import PushMeta, SendsChange, Slots


class Delta(SendsChange):
    r"""Sum of the workers' changes: :math:`c \leftarrow c + s\,\Delta_i`, answered with :math:`c`.

    A worker runs any optimizer on its weights, sends the difference from the weights it last
    received, and continues from the answer. With s = 1 every worker's progress counts in full, as
    in BytePS's asynchronous mode, which equals an asynchronous parameter server because the center
    is the sum of all changes.

    A worker whose steps have only a fraction f of the global batch takes 1 / f steps for the
    samples of one. It sends :math:`f \Delta_i`, so that a sample moves the center equally far on
    every worker, and the learning rate for the global batch fits all.

    Workers that train on alone while the service is lost all start from the same weights. Their
    changes would add up to n times one of them, and each may be large; a worker therefore keeps 1 /
    n of its progress alone (`after_absence`).

    Args:
        scale: factor s; 1 / number of workers averages.

    Attributes:
        step_fraction: f.

    Raises:
        ValueError: if `scale` is not positive.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020; asynchronous mode of its implementation.
    """

    name: ClassVar[str] = "delta"
    settings = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"scale must be positive. Received: {scale}. 1 adds changes in full.")
        self.scale = scale
        self.step_fraction = 1.0

    def for_steps_of(self, fraction: float) -> Delta:
        """Return this rule for a worker whose steps have a fraction of the global batch."""
        own = copy.copy(self)
        own.step_fraction = fraction
        return own

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        change = super().message(weights, seen)
        return change if self.step_fraction == 1 else self.step_fraction * change

    def after_absence(self, weights: tf.Tensor, start: tf.Tensor, num_workers: int) -> tf.Tensor:
        """Return weights with which the center moves by the average of n such changes."""
        return start + min(1.0, 1.0 / (num_workers * self.scale)) * (weights - start)

    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        center.assign_add(change if self.scale == 1 else self.scale * change)
        return center.read_value()

    def norm_after(
        self, center_norm: float | tf.Tensor, change_norm: float | tf.Tensor
    ) -> float | tf.Tensor | None:
        """Return the triangle-inequality bound; None if a subclass updates in another way."""
        if type(self).update is not Delta.update:
            return None
        return center_norm + self.scale * change_norm
