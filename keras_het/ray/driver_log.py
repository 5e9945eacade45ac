"""What of the log of a training on Ray is shown where it was started: each event in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ray._private import ray_logging

from keras_het.launch.local.tracebacks import TracebackFilter

Batch = Mapping[str, Any]

_HANDLER = "ray_print_logs"
_WORKER, _CONTROLLER = "RayTrainWorker", "TrainController"
# Ray Train's other processes; their log files have what they say.
_HELPERS = ("PlacementGroupCleaner", "PreemptionWatcher", "SynchronizationActor", "TrainStateActor")
_STARTED = "Started training worker group"
# How a group comes to be, before the line above, and Ray's C++ code about itself.
_ROUTINE = re.compile(
    r"Requesting resources|Detected ready resources|Attempting to start|Did not detect any changes"
    r"|- \(ip=|\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\] "
)


class EachOnce:
    """Filter of the lines that Ray shows: what Ray Train repeats, and what TensorFlow logs, is out.

    Args:
        show: what shows a batch of lines of a process.
    """

    def __init__(self, show: Callable[[Batch], None]) -> None:
        self._show = show
        self._workers, self._controllers = TracebackFilter(), TracebackFilter(shown=-1)
        self._said: set[str] = set()

    def __call__(self, batch: Batch) -> None:
        lines = [kept for line in batch["lines"] for kept in self._kept(batch, line)]
        if lines:
            self._show({**batch, "lines": lines})

    def _kept(self, batch: Batch, line: str) -> list[str]:
        actor = batch.get("actor_name")
        if actor in _HELPERS:
            return []
        if actor not in (_WORKER, _CONTROLLER) or not batch["is_err"]:
            return [line]
        process = int(batch["pid"])
        if actor == _WORKER:
            return [line] * self._workers.shows(process, line)
        is_news = self._controllers.shows(process, line) and line not in self._said
        is_shown = is_news and not _ROUTINE.match(line)
        self._said.add(line)
        if line.startswith(_STARTED):  # what comes next is said of another group
            self._said.clear()
            self._workers = TracebackFilter()
        return [line] * is_shown


def shorten_log() -> None:
    """Shorten what Ray prints in this process from now on, also after a training has ended."""
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    show = dict(dispatcher.handlers).get(_HANDLER)
    # without one the program has asked Ray for silence
    if show is not None and not isinstance(show, EachOnce):
        dispatcher.remove_handler(_HANDLER)
        dispatcher.add_handler(_HANDLER, EachOnce(show))
