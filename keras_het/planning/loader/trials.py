"""A move of a controller that is not confirmed yet, and how long a move that failed stays away."""

from __future__ import annotations

import dataclasses

from keras_het.planning.loader.plan import LoaderPlan
from keras_het.planning.loader.window import LoaderWindow

FIRST_PAUSE_SECONDS = 2.0
UP = ("more loaders", "more prefetch")
"""Kinds of move that cost something, so that they must make it faster."""
LONGEST_PAUSE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan in effect that must still prove itself.

    Args:
        kind: what changed: "more loaders", "fewer loaders", "more prefetch", "less prefetch".
        before: the plan to go back to.
        window: what was measured under it.
        predicted_gain: relative throughput that the model promised, 0 for moves down.
    """

    kind: str
    before: LoaderPlan
    window: LoaderWindow
    predicted_gain: float = 0.0

    def pays(self, after: LoaderWindow) -> bool:
        """Whether the move is kept: up must make it faster, down must not make it slower."""
        gain = after.steps_per_second / self.window.steps_per_second - 1.0
        if self.kind in UP:
            return gain >= min(0.08, max(0.02, self.predicted_gain / 2))
        if self.window.idle_fraction > 0.1:
            return gain >= -0.02
        return after.idle_fraction <= max(self.window.idle_fraction + 0.015, 0.03)


class Pauses:
    """How long each kind of move stays away after it failed: twice as long each time."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._length: dict[str, float] = {}

    def start(self, kind: str, now: float) -> None:
        """Keeps a kind of move away from now on.

        Args:
            kind: the kind.
            now: time, in seconds.
        """
        length = self._length.get(kind, FIRST_PAUSE_SECONDS)
        self._until[kind] = now + length
        self._length[kind] = min(2 * length, LONGEST_PAUSE_SECONDS)

    def allow(self, kind: str, now: float) -> bool:
        """Whether a kind of move may be tried now."""
        return now >= self._until.get(kind, 0.0)

    def end(self, kind: str | None = None) -> None:
        """Allows a kind of move, by default all: what was learned holds no longer."""
        for each in [kind] if kind is not None else list(self._until):
            self._until.pop(each, None)
            self._length.pop(each, None)
