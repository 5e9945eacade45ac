"""Program: imports TensorFlow once and forks a worker for each line of its standard input.

Importing TensorFlow and Keras takes many seconds of processor time, more than most of the checks
here; a fork takes none. The import starts no thread and no runtime of TensorFlow, so that a fork
behaves like a fresh process. What a fork would share with its siblings by accident (the state of
random generators) is drawn again. A worker ends like any script, interpreter shutdown included.

Lines in: {"number", "script", "arguments", "environment", "folder", "output"}. Lines out:
{"ready"}, {"started": number, "process_id"} and {"ended": number, "exit_code"}. Workers are told
apart by their numbers: the system gives the process id of one that has ended to a later one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import keras_het.strategy.heterogeneous_strategy  # noqa: F401 - with TensorFlow and Keras

# Numbers of the workers that run, by their process ids.
_children: dict[int, int] = {}


def _say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == 0:
                return
            if (number := _children.pop(process_id, None)) is not None:
                _say({"ended": number, "exit_code": os.waitstatus_to_exitcode(status)})


@contextlib.contextmanager
def _no_child_reaped() -> Iterator[None]:
    """Keeps a worker that ends at once from being reaped before its number is known."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become_worker(request: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    random.seed()
    np.random.seed()


def _next_worker() -> dict[str, Any] | None:
    """Forks for each request; returns the request in the worker, and None at the end."""
    # Unbuffered, so that a fork inherits no half-read line.
    with os.fdopen(os.dup(0), "rb", buffering=0) as requests:
        while line := requests.readline():
            request: dict[str, Any] = json.loads(line)
            with _no_child_reaped():
                process_id = os.fork()
                if process_id != 0:
                    _children[process_id] = request["number"]
                    _say({"started": request["number"], "process_id": process_id})
            if process_id == 0:
                _become_worker(request)
                return request
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, _reap)
    # Workers need not search what was imported for garbage, and then own a copy of it.
    gc.collect()
    gc.freeze()
    _say({"ready": True})
    job = _next_worker()
    if job is not None:
        runpy.run_path(job["script"], run_name="__main__")
    else:
        for child in list(_children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
