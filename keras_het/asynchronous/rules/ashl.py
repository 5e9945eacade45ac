"""Two stages: coarse and asynchronous, then fine and with bounded lead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.update_rule import PushMeta, Signal
from keras_het.asynchronous.rules.worker_sides import SendsChange
from keras_het.planning.roles.local_steps import LocalStepsPlan, plan_local_steps

PRESET_RATIO = 0.25
"""Part of the values that the slowest worker sends, where it is not given."""
_FAR = 1 << 40  # pushes; whoever has left is never the slowest
_REMEMBERED_PUSHES = 8  # of each worker; its latest samples say its share


class ASHL(SendsChange):
    r"""Workers of different speed take different numbers of local steps, in two stages.

    Worker i takes :math:`H_i` local steps, sends the largest values of its change
    :math:`\Delta_i`, of which the center adds its share of the data,

    .. math:: c \leftarrow c + D_i \, top_{R_i}(\Delta_i), \qquad \textstyle\sum_i D_i = 1,

    and goes on from the center. While the loss is above `loss_threshold` nobody waits (AHL, large
    :math:`H_i`). Then comes the second stage (SHL, small :math:`H_i`), in which a worker that has
    pushed more than `largest_lead` times more often than the slowest must try again later.

    Without `data_shares` and steps, :math:`H_i` and :math:`R_i` of each stage follow from the times
    that workers measure (`plan`), and :math:`D_i` from the samples behind their pushes: of sums
    :math:`s`, all of which a push of :math:`n_i` samples first shrinks,

    .. math::
        s \leftarrow \left(1 - \frac{1}{8n}\right) s, \qquad s_i \leftarrow s_i + n_i, \qquad
        D_i = s_i \Big/ \textstyle\sum_j s_j,

    where who has not pushed yet counts as much as those who have on average, and who has left does
    not count. At equal rates of pushes and equal batches that is
    :math:`H_i / \sum_j H_j`, the paper's.

    The stage of the center is the slot `second_stage`; whoever knows the loss of the training
    changes it (`Signal.LOSS_REACHED`). A worker that hangs then holds up the others. A worker that
    was told to wait sends the same again, with the number of its first try: some parts may have
    taken it already.

    Args:
        data_shares: :math:`D_i` of every worker, which sum to 1; None to measure.
        steps: local steps of every worker in the first stage; None to measure.
        second_steps: local steps of every worker in the second stage, not more than in the first.
        loss_threshold: loss at which the second stage begins; must be given.
        compression_ratios: :math:`R_i`, part of the values that every worker sends; None for all,
            or to measure.
        largest_lead: pushes of the second stage by which a worker may be ahead of the slowest.
        num_workers: number of workers, if their numbers are measured.
        preset_steps: where they are measured, steps of the slowest worker in the first stage.
        second_preset_steps: likewise in the second stage.
        preset_ratio: likewise, part of the values that the slowest worker sends; 1 for all values
            of everybody.

    Raises:
        ValueError: if lengths differ or a number is out of its range.

    Reference:
        Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
        Heterogeneous Environments", IEEE Transactions on Computers, 2023, algorithms 1 to 3
        (doi 10.1109/TC.2023.3315847). The paper makes the center's factor depend on :math:`D_i`;
        that it is :math:`D_i` itself, the moving sums, the presets, the default lead of 3 and
        keeping what a message does not carry for the next (error feedback) are our reading.
    """

    name: ClassVar[str] = "ashl"
    may_wait: ClassVar[bool] = True

    def __init__(
        self,
        data_shares: Sequence[float] | None = None,
        steps: Sequence[int] | None = None,
        second_steps: Sequence[int] | None = None,
        loss_threshold: float | None = None,
        compression_ratios: Sequence[float] | None = None,
        largest_lead: int = 3,
        num_workers: int | None = None,
        preset_steps: int = 8,
        second_preset_steps: int = 2,
        preset_ratio: float = PRESET_RATIO,
    ) -> None:
        if loss_threshold is None:
            raise ValueError(
                "ASHL needs a loss_threshold, at which its second stage begins. Received: None. "
                "Give a training loss that is reached after about half of the epochs."
            )
        self.data_shares = None if data_shares is None else tuple(map(float, data_shares))
        self.steps = None if steps is None else tuple(map(int, steps))
        self.second_steps = None if second_steps is None else tuple(map(int, second_steps))
        self.compression_ratios = _ratios(compression_ratios, self.steps)
        self.loss_threshold = loss_threshold
        self.largest_lead = largest_lead
        self.presets = (preset_steps, second_preset_steps)
        self.preset_ratio = preset_ratio
        self.num_workers: int = len(data_shares or ()) if num_workers is None else num_workers
        self._check()

    @property
    def is_measured(self) -> bool:
        """Whether steps and compression follow from times that workers measure."""
        return self.data_shares is None

    def plan(
        self,
        iteration_seconds: Sequence[float],
        push_seconds: Sequence[float],
        pull_seconds: Sequence[float],
        stage: int,
    ) -> LocalStepsPlan:
        """Steps and compression of every worker, from measured times: algorithms 1 and 2.

        Args:
            iteration_seconds: time of one local step of every worker, above 0.
            push_seconds: time in which every worker sends all values, at least 0.
            pull_seconds: time in which every worker receives the center, at least 0.
            stage: 1 in the second stage, 0 before.

        Raises:
            ValueError: as `planning.plan_local_steps` does.
        """
        times = (iteration_seconds, push_seconds, pull_seconds)
        return plan_local_steps(*times, self.presets[1 if stage else 0], self.preset_ratio)

    def _check(self) -> None:
        if self.largest_lead < 1:
            raise ValueError(f"largest_lead must be at least 1. Received: {self.largest_lead}.")
        if self.is_measured:
            self._check_presets()
        else:
            self._check_given()

    def _check_presets(self) -> None:
        given = (self.steps, self.second_steps, self.compression_ratios)
        if any(own is not None for own in given):
            raise ValueError(
                "steps, second_steps and compression_ratios come with data_shares, or are measured "
                f"with them. Received: {self.get_config()}."
            )
        first, second = self.presets
        if not (1 <= second <= first and 0 < self.preset_ratio <= 1 and self.num_workers >= 1):
            raise ValueError(
                "To measure, ASHL needs num_workers of at least 1, 1 <= second_preset_steps <= "
                f"preset_steps, and preset_ratio above 0 and at most 1. Received: "
                f"{self.get_config()}. Else give data_shares, steps and second_steps."
            )

    def _check_given(self) -> None:
        lists = (self.steps, self.second_steps, self.compression_ratios)
        shares = self.data_shares or ()
        counts = {len(own or ()) for own in lists} | {self.num_workers}
        if counts != {len(shares)} or not shares:
            raise ValueError(
                "data_shares, steps, second_steps and compression_ratios need one entry for each "
                f"worker. Received: {self.get_config()}."
            )
        shares_fit = min(shares) > 0 and abs(sum(shares) - 1) < 1e-3
        pairs = zip(self.second_steps or (), self.steps or (), strict=True)
        steps_fit = all(1 <= second <= first for second, first in pairs)
        ratios_fit = all(0 < ratio <= 1 for ratio in self.compression_ratios or ())
        if not (shares_fit and steps_fit and ratios_fit):
            raise ValueError(
                "data_shares must be positive and sum to 1, 1 <= second_steps <= steps, and "
                f"compression_ratios be above 0 and at most 1. Received: {self.get_config()}. "
                "planning.plan_local_steps chooses them."
            )

    def create_slots(self, center: Any) -> dict[str, Any]:
        """The stage (0 or 1), every worker's pushes in the second one, its samples if measured."""
        del center
        workers = [self.num_workers]
        slots = {
            "second_stage": tf.Variable(0.0, trainable=False),
            "pushes": tf.Variable(tf.zeros(workers, tf.int64), trainable=False),
        }
        if self.is_measured:
            slots["samples"] = tf.Variable(tf.zeros(workers), trainable=False)
        return slots

    def signal(self, slots: dict[str, Any], client: Any, signal: Any) -> Any:
        """Begins the second stage when the loss is reached; nobody waits for who has left."""
        reached = tf.cast(tf.equal(signal, int(Signal.LOSS_REACHED)), tf.float32)
        stage = slots["second_stage"].assign(
            tf.maximum(slots["second_stage"], reached), read_value=True
        )
        leaves = tf.cast(tf.equal(signal, int(Signal.LEAVE)), tf.int64)
        far_ahead = leaves * _FAR * tf.one_hot(client, self.num_workers, dtype=tf.int64)
        with tf.control_dependencies([slots["pushes"].assign_add(far_ahead)]):
            return tf.cast(stage, tf.int32)

    def compression_ratio(self, worker: int) -> float | None:
        """R of the worker, where it is measured the first one; None if all send everything."""
        if self.compression_ratios is None:
            return None if self.preset_ratio == 1 else 1.0
        return None if min(self.compression_ratios) == 1 else self.compression_ratios[worker]

    def is_stage_over(self, loss: float) -> bool:
        """Whether the loss of the second stage is reached."""
        return bool(self.is_second_stage(loss))

    def note_presence(self, slots: dict[str, Any], client: Any) -> Any:
        """A worker that pushes has not left: it goes on beside the slowest."""
        pushes = slots["pushes"].read_value()
        slowest = tf.reduce_min(pushes)
        beside = tf.where(slowest >= _FAR, tf.zeros_like(slowest), slowest)
        own = tf.clip_by_value(client, 0, self.num_workers - 1)
        now = tf.where(pushes[own] >= _FAR, beside, pushes[own])
        return slots["pushes"].scatter_nd_update([[own]], [now])

    def is_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Whether the worker would not get too far ahead of the slowest."""
        lead = slots["pushes"][self._worker(meta)] - tf.reduce_min(slots["pushes"])
        return (slots["second_stage"] < 1) | (lead < self.largest_lead)

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Adds the worker's share of the change, and counts the push in the second stage."""
        with tf.control_dependencies([self.pass_turn(slots, meta)]):
            center.assign_add(self._share(slots, self._worker(meta), meta.samples) * change)
        return center.read_value()

    def pass_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Counts the push in the second stage."""
        counted = tf.cast(slots["second_stage"], tf.int64)[None]
        worker = tf.reshape(self._worker(meta), [1, 1])
        return tf.identity(slots["pushes"].scatter_nd_add(worker, counted))

    def _share(self, slots: dict[str, Any], worker: Any, samples: Any) -> Any:
        """D of a worker whose push of some samples is taken now."""
        if self.data_shares is not None:
            return tf.gather(tf.constant(self.data_shares), worker)
        is_own = tf.one_hot(worker, self.num_workers)
        kept = 1 - 1 / (_REMEMBERED_PUSHES * self.num_workers)
        sums = slots["samples"].assign(kept * slots["samples"] + samples * is_own, read_value=True)
        is_here = tf.cast(slots["pushes"] < _FAR, tf.float32)
        has_pushed = is_here * tf.cast(sums > 0, tf.float32)
        total = tf.reduce_sum(has_pushed * sums)
        # Who has not pushed yet counts as the others on average.
        average = tf.math.divide_no_nan(total, tf.reduce_sum(has_pushed))
        total += average * tf.reduce_sum(is_here - has_pushed)
        return tf.math.divide_no_nan(sums[worker], total)

    def _worker(self, meta: PushMeta) -> Any:
        return tf.clip_by_value(meta.client, 0, self.num_workers - 1)

    def is_second_stage(self, loss: Any) -> Any:
        """Whether a training with this loss is in the second stage.

        Args:
            loss: scalar, number or tensor.
        """
        return loss <= self.loss_threshold

    def local_steps(self, worker: int, stage: int) -> int:
        """Local steps from one exchange to the next; where they are measured, the preset.

        Args:
            worker: number of the worker.
            stage: 1 in the second stage, 0 before.
        """
        chosen = self.second_steps if stage else self.steps
        return self.presets[1 if stage else 0] if chosen is None else chosen[worker]

    def get_config(self) -> dict[str, Any]:
        """The settings."""
        lists = ("data_shares", "steps", "second_steps", "compression_ratios")
        return {
            **{name: _plain(getattr(self, name)) for name in lists},
            "loss_threshold": self.loss_threshold,
            "largest_lead": self.largest_lead,
            "num_workers": self.num_workers,
            "preset_steps": self.presets[0],
            "second_preset_steps": self.presets[1],
            "preset_ratio": self.preset_ratio,
        }


def _plain(numbers: Sequence[float] | None) -> list[float] | None:
    return None if numbers is None else list(numbers)


def _ratios(
    ratios: Sequence[float] | None, steps: Sequence[int] | None
) -> tuple[float, ...] | None:
    """The ratios that were given; all values for each worker that has steps but no ratio."""
    if ratios is None:
        return None if steps is None else (1.0,) * len(steps)
    return tuple(map(float, ratios))
