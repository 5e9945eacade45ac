"""Lets iterators go without ever blocking the training loop."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from keras_het import private_api


def release(iterator: Any, *, is_held_elsewhere: bool = False) -> None:
    """Ends a `tf.data.Iterator` in another thread.

    Ending one may block until AUTOTUNE's next round, up to seconds.

    Args:
        iterator: the iterator; nobody may read from it any more.
        is_held_elsewhere: whether others hold the object: then it is emptied, so that it does not
            matter who drops it last.
    """
    global _worker
    with _lock:
        _queue.put((iterator, is_held_elsewhere))
        if _worker is None or not _worker.is_alive():
            with contextlib.suppress(RuntimeError):  # no new thread while the interpreter ends
                _worker = threading.Thread(target=_work, daemon=True, name="iterator_release")
                _worker.start()


def wait_until_released(timeout: float) -> bool:
    """Waits until all iterators that were let go are gone.

    Args:
        timeout: how long to wait at most, in seconds.

    Returns:
        Whether they are.
    """
    done = threading.Event()
    _queue.put((done, False))
    with _lock:
        idle = _worker is None or not _worker.is_alive()
    return idle or done.wait(timeout)


def _work() -> None:
    while True:
        item, is_held_elsewhere = _queue.get()
        if isinstance(item, threading.Event):
            item.set()
        elif is_held_elsewhere:
            with contextlib.suppress(Exception):
                _empty(item)
        del item


def _empty(iterator: Any) -> None:
    dataset = private_api.iterated_data_set(iterator)
    if dataset is not None:
        private_api.restart_iterator(iterator, dataset.take(0))


_queue: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
_lock = threading.Lock()
_worker: threading.Thread | None = None
