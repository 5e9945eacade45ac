"""The end of a worker's script."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_LONGEST_WAIT_SECONDS = 10.0


def leave_together(strategy: Callable[[], Any]) -> None:
    """Waits, before this process leaves, until the other workers have finished their last step.

    A collective is over for one worker while another still fetches the result from it; a worker
    that left then would break the last step of the others. After an error there is nothing to wait
    for. (`sys.exit` leaves no trace that tells an error from a normal end, so its caller waits.)

    Args:
        strategy: gives the strategy whose cluster is left, None if it is gone (a weak reference).
    """
    live = strategy()
    if live is None or live.has_lost_workers or _failed():
        return

    def wait() -> None:
        with contextlib.suppress(Exception):
            live.extended.wait_for_departure()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(_LONGEST_WAIT_SECONDS)


def _failed() -> bool:
    """Whether the interpreter is ending because of an exception."""
    return getattr(sys, "last_value", None) is not None
