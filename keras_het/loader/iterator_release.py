"""Lets iterators go without ever blocking the training loop."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from keras_het import private_api


def release(iterator: Any) -> None:
    """Ends a `tf.data.Iterator` in another thread.

    Ending one may block until AUTOTUNE's next round, up to seconds. It is emptied by an operation,
    which lets other Python threads run meanwhile as dropping the object does not; who drops the
    object last does not matter then.

    Args:
        iterator: the iterator; nobody may read from it any more.
    """
    global _worker
    with _lock:
        _queue.put(iterator)
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
    _queue.put(done)
    with _lock:
        idle = _worker is None or not _worker.is_alive()
    return idle or done.wait(timeout)


def _work() -> None:
    while True:
        item = _queue.get()
        if isinstance(item, threading.Event):
            item.set()
        else:
            with contextlib.suppress(Exception):
                _empty(item)
        del item


def _empty(iterator: Any) -> None:
    dataset = private_api.iterated_data_set(iterator)
    if dataset is not None:
        private_api.restart_iterator(iterator, dataset.take(0))


_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
_lock = threading.Lock()
_worker: threading.Thread | None = None
