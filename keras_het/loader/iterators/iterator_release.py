"""Lets iterators go without ever blocking the training loop."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from keras_het.loader import iterator_adapter
from keras_het.loader.iterators import release_threads


def release(iterator: Any) -> threading.Event:
    """Ends a `tf.data.Iterator` in another thread.

    Ending one may block until AUTOTUNE's next round, up to seconds, and up to a minute for one that
    ran for long; each has a thread of its own, so that none waits for another. It is emptied by an
    operation, which lets other Python threads run meanwhile as dropping the object does not; who
    drops the object last does not matter then.

    Args:
        iterator: the iterator; nobody may read from it any more.

    Returns:
        An event that is set when the iterator is empty.
    """
    done = threading.Event()
    with contextlib.suppress(RuntimeError):  # no new thread while the interpreter ends
        release_threads.start(_work, iterator, done)
    return done


def _work(iterator: Any, done: threading.Event) -> None:
    with contextlib.suppress(Exception):
        dataset = iterator_adapter.iterated_data_set(iterator)
        if dataset is not None:
            iterator_adapter.restart_iterator(iterator, dataset.take(0))
    done.set()
