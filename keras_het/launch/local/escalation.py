"""Ends workers politely first: a series of signals, each with time to obey."""

import time
from collections import deque
from collections.abc import Callable, Sequence


class Escalation:
    """Sends one signal after the other until nobody is left.

    Args:
        send: Sends a signal to all workers that still run.
        grace_seconds: Time to obey a signal before the next one is due.
    """

    def __init__(self, send: Callable[[int], None], grace_seconds: float) -> None:
        self._send = send
        self._grace_seconds = grace_seconds
        self._signals: deque[int] = deque()
        self.has_begun = False
        self.due = float("inf")

    def begin(self, signals: Sequence[int]) -> None:
        """Sends the first signal; does nothing if it has begun already.

        Args:
            signals: Signal numbers, the gentlest first.
        """
        if not self.has_begun:
            self.has_begun = True
            self._signals.extend(signals)
            self.advance()

    def advance(self) -> None:
        """Sends the next signal; does nothing after the last one."""
        self.due = float("inf")
        if self._signals:
            self._send(self._signals.popleft())
        if self._signals:
            self.due = time.monotonic() + self._grace_seconds
