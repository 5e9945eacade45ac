"""A decision about shares, with its basis."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_het.planning.times.time_model import LinearTimeModel
from keras_het.planning.times.time_model_fit import Measurement

_SHARES_ON_ONE_LINE = 16


@dataclasses.dataclass(frozen=True)
class BalancePlan:
    """Each replica's samples of the global batch, and the reason for them.

    Args:
        step: step after which the plan was made.
        policy: name of the policy.
        shares: samples of each replica; they sum to the global batch.
        reason: the reason, in a few words.
        predicted_seconds: predicted compute time of each replica, None if unknown; 0 for an
            unused replica. Empty if the policy does not predict.
        step_seconds: predicted compute time of the slowest replica, None if unknown.
        previous_step_seconds: the same for the previous shares, under the same models.
        step_seconds_if_all_used: the same if every usable but unused replica had at least one
            sample; None if there is no such replica.
        measured: latest measurement of each replica. Empty if the policy keeps none.
        models: time model of each replica. Empty if the policy has none.
    """

    step: int
    policy: str
    shares: tuple[int, ...]
    reason: str
    predicted_seconds: tuple[float | None, ...] = ()
    step_seconds: float | None = None
    previous_step_seconds: float | None = None
    step_seconds_if_all_used: float | None = None
    measured: tuple[Measurement | None, ...] = ()
    models: tuple[LinearTimeModel | None, ...] = ()

    @property
    def unused(self) -> tuple[int, ...]:
        """Replicas without samples."""
        return tuple(replica for replica, share in enumerate(self.shares) if not share)

    @property
    def gain(self) -> float | None:
        """Predicted fraction of the step's compute time that is saved; None if unknown."""
        if self.step_seconds is None or not self.previous_step_seconds:
            return None
        return 1.0 - self.step_seconds / self.previous_step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain Python values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("measured", "models"):
            values[name] = [item and dataclasses.asdict(item) for item in values[name]]
        for name in ("shares", "predicted_seconds"):
            values[name] = list(values[name])
        return {**values, "unused": list(self.unused), "gain": self.gain}

    def __str__(self) -> str:
        shown = " ".join(map(str, self.shares[:_SHARES_ON_ONE_LINE]))
        if len(self.shares) > _SHARES_ON_ONE_LINE:
            shown += f" ... ({len(self.shares)} replicas)"
        begin = f"step {self.step}: shares" if self.step >= 0 else "initial shares"
        text = f"{begin} {shown} ({self.policy}: {self.reason}"
        if self.step_seconds is not None and self.previous_step_seconds is not None:
            before, after = self.previous_step_seconds * 1e3, self.step_seconds * 1e3
            text += f"; predicted step time {before:.1f} -> {after:.1f} ms"
        if self.step_seconds_if_all_used is not None:
            which = " ".join(map(str, self.unused))
            text += f"; without using {which}, {self.step_seconds_if_all_used * 1e3:.1f} ms with it"
        return text + ")"
