"""A tf.data iterator that is let go without blocking or crashing the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host.threads import LoaderThreads, start, threads_of
from keras_het.loader.iterators import release_threads
from keras_het.loader.iterators.iterator_functions import hold_functions_of


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
            iterator = start(pipeline)
        self.threads: LoaderThreads | None = threads_of(iterator)
        hold_functions_of(iterator, (pipeline, keep_alive))
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
        release_threads.start(_release, held, after)


def _release(held: list[Any], after: Callable[[], None]) -> None:
    held.clear()
    with contextlib.suppress(Exception):
        after()
