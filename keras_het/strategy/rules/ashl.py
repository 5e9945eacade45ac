"""Two stages: coarse and asynchronous, then fine and with bounded lead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from keras_het.planning.local_steps import LocalStepsPlan
from keras_het.strategy.rules.update_rule import PushMeta, Signal
from keras_het.strategy.rules.worker_sides import SendsChange

_FAR = 1 << 40  # pushes; whoever has left is never the slowest


class ASHL(SendsChange):
    r"""Workers of different speed take different numbers of local steps, in two stages.

    Worker i takes :math:`H_i` local steps, sends the largest values of its change
    :math:`\Delta_i`, of which the center adds its share of the data,

    .. math:: c \leftarrow c + D_i \, top_{R_i}(\Delta_i), \qquad \textstyle\sum_i D_i = 1,

    and goes on from the center. While the loss is above `loss_threshold` nobody waits (AHL, large
    :math:`H_i`). Then comes the second stage (SHL, small :math:`H_i`), in which a worker that has
    pushed more than `largest_lead` times more often than the slowest must try again later.

    The stage of the center is the slot `second_stage`; whoever knows the loss of the training
    changes it (`Signal.LOSS_REACHED`). A worker that hangs then holds up the others. A worker that
    was told to wait sends the same again, with the number of its first try: some parts may have
    taken it already.

    Args:
        data_shares: :math:`D_i` of every worker, which sum to 1.
        steps: local steps of every worker in the first stage.
        second_steps: local steps of every worker in the second stage, not more than in the first.
        compression_ratios: :math:`R_i`, part of the values that every worker sends; None for all.
        loss_threshold: loss at which the second stage begins.
        largest_lead: pushes of the second stage by which a worker may be ahead of the slowest.

    Raises:
        ValueError: if lengths differ or a number is out of its range.

    Reference:
        Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
        Heterogeneous Environments", IEEE Transactions on Computers, 2023, algorithms 1 to 3
        (doi 10.1109/TC.2023.3315847). The paper makes the center's factor depend on :math:`D_i`;
        that it is :math:`D_i` itself, the default lead of 3 and keeping what a message does not
        carry for the next (error feedback) are our reading.
    """

    name: ClassVar[str] = "ashl"
    may_wait: ClassVar[bool] = True

    def __init__(
        self,
        data_shares: Sequence[float],
        steps: Sequence[int],
        second_steps: Sequence[int],
        loss_threshold: float,
        compression_ratios: Sequence[float] | None = None,
        largest_lead: int = 3,
    ) -> None:
        self.data_shares = tuple(map(float, data_shares))
        self.steps, self.second_steps = tuple(map(int, steps)), tuple(map(int, second_steps))
        ratios = [1.0] * len(self.steps) if compression_ratios is None else compression_ratios
        self.compression_ratios = tuple(map(float, ratios))
        self.loss_threshold = loss_threshold
        self.largest_lead = largest_lead
        self._check()

    @classmethod
    def from_plans(
        cls,
        first: LocalStepsPlan,
        second: LocalStepsPlan,
        loss_threshold: float,
        largest_lead: int = 3,
    ) -> ASHL:
        """The rule for what `planning.plan_local_steps` chose from measured times.

        Args:
            first: plan of the first stage; its data shares and compression ratios are used.
            second: plan of the second stage, of a smaller preset.
            loss_threshold: loss at which the second stage begins.
            largest_lead: pushes of the second stage by which a worker may be ahead.
        """
        return cls(
            first.data_shares,
            first.steps,
            second.steps,
            loss_threshold,
            first.compression_ratios,
            largest_lead,
        )

    def _check(self) -> None:
        lists = (self.steps, self.second_steps, self.compression_ratios)
        if not self.data_shares or any(len(own) != len(self.data_shares) for own in lists):
            raise ValueError(
                "data_shares, steps, second_steps and compression_ratios need one entry for each "
                f"worker. Received: {self.get_config()}."
            )
        shares_fit = min(self.data_shares) > 0 and abs(sum(self.data_shares) - 1) < 1e-3
        pairs = zip(self.second_steps, self.steps, strict=True)
        steps_fit = all(1 <= second <= first for second, first in pairs)
        ratios_fit = all(0 < ratio <= 1 for ratio in self.compression_ratios)
        if not (shares_fit and steps_fit and ratios_fit and self.largest_lead >= 1):
            raise ValueError(
                "data_shares must be positive and sum to 1, 1 <= second_steps <= steps, "
                "compression_ratios be above 0 and at most 1, and largest_lead be at least 1. "
                f"Received: {self.get_config()}. planning.plan_local_steps chooses them."
            )

    def create_slots(self, center: Any) -> dict[str, Any]:
        """The stage (0 or 1), and every worker's pushes in the second one."""
        del center
        pushes = tf.zeros([len(self.data_shares)], tf.int64)
        return {
            "second_stage": tf.Variable(0.0, trainable=False),
            "pushes": tf.Variable(pushes, trainable=False),
        }

    def signal(self, slots: dict[str, Any], client: Any, signal: Any) -> Any:
        """Begins the second stage when the loss is reached; nobody waits for who has left."""
        reached = tf.cast(tf.equal(signal, int(Signal.LOSS_REACHED)), tf.float32)
        stage = slots["second_stage"].assign(
            tf.maximum(slots["second_stage"], reached), read_value=True
        )
        leaves = tf.cast(tf.equal(signal, int(Signal.LEAVE)), tf.int64)
        far_ahead = leaves * _FAR * tf.one_hot(client, len(self.data_shares), dtype=tf.int64)
        with tf.control_dependencies([slots["pushes"].assign_add(far_ahead)]):
            return tf.cast(stage, tf.int32)

    def compression_ratio(self, worker: int) -> float | None:
        """R of the worker; None if all send everything."""
        return None if min(self.compression_ratios) == 1 else self.compression_ratios[worker]

    def is_stage_over(self, loss: float) -> bool:
        """Whether the loss of the second stage is reached."""
        return bool(self.is_second_stage(loss))

    def note_presence(self, slots: dict[str, Any], client: Any) -> Any:
        """A worker that pushes has not left: it goes on beside the slowest."""
        pushes = slots["pushes"].read_value()
        slowest = tf.reduce_min(pushes)
        beside = tf.where(slowest >= _FAR, tf.zeros_like(slowest), slowest)
        own = tf.clip_by_value(client, 0, len(self.data_shares) - 1)
        now = tf.where(pushes[own] >= _FAR, beside, pushes[own])
        return slots["pushes"].scatter_nd_update([[own]], [now])

    def is_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Whether the worker would not get too far ahead of the slowest."""
        lead = slots["pushes"][self._worker(meta)] - tf.reduce_min(slots["pushes"])
        return (slots["second_stage"] < 1) | (lead < self.largest_lead)

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Adds the worker's share of the change, and counts the push in the second stage."""
        worker = self._worker(meta)
        counted = tf.cast(slots["second_stage"], tf.int64)[None]
        pushes = slots["pushes"].scatter_nd_add(tf.reshape(worker, [1, 1]), counted)
        with tf.control_dependencies([tf.identity(pushes)]):
            center.assign_add(tf.gather(tf.constant(self.data_shares), worker) * change)
        return center.read_value()

    def _worker(self, meta: PushMeta) -> Any:
        return tf.clip_by_value(meta.client, 0, len(self.data_shares) - 1)

    def enter_second_stage(self, slots: dict[str, Any]) -> None:
        """Begins the second stage of a part; pushes are counted from here.

        Args:
            slots: the variables of `create_slots`.
        """
        slots["second_stage"].assign(1.0)

    def is_second_stage(self, loss: Any) -> Any:
        """Whether a training with this loss is in the second stage.

        Args:
            loss: scalar, number or tensor.
        """
        return loss <= self.loss_threshold

    def local_steps(self, worker: int, stage: int) -> int:
        """Local steps from one exchange to the next.

        Args:
            worker: number of the worker.
            stage: 1 in the second stage, 0 before.
        """
        return (self.second_steps if stage else self.steps)[worker]

    def get_config(self) -> dict[str, Any]:
        """The settings."""
        return {
            "data_shares": list(self.data_shares),
            "steps": list(self.steps),
            "second_steps": list(self.second_steps),
            "loss_threshold": self.loss_threshold,
            "compression_ratios": list(self.compression_ratios),
            "largest_lead": self.largest_lead,
        }
