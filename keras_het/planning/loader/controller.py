"""Interface of a loader controller, and the controller that changes nothing."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from keras_het.planning.loader.plan import LoaderPlan
from keras_het.planning.loader.window import LoaderWindow, WindowSize


@runtime_checkable
class LoaderController(Protocol):
    """Decisions about loaders from windows of steps; the same windows lead to the same plans."""

    @property
    def name(self) -> str:
        """Name of the controller, as users pass it."""

    @property
    def plan(self) -> LoaderPlan:
        """The plan in effect."""

    @property
    def next_window(self) -> WindowSize:
        """Return which steps the next `observe` should cover."""

    def observe(self, window: LoaderWindow) -> LoaderPlan | None:
        """Take a window under the plan in effect; return a new plan if there should be one."""

    def refused(self, plan: LoaderPlan) -> None:
        """Withdraw the last plan of `observe`, which could not be put into effect."""

    def set_cpus(self, cpus: float) -> None:
        """Bound the CPUs that the loaders may use."""

    def set_reading_loaders(self, loaders: int | None) -> None:
        """Bound the loaders while they mostly wait for I/O; None for no bound."""


class FixedController:
    """Controller that keeps one plan.

    Args:
        plan: the plan.
    """

    name = "fixed"

    def __init__(self, plan: LoaderPlan) -> None:
        self.plan = plan

    @property
    def next_window(self) -> WindowSize:
        """Return a window of a second."""
        return WindowSize(skip_steps=0, min_steps=1, min_seconds=1.0)

    def observe(self, window: LoaderWindow) -> LoaderPlan | None:
        """Take a window; the plan stays."""
        del window
        return None

    def refused(self, plan: LoaderPlan) -> None:
        """Do nothing; never called, because this controller proposes nothing."""

    def set_cpus(self, cpus: float) -> None:
        """Do nothing: the plan stays."""

    def set_reading_loaders(self, loaders: int | None) -> None:
        """Do nothing: the plan stays."""
