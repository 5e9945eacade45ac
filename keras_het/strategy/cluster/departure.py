"""End of a worker's script."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from keras_het.ignored_errors import ignore_errors
from keras_het.strategy.cluster.stop_signals import stop_signals

_LONGEST_WAIT_SECONDS = 10.0
_SECONDS_AFTER_SIGTERM = 1.0


def leave_quickly() -> None:
    """Make interpreter shutdown fast; called when a process begins to train."""
    # Python would search all objects for garbage several times: seconds with TensorFlow's.
    atexit.unregister(_forgo_search)
    atexit.register(_forgo_search)


def _forgo_search() -> None:
    for each in gc.get_objects():
        kind: Any = type(each)
        if _is_file(kind):
            with ignore_errors("flushing a file"):
                each.flush()
    gc.freeze()
    gc.disable()


@functools.cache  # for a million objects of few types
def _is_file(kind: type) -> bool:
    return issubclass(kind, io.IOBase)


def leave_together(strategy: Callable[[], Any]) -> None:
    """Wait, before this process exits, until the other workers have finished their last step."""
    # A collective is over for one worker while another still fetches its result from it. After an
    # error there is nothing to wait for; `sys.exit` leaves no trace that tells it from a normal
    # end.
    stop_signals.leave()
    live = strategy()
    if live is None or live.has_lost_workers or _failed():
        return
    hurries = stop_signals.exit_code_in_place_of_error() == 128 + signal.SIGTERM
    call_for(
        _SECONDS_AFTER_SIGTERM if hurries else _LONGEST_WAIT_SECONDS,
        live.extended.wait_for_departure,
    )
    live._stop_watching()  # a worker that exits first is not lost


def call_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in another thread, and stop waiting for its end after some time."""

    def call() -> None:
        with ignore_errors("taking leave"):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _failed() -> bool:
    """Tell whether the interpreter is ending because of an exception."""
    return getattr(sys, "last_value", None) is not None
