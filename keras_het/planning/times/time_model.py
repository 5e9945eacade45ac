"""Time a device needs for a number of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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


def check_not_negative(name: str, value: object) -> None:
    """Check that a value is a finite real number, at least 0."""
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
