"""State that the callbacks of a training leave with the strategy for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

State = dict[str, np.ndarray]
"""Arrays, by their names in a backup."""


@dataclasses.dataclass
class TrainingState:
    """State of the training that runs under a strategy and that no model holds."""

    export: Callable[[], State | None] | None = None
    restored: State | None = None
    export_times: Callable[[], str] | None = None
    """What the balancer knows of its devices, as JSON; see `planning.time_model`."""
    restored_times: str = ""
    num_hybrid_runs: int = 0
    role_trials_left: int = 3

    def forget_center(self) -> None:
        """Discard the state of a center that has ended: no later training continues from it."""
        self.export = self.restored = None
