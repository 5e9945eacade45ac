"""Time a device needs for a number of samples, and what a backup knows of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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

    With m the micro-batch size, a share of n samples has p parts, each with its own fixed costs:

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


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """A device that was measured: its product, its times, and its latest share if it is used."""

    product: str
    times: LinearTimeModel
    share: int | None = None


Known = Mapping[str, KnownDevice]
"""Devices by their identities."""


def known_to_json(known: Known) -> str:
    return json.dumps({identity: dataclasses.asdict(each) for identity, each in known.items()})


def known_from_json(text: str) -> dict[str, KnownDevice]:
    return {
        identity: KnownDevice(each["product"], model_of_fields(each["times"]), each["share"])
        for identity, each in json.loads(text or "{}").items()
    }


def recall_times(
    known: Known, devices: Sequence[tuple[str, str]]
) -> tuple[list[LinearTimeModel | None], list[int] | None]:
    """Return times and shares of devices, each given as (identity, product)."""
    # An unknown device has the mean of its product. Shares are None if other devices had them.
    times = [
        known[identity].times if identity in known else _mean(known, product)
        for identity, product in devices
    ]
    shares = {identity: each.share for identity, each in known.items() if each.share is not None}
    identities = [identity for identity, _ in devices]
    if sorted(shares) != sorted(identities):
        return times, None
    return times, [shares[identity] for identity in identities]


def _mean(known: Known, product: str) -> LinearTimeModel | None:
    alike = [each.times for each in known.values() if product and each.product == product]
    if not alike:
        return None
    return LinearTimeModel(
        sum(each.fixed_seconds for each in alike) / len(alike),
        sum(each.seconds_per_sample for each in alike) / len(alike),
    )
