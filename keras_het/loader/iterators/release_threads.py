"""Threads in which iterators end, and for which the end of the process waits."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

_LONGEST_WAIT_SECONDS = 30.0

_NAME = "keras_het-iterator_release"


def start(work: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in a thread of its own.

    A thread that comes back from TensorFlow while the interpreter ends would end the process
    ("FATAL: exception not rethrown", SIGABRT): Python ends it with an exception that may not pass
    the destructors on its way. So the end of the process waits for it. Threads that are no daemons
    would do, but could not be left alone where they never end.

    Args:
        work: the function.
        *arguments: for it.

    Raises:
        RuntimeError: if there are no new threads, while the interpreter ends.
    """
    threading.Thread(target=work, args=arguments, daemon=True, name=_NAME).start()


@atexit.register
def _wait_for_all() -> None:
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    with contextlib.suppress(KeyboardInterrupt):  # who is in a hurry
        for thread in threading.enumerate():
            if thread.name == _NAME:
                thread.join(max(deadline - time.monotonic(), 0.0))
