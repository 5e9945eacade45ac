"""Time a device needs for a number of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TimeModel(Protocol):
    """Compute time of one step as a nondecreasing function of a replica's share."""

    def seconds(self, samples: float) -> float:
        """Return the compute time of one step.

        Args:
            samples: Number of samples of the replica's share; at least 0.

        Returns:
            Time in seconds; never less for more samples.
        """


@dataclass(frozen=True)
class LinearTimeModel:
    r"""Compute time of one step as a straight line over the samples of a replica.

    .. math:: t(n) = fixed\_seconds + seconds\_per\_sample \cdot n

    The fixed part is the cost of a step regardless of its share (kernel launches, Python); the
    slope is the inverse of the device's speed in samples per second.

    Args:
        fixed_seconds: Time of a step without samples, in seconds; at least 0.
        seconds_per_sample: Additional time of each sample, in seconds; at least 0.

    Raises:
        TypeError: If an argument is not a real number.
        ValueError: If an argument is negative or not finite.
    """

    fixed_seconds: float
    seconds_per_sample: float

    def __post_init__(self) -> None:
        for name in ("fixed_seconds", "seconds_per_sample"):
            check_not_negative(name, getattr(self, name))

    def seconds(self, samples: float) -> float:
        """Return the compute time of one step.

        Args:
            samples: Number of samples of the replica's share; at least 0.

        Returns:
            Time in seconds.

        Raises:
            TypeError: If `samples` is not a real number.
            ValueError: If `samples` is negative or not finite.
        """
        check_not_negative("samples", samples)
        return self.fixed_seconds + self.seconds_per_sample * samples


@dataclass(frozen=True)
class MicroBatchTimeModel(LinearTimeModel):
    r"""Compute time of one step of a replica that computes a large share in parts.

    With m the micro-batch size, a share of n samples has p parts, each with fixed costs of its own:

    .. math::
        p(n) = \max(1, \lceil n / m \rceil), \quad
        t(n) = fixed\_seconds + (p(n) - 1)\, part\_seconds + seconds\_per\_sample \cdot n

    Args:
        fixed_seconds: Time of a step of one part without samples, in seconds; at least 0.
        seconds_per_sample: Additional time of each sample, in seconds; at least 0.
        part_seconds: Additional time of each part after the first one, in seconds; at least 0.
        micro_batch_size: Most samples of a part; at least 1.

    Raises:
        TypeError: If an argument is not a real number.
        ValueError: If an argument is negative or not finite, or a part has no samples.
    """

    part_seconds: float
    micro_batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("part_seconds", self.part_seconds)
        if not self.micro_batch_size >= 1:
            raise ValueError(
                "A part has at least one sample. Received: "
                f"micro_batch_size={self.micro_batch_size!r}. Use LinearTimeModel for shares that "
                "are never cut."
            )

    def seconds(self, samples: float) -> float:
        """Return the compute time of one step, as `LinearTimeModel.seconds` does."""
        of_one_part = super().seconds(samples)
        return of_one_part + self.part_seconds * further_parts(samples, self.micro_batch_size)


def further_parts(samples: Any, micro_batch_size: Any) -> Any:
    """Count the parts of shares after the first one, for numbers and for arrays alike."""
    return (samples > 0) * (-(-samples // micro_batch_size) - 1)


def model_of_fields(fields: Mapping[str, Any]) -> LinearTimeModel:
    """Return the model that `dataclasses.asdict` has written."""
    is_cut = "micro_batch_size" in fields
    return MicroBatchTimeModel(**fields) if is_cut else LinearTimeModel(**fields)


@dataclass(frozen=True)
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


def check_not_negative(name: str, value: object) -> None:
    # numpy's scalars share no base class with Python's numbers, so convert instead of testing
    # types.
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise TypeError(
            f"`{name}` must be a real number. Received: {name}={value!r} ({type(value).__name__})."
        )
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"`{name}` must be finite and at least 0. Received: {name}={value!r}. Measure the "
            "device again or give a number by hand."
        )
