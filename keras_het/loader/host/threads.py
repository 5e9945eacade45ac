"""Threads of a pipeline's own pool: CPU time, priority, and the host's activity meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from keras_het.loader.host.cpus import IdleCpus

if TYPE_CHECKING:
    import tensorflow as tf


_TASKS = Path("/proc/self/task")
_creating = threading.Lock()


class LoaderThreads:
    """Threads that were started while a pipeline's iterator was made."""

    def __init__(self) -> None:
        self.ids: frozenset[int] = frozenset()
        self._nice = 0

    @contextlib.contextmanager
    def started_here(self) -> Iterator[None]:
        """Assign threads that start inside the `with` block to the pipeline."""
        with _creating:
            before = _thread_ids()
            yield
            started = _thread_ids() - before
        of_python = {thread.native_id for thread in threading.enumerate()}
        self.ids = frozenset(started - of_python)

    def times(self) -> tuple[float, float] | None:
        """CPU time that they used so far, and time that they waited for a CPU.

        None if the operating system does not tell.
        """
        if not self.ids:
            return None
        runs = queues = 0
        for thread in self.ids:
            try:
                run, queue = (_TASKS / str(thread) / "schedstat").read_text().split()[:2]
                runs, queues = runs + int(run), queues + int(queue)
            except (OSError, ValueError):
                return None
        return runs / 1e9, queues / 1e9

    def lower_priority(self, nice: int) -> bool:
        """Let everything else run first when CPUs are scarce: above all the training step."""
        before, self._nice = self._nice, nice
        if nice == before or not self.ids:
            return True
        own = os.getpriority(os.PRIO_PROCESS, 0)
        is_permitted = True
        for thread in self.ids:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, min(own + nice, 19))
            except PermissionError:
                is_permitted = False
            except OSError:
                pass  # it has ended
        return is_permitted


def start(dataset: tf.data.Dataset) -> tf.data.Iterator:
    """Return a new iterator; `threads_of` gives its threads if it has a private pool."""
    if not dataset.options().threading.private_threadpool_size:
        return iter(dataset)
    threads = LoaderThreads()
    with threads.started_here():
        iterator = iter(dataset)
    return with_threads(iterator, threads)


def with_threads(iterator: tf.data.Iterator, threads: LoaderThreads) -> tf.data.Iterator:
    """Return the same iterator, with these threads as the result of `threads_of`."""
    iterator.keras_het_threads = threads
    return iterator


def threads_of(iterator: object) -> LoaderThreads | None:
    """Return the threads of an iterator's own pool, None without one or if unknown."""
    return getattr(iterator, "keras_het_threads", None)


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir(_TASKS)}  # noqa: PTH208 - called often
    except OSError:
        return set()


class HostSums:
    """Sums over the parts of a window; time between two parts does not count."""

    def __init__(self) -> None:
        self._idle = IdleCpus()
        self._mark: tuple[float, tuple[float, float] | None] | None = None
        self._clear()

    def begin(self, threads: LoaderThreads | None) -> None:
        """Start a new window."""
        self._clear()
        self.mark(threads)

    def mark(self, threads: LoaderThreads | None) -> None:
        """Start a part."""
        self._idle.read()
        self._mark = time.monotonic(), threads.times() if threads is not None else None

    def add(self, threads: LoaderThreads | None) -> None:
        """End a part."""
        if self._mark is None:
            return
        start, before = self._mark
        seconds = max(time.monotonic() - start, 0.0)
        times = threads.times() if threads is not None else None
        self._seconds += seconds
        self._idle_seconds += seconds * self._idle.read()
        if times is None or before is None:
            self._knows_cpu = False
        else:
            self._cpu += max(times[0] - before[0], 0.0)
            self._queue += max(times[1] - before[1], 0.0)
        self._mark = None

    @property
    def idle_cpus(self) -> float:
        """Average number of idle CPUs."""
        return self._idle_seconds / self._seconds if self._seconds > 0 else 0.0

    @property
    def loader_cpu_seconds(self) -> float | None:
        """CPU time of the pipeline's threads; None if unknown."""
        return self._cpu if self._knows_cpu else None

    @property
    def loader_queue_seconds(self) -> float | None:
        """Time that the pipeline's threads waited for a CPU; None if unknown."""
        return self._queue if self._knows_cpu else None

    def _clear(self) -> None:
        self._seconds = self._idle_seconds = self._cpu = self._queue = 0.0
        self._knows_cpu = True
