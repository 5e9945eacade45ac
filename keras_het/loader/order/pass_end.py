"""Tells that a pass over the data is about to end, if another one follows."""

from __future__ import annotations

_SECONDS_BEFORE = 0.5
_STEPS_BEFORE = 4


class PassEnd:
    """Counts the steps of a pass whose number of steps is known."""

    def __init__(self) -> None:
        self._left: int | None = None

    def begin(self, steps: int | None) -> None:
        """Starts a pass.

        Args:
            steps: its steps; None if they are not known, or no other pass follows.
        """
        self._left = steps

    def is_near(self, seconds: float, steps: int) -> bool:
        """Takes one execution; returns whether the pass ends within half a second.

        Args:
            seconds: its time.
            steps: its steps.
        """
        if self._left is None:
            return False
        self._left -= steps
        return self._left <= _STEPS_BEFORE or self._left * seconds <= _SECONDS_BEFORE * steps
