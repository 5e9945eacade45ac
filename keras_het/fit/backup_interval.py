"""After how many steps of a training its next backup follows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

AUTO = "auto"
# Of the time of a training, the part that its backups may take.
_COST = 0.02
_LEAST_SECONDS = 1.0


# Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
class BackupInterval:
    """Steps between backups, from their measured cost and the interruptions of the training."""

    def __init__(self) -> None:
        # of the training, also before it was interrupted
        self._began, self._num_interruptions = 0.0, 0
        self._saved_at, self._num_steps = 0.0, 0

    def begin(self) -> None:
        """Begin a `fit`."""
        self._began, self._num_interruptions = time.time(), 0
        self._saved_at, self._num_steps = time.monotonic(), 0

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue the training of a backup, which has been interrupted."""
        self._began = position.get("began", self._began)
        self._num_interruptions = position.get("interruptions", 0) + 1

    def position(self) -> dict[str, Any]:
        """Return what a backup holds of it."""
        return {"began": self._began, "interruptions": self._num_interruptions}

    def count_step(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def next_after(self, cost: float, strategy: HeterogeneousStrategy) -> int:
        """Return after how many steps the next backup follows, on all workers alike."""
        step = (time.monotonic() - self._saved_at - cost) / max(1, self._num_steps)
        rate = self._num_interruptions / max(time.time() - self._began, 1.0)
        own = np.array([[cost, step, rate]], np.float64)
        cost, step, rate = strategy.extended.gather_over_workers(own).max(axis=0).tolist()
        seconds = min(cost / _COST, math.sqrt(2 * cost / rate) if rate > 0 else math.inf)
        self._saved_at, self._num_steps = time.monotonic(), 0
        return max(1, math.ceil(max(seconds, _LEAST_SECONDS) / max(step, 1e-6)))
