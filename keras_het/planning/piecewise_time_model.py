"""A time model through measured points, for devices that are far from a straight line."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from keras_het.planning.time_model import check_not_negative


@dataclasses.dataclass(frozen=True)
class PiecewiseLinearTimeModel:
    """Compute time as straight pieces between measured points, never falling.

    Caches that overflow, memory that swaps or kernels that fill a device in waves bend the line.
    Before the first point the first piece goes on, down to zero seconds at the least; after the
    last point the steepest of all pieces goes on, so that nothing unmeasured looks cheap. With one
    point, time is in proportion to samples.

    Args:
        samples: shares that were measured, at least one, strictly ascending, positive.
        measured_seconds: time of each, at least 0, nondecreasing.

    Raises:
        TypeError: if a number is not real.
        ValueError: if the points are not as described.
    """

    samples: tuple[float, ...]
    measured_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        object.__setattr__(self, "measured_seconds", tuple(self.measured_seconds))
        for name in ("samples", "measured_seconds"):
            for value in getattr(self, name):
                check_not_negative(name, value)
        pairs = zip(self.samples, self.samples[1:], strict=False)
        times = zip(self.measured_seconds, self.measured_seconds[1:], strict=False)
        ascending = all(left < right for left, right in pairs) and min(self.samples, default=0) > 0
        same_length = len(self.samples) == len(self.measured_seconds)
        if not ascending or not same_length or any(left > right for left, right in times):
            raise ValueError(
                "Points must have ascending positive samples and nondecreasing seconds, one for "
                f"each. Received: samples={self.samples}, measured_seconds="
                f"{self.measured_seconds}. Use from_measurements for raw measurements."
            )

    @classmethod
    def from_measurements(
        cls, samples: Sequence[float], seconds: Sequence[float]
    ) -> PiecewiseLinearTimeModel:
        """Fits the nondecreasing points that are nearest to raw measurements in least squares.

        Args:
            samples: measured shares, positive, in any order, with repetitions.
            seconds: time of each measurement.

        Returns:
            The model with one point for each distinct share.

        Raises:
            TypeError: if a number is not real.
            ValueError: if there is no measurement, lengths differ or a share is not positive.

        Reference:
            Pool adjacent violators: Ayer et al., "An empirical distribution function for sampling
            with incomplete information", Annals of Mathematical Statistics 26, 1955.
        """
        if len(samples) != len(seconds) or not len(samples):
            raise ValueError(
                "There must be as many seconds as samples, at least one. "
                f"Received: {len(samples)} samples and {len(seconds)} seconds."
            )
        grouped: dict[float, list[float]] = {}
        for share, value in zip(samples, seconds, strict=True):
            grouped.setdefault(float(share), []).append(float(value))
        shares = sorted(grouped)
        # blocks of (mean, measurements, shares); a block that falls below its left one joins it
        blocks: list[tuple[float, int, int]] = []
        for share in shares:
            values = grouped[share]
            block = (sum(values) / len(values), len(values), 1)
            while blocks and blocks[-1][0] > block[0]:
                block = _joined(blocks.pop(), block)
            blocks.append(block)
        fitted = [mean for mean, _, width in blocks for _ in range(width)]
        return cls(tuple(shares), tuple(fitted))

    def seconds(self, samples: float) -> float:
        """Returns the compute time of one step.

        Args:
            samples: number of samples of the replica's share; at least 0.

        Returns:
            Time in seconds.

        Raises:
            TypeError: if `samples` is not a real number.
            ValueError: if `samples` is negative or not finite.
        """
        check_not_negative("samples", samples)
        x, y = self.samples, self.measured_seconds
        if len(x) == 1:
            return y[0] * samples / x[0]
        right = bisect.bisect_left(x, samples)
        if right >= len(x):
            return y[-1] + max(map(self._slope, range(1, len(x)))) * (samples - x[-1])
        right = max(right, 1)
        smallest = y[right - 1] if samples >= x[right - 1] else 0.0
        return max(y[right] - self._slope(right) * (x[right] - samples), smallest)

    def _slope(self, right: int) -> float:
        x, y = self.samples, self.measured_seconds
        return (y[right] - y[right - 1]) / (x[right] - x[right - 1])


def _joined(left: tuple[float, int, int], right: tuple[float, int, int]) -> tuple[float, int, int]:
    count = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / count, count, left[2] + right[2]
