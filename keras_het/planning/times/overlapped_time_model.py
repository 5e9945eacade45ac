"""Time of a step whose communication overlaps with the backward pass."""

from __future__ import annotations

import dataclasses

from keras_het.planning.times.time_model import LinearTimeModel, check_not_negative


@dataclasses.dataclass(frozen=True)
class OverlappedTimeModel:
    r"""Duration of a replica's step if gradients are sent during the backward pass.

    With a(n) the time of everything but the backward pass and P(n) that of the backward pass,

    .. math:: t(n) = \max(a + P + T_u,\; a + \gamma P + T_o + T_u)

    The first bucket of gradients is ready when the fraction gamma of the backward pass is complete;
    from then on the all-reduce of all but the last bucket takes :math:`T_o` and overlaps, and that
    of the last bucket, :math:`T_u`, never does. A replica with a long backward pass hides the
    communication; one with a short backward pass is bound by it. Both terms are nondecreasing in n,
    so the min-max program needs no special cases.

    Args:
        other: time of loading, forward and update, a straight line over the samples.
        backward: time of the backward pass, a straight line over the samples.
        overlap_start: gamma, the fraction of the backward pass before the first bucket is ready,
            from 0 to 1.
        overlapped_seconds: all-reduce time of the buckets that can overlap, at least 0.
        last_bucket_seconds: all-reduce time of the last bucket, at least 0.

    Raises:
        TypeError: if a number is not real.
        ValueError: if a number is out of range.

    Reference:
        Nie, Maghakian and Liu, "Cannikin: Optimal Adaptive Distributed DNN Training over
        Heterogeneous Clusters", Middleware 2024, arXiv:2402.05302. Implemented from its
        description, not from its code.
    """

    other: LinearTimeModel
    backward: LinearTimeModel
    overlap_start: float
    overlapped_seconds: float
    last_bucket_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("overlap_start", "overlapped_seconds", "last_bucket_seconds"):
            check_not_negative(name, getattr(self, name))
        if self.overlap_start > 1:
            raise ValueError(
                "`overlap_start` is a fraction of the backward pass, from 0 to 1. "
                f"Received: overlap_start={self.overlap_start!r}. Divide seconds by those of the "
                "backward pass."
            )

    def seconds(self, samples: float) -> float:
        """Return the end of the step, counted from its start.

        Args:
            samples: number of samples of the replica's share; at least 0.

        Returns:
            Time in seconds.

        Raises:
            TypeError: if `samples` is not a real number.
            ValueError: if `samples` is negative or not finite.
        """
        before, backward = self.other.seconds(samples), self.backward.seconds(samples)
        computed = before + backward
        sent = before + self.overlap_start * backward + self.overlapped_seconds
        return max(computed, sent) + self.last_bucket_seconds

    def hides_communication(self, samples: float) -> bool:
        """Tell whether the replica is bound by its computation.

        Args:
            samples: number of samples of the replica's share; at least 0.

        Returns:
            True if (1 - gamma) P >= T_o, in which case the overlapping buckets cost nothing.
        """
        hidden = (1 - self.overlap_start) * self.backward.seconds(samples)
        return hidden >= self.overlapped_seconds
