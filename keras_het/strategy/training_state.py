"""What the callbacks of a training leave with the strategy for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

State = dict[str, np.ndarray]
"""Arrays by their names in a backup."""


@dataclasses.dataclass
class TrainingState:
    """State that no model has, of the training that runs under a strategy.

    Attributes:
        export: gives what a backup keeps of a center, None where that is lost for now; None
            without a center.
        restored: what a backup has brought back of a center, until a center takes it.
        num_hybrid_runs: hybrid trainings that have begun, to tell one from the next.
        role_trials_left: how often roles may still be chosen by measurement; one choice is the
            last, and fits that are too short for it would measure links and trace steps each time.
    """

    export: Callable[[], State | None] | None = None
    restored: State | None = None
    num_hybrid_runs: int = 0
    role_trials_left: int = 3

    def forget_center(self) -> None:
        """Keeps nothing of a center that has ended: no later training goes on from it."""
        self.export = self.restored = None
