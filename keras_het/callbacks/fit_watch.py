"""Ends what runs beside a `fit` once that is over, however it ended."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from types import FrameType

_POLL_SECONDS = 0.25


class FitWatch:
    """Calls back soon after the `fit` in which this is made has left its thread's stack.

    After an error in another callback, in validation or in the data, or Ctrl-C there, Keras calls
    none of a callback's methods. Where nobody's `fit` is on the stack nothing is watched.

    Args:
        ended: called once, from another thread or where the process ends, while `fit` is no longer
            running. It must leave the model as it is.
        poll_seconds: from one look at the stack to the next.
    """

    def __init__(self, ended: Callable[[], None], poll_seconds: float = _POLL_SECONDS) -> None:
        self._ended, self._poll_seconds = ended, poll_seconds
        self._caller = threading.get_ident()
        # a frame that is held is no other's: its id would be used again
        self._fit = _innermost_fit(sys._getframe(1))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keras_het-fit", daemon=True)
        if self._fit is not None:
            self._thread.start()
            # what it ends must not go on while the interpreter ends
            atexit.register(self._end_at_exit)

    def stop(self) -> None:
        """Watches no more; returns when nothing is being ended."""
        self._stop_looking()
        self._fit = None
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """A script may end after an error before the next look."""
        self._stop_looking()
        if self._fit is not None and not self._is_on_stack():
            self._ended()

    def _stop_looking(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        misses = 0
        # twice: the thread may have gone on while its frames were looked through
        while misses < 2 and not self._stopped.wait(self._poll_seconds):
            misses = 0 if self._is_on_stack() else misses + 1
        if misses == 2:
            self._fit = None
            self._ended()

    def _is_on_stack(self) -> bool:
        frame = sys._current_frames().get(self._caller)
        while frame is not None and frame is not self._fit:
            frame = frame.f_back
        return frame is not None


def _innermost_fit(frame: FrameType | None) -> FrameType | None:
    """Keras's own, where a model's `fit` calls that."""
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    return frame
