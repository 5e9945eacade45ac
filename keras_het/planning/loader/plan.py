"""The decision of a loader controller."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoaderPlan:
    """Degree of read-ahead and parallelism of a worker's input pipeline.

    Args:
        loaders: number of samples prepared at the same time, n.
        prefetch: number of finished batches that may wait for the device.
        reason: the reason, in a few words.

    Raises:
        ValueError: if a number is less than 1.
    """

    loaders: int
    prefetch: int
    reason: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.loaders < 1 or self.prefetch < 1:
            raise ValueError(
                "loaders and prefetch must be 1 or more. Received: "
                f"loaders={self.loaders}, prefetch={self.prefetch}."
            )

    def __str__(self) -> str:
        text = f"{self.loaders} loaders, prefetch {self.prefetch}"
        return f"{text} ({self.reason})" if self.reason else text
