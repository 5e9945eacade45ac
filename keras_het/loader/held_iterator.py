"""A tf.data iterator that is let go without blocking or crashing the process."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.loader_threads import LoaderThreads


class HeldIterator:
    """One pass of a pipeline in Python.

    Args:
        pipeline: the data set to iterate.
        keep_alive: what else holds functions that `pipeline` calls.
        iterator: an iterator of `pipeline` that goes on, by default a new one.

    Attributes:
        read: gives the next element, or raises StopIteration.
        threads: threads of the pipeline's own pool, None if it has none.
    """

    def __init__(self, pipeline: Any, keep_alive: Any = None, iterator: Any = None) -> None:
        if iterator is None:
            iterator = _started(pipeline)
        self.threads: LoaderThreads | None = getattr(iterator, "keras_het_threads", None)
        _hold_functions_of(iterator, (pipeline, keep_alive))
        self.read = adapter.element_reader(iterator)
        self._iterator = iterator

    @property
    def iterator(self) -> Any:
        """The `tf.data.Iterator`."""
        return self._iterator

    def release(self, after: Callable[[], None]) -> None:
        """Destroys the iterator in another thread, then calls `after` there.

        Destroying an iterator may block until tf.data's autotuner wakes up, which takes seconds. A
        pass that is garbage never comes here: handing its parts to another thread while the
        collector works on them crashes, so that they go where they are.
        """
        held = [self.__dict__.pop("_iterator", None), self.__dict__.pop("read", None)]
        threading.Thread(target=_release, args=(held, after), daemon=True).start()


def _started(pipeline: Any) -> Any:
    if not pipeline.options().threading.private_threadpool_size:
        return iter(pipeline)
    threads = LoaderThreads()
    with threads.started_here():
        iterator = iter(pipeline)
    iterator.keras_het_threads = threads
    return iterator


def _release(held: list[Any], after: Callable[[], None]) -> None:
    held.clear()
    with contextlib.suppress(Exception):
        after()


def _hold_functions_of(iterator: Any, holder: Any) -> None:
    """Keeps the functions of a pipeline until after its iterator is gone.

    TensorFlow crashes if the garbage collector takes the functions of a pipeline before the
    iterator whose threads are calling them, which it may do where both are in one cycle (an
    exception's traceback is enough).
    """
    while _condemned:
        _held.pop(_condemned.pop(), None)
    key = next(_keys)
    _held[key] = holder
    weakref.finalize(iterator, _condemned.append, key).atexit = False


_held: dict[int, Any] = {}
_condemned: list[int] = []
_keys = itertools.count()
