"""Two stages: coarse and asynchronous, then fine and with bounded lead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from keras_het.asynchronous.rules.update_rule import PushMeta, SendsChange, Signal, Slots, Update
from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number
from keras_het.planning.roles.local_steps import LocalStepsPlan, plan_local_steps

PRESET_RATIO = 0.25
"""Default fraction of the values that the slowest worker sends."""
_FAR = 1 << 40  # pushes; a worker that has left is never the slowest
_REMEMBERED_PUSHES = 8  # of each worker; its latest samples determine its share


class ASHL(SendsChange):
    r"""Different numbers of local steps for workers of different speed, in two stages.

    Worker i takes :math:`H_i` local steps, sends the largest values of its change :math:`\Delta_i`,
    of which the center adds the worker's data share,

    .. math:: c \leftarrow c + D_i \, top_{R_i}(\Delta_i), \qquad \textstyle\sum_i D_i = 1,

    and continues from the center. While the loss is above `loss_threshold`, no worker waits (AHL,
    large :math:`H_i`). Then comes the second stage (SHL, small :math:`H_i`), in which a push waits
    while its worker is `largest_lead` pushes ahead of the slowest.

    Without `data_shares` and steps, :math:`H_i` and :math:`R_i` of each stage follow from the times
    that workers measure (`plan`), and :math:`D_i` from the samples behind their pushes, by sums
    :math:`s` that all shrink at each push of :math:`n_i` samples before it is added:

    .. math::
        s \leftarrow \left(1 - \frac{1}{8n}\right) s, \qquad s_i \leftarrow s_i + n_i, \qquad
        D_i = s_i \Big/ \textstyle\sum_j s_j,

    where a worker that has not pushed yet counts as much as the average of those that have, and a
    worker that has left does not count. At equal push rates and equal batches this is
    :math:`H_i / \sum_j H_j`, as in the paper.

    The participant that knows the training loss begins the second stage (`Signal.LOSS_REACHED`).
    From then on, a worker that hangs holds up the others.

    Args:
        data_shares: :math:`D_i` of every worker, which sum to 1; None to measure.
        steps: local steps of every worker in the first stage; None to measure.
        second_steps: local steps of every worker in the second stage, no more than in the first.
        loss_threshold: loss at which the second stage begins; must be given.
        compression_ratios: :math:`R_i`, fraction of the values that every worker sends; None for
            all, or to measure.
        largest_lead: number of pushes in the second stage by which a worker may be ahead of the
            slowest.
        num_workers: number of workers, if steps and shares are measured.
        preset_steps: steps of the slowest worker in the first stage, if measured.
        second_preset_steps: the same for the second stage.
        preset_ratio: fraction of the values that the slowest worker sends, if measured; 1 for all
            values of all workers.

    Raises:
        ValueError: if lengths differ or a number is out of range.

    Reference:
        Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
        Heterogeneous Environments", IEEE Transactions on Computers, 2023, algorithms 1 to 3 (doi
        10.1109/TC.2023.3315847). The paper makes the center's factor depend on :math:`D_i`; the
        choice of :math:`D_i` itself, the moving sums, the presets, the default lead of 3 and error
        feedback (keeping the unsent part of a message for the next) are our reading.
    """

    name: ClassVar[str] = "ashl"
    settings = (
        *("data_shares", "steps", "second_steps", "compression_ratios", "loss_threshold"),
        *("largest_lead", "num_workers", "preset_steps", "second_preset_steps", "preset_ratio"),
    )
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
        self.preset_steps, self.second_preset_steps = preset_steps, second_preset_steps
        self.preset_ratio = preset_ratio
        self.num_workers: int = len(data_shares or ()) if num_workers is None else num_workers
        self._check()

    @property
    def is_measured(self) -> bool:
        return self.data_shares is None

    def plan(
        self,
        iteration_seconds: Sequence[float],
        push_seconds: Sequence[float],
        pull_seconds: Sequence[float],
        stage: int,
    ) -> LocalStepsPlan:
        """Plan steps and compression of every worker from measured times: algorithms 1 and 2."""
        times = (iteration_seconds, push_seconds, pull_seconds)
        return plan_local_steps(*times, self._preset(stage), self.preset_ratio)

    def _check(self) -> None:
        check_number("largest_lead", self.largest_lead, least=1)
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
        check_number("num_workers", self.num_workers, least=1)
        check_number(
            "second_preset_steps", self.second_preset_steps, least=1, most=self.preset_steps
        )
        check_number("preset_ratio", self.preset_ratio, above=0, most=1)

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

    def create_slots(self, center: Vector) -> Slots:
        slots: dict[str, Vector] = {
            "second_stage": np.zeros((), np.float32),
            "pushes": np.zeros(self.num_workers, np.int64),
        }
        if self.is_measured:
            slots["samples"] = np.zeros(self.num_workers, np.float32)
        return slots

    def signal(self, slots: Slots, worker: int, signal: int) -> tuple[Slots, int]:
        if signal == Signal.LOSS_REACHED:
            slots = {**slots, "second_stage": np.ones((), np.float32)}
        if signal == Signal.LEAVE:
            slots = _add_pushes(slots, worker, _FAR)
        return slots, int(slots["second_stage"])

    def compression_ratio(self, worker: int) -> float | None:
        if self.compression_ratios is None:
            return None if self.preset_ratio == 1 else 1.0
        return None if min(self.compression_ratios) == 1 else self.compression_ratios[worker]

    def is_stage_over(self, loss: float) -> bool:
        return bool(loss <= self.loss_threshold)

    def note_presence(self, slots: Slots, worker: int) -> Slots:
        """Return the state in which a worker that had left continues level with the slowest."""
        pushes = slots["pushes"]
        if pushes[worker] < _FAR:
            return slots
        slowest = pushes.min()
        return _add_pushes(slots, worker, (slowest if slowest < _FAR else 0) - pushes[worker])

    def is_turn(self, slots: Slots, worker: int) -> bool:
        pushes = slots["pushes"]
        return bool(not slots["second_stage"] or pushes[worker] - pushes.min() < self.largest_lead)

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        slots = self.pass_turn(slots, meta.worker)
        share, slots = self._share(slots, meta)
        center = center + share * change
        return Update(center, slots, center)

    def pass_turn(self, slots: Slots, worker: int) -> Slots:
        return _add_pushes(slots, worker, int(slots["second_stage"]))

    def _share(self, slots: Slots, meta: PushMeta) -> tuple[np.float32, Slots]:
        """Return D of a worker whose push is being taken, and the state."""
        if self.data_shares is not None:
            return np.float32(self.data_shares[meta.worker]), slots
        sums = np.float32(1 - 1 / (_REMEMBERED_PUSHES * self.num_workers)) * slots["samples"]
        sums[meta.worker] += np.float32(meta.samples)
        is_here = slots["pushes"] < _FAR
        known = sums[is_here & (sums > 0)]
        # A worker that has not pushed yet counts as the average of the others.
        total = known.sum()
        if len(known):
            total += total / np.float32(len(known)) * np.float32(is_here.sum() - len(known))
        return sums[meta.worker] / total if total else np.float32(0), {**slots, "samples": sums}

    def local_steps(self, worker: int, stage: int) -> int:
        """Return the local steps from one exchange to the next; the preset if they are measured."""
        chosen = self.second_steps if stage else self.steps
        return self._preset(stage) if chosen is None else chosen[worker]

    def _preset(self, stage: int) -> int:
        return self.second_preset_steps if stage else self.preset_steps


def _ratios(
    ratios: Sequence[float] | None, steps: Sequence[int] | None
) -> tuple[float, ...] | None:
    """Return the given ratios; all values for each worker that has steps but no ratio."""
    if ratios is None:
        return None if steps is None else (1.0,) * len(steps)
    return tuple(map(float, ratios))


def _add_pushes(slots: Slots, worker: int, number: int) -> Slots:
    pushes = slots["pushes"].copy()
    pushes[worker] += number
    return {**slots, "pushes": pushes}
