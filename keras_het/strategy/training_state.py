"""State that the callbacks of a training leave with the strategy for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

State = dict[str, np.ndarray]
"""Arrays, by their names in a backup."""


@dataclasses.dataclass
class TrainingState:
    """State of the training that runs under a strategy and that no model holds.

    Attributes:
        export: returns what a backup keeps of a center, None if that is lost for now; None without
            a center.
        restored: what a backup has restored of a center, until a center takes it.
        num_hybrid_runs: number of hybrid trainings begun, to tell one from the next.
        role_trials_left: how often roles may still be chosen by measurement; one choice is the
            last, and fits that are too short for it would measure links and trace steps each time.
    """

    export: Callable[[], State | None] | None = None
    restored: State | None = None
    num_hybrid_runs: int = 0
    role_trials_left: int = 3

    def forget_center(self) -> None:
        """Discard the state of a center that has ended: no later training continues from it."""
        self.export = self.restored = None
