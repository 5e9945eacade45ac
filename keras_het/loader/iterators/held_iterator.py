"""A tf.data iterator that is released without blocking or crashing the process."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from keras_het.ignored_errors import ignore_errors
from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import start, threads_of

if TYPE_CHECKING:
    import tensorflow as tf


def hold_functions_of(iterator: tf.data.Iterator, holder: object) -> None:
    """Keep the functions of a pipeline until after its iterator is gone."""
    # TensorFlow crashes if the garbage collector takes them before the iterator whose threads are
    # calling them, which may happen if both are in one cycle (of an exception's traceback).
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while True:
            _held.pop(_condemned.pop(), None)
    key = next(_keys)
    _held[key] = holder
    weakref.finalize(iterator, _condemned.append, key).atexit = False


_held: dict[int, object] = {}
_condemned: list[int] = []
_keys = itertools.count()


_LONGEST_WAIT_SECONDS = 30.0
_WAIT_AFTER_ERROR_SECONDS = 1.0

_NAME = "keras_het-iterator_release"


def start_thread(work: Callable[..., None], *arguments: object) -> None:
    """Call a function in a separate thread."""
    # A thread that returns from TensorFlow while the interpreter shuts down would abort the process
    # ("FATAL: exception not rethrown", SIGABRT): Python ends it with an exception that must not
    # pass the destructors on its way. The end of the process therefore waits for it, but after an
    # error only shortly. Non-daemon threads could not be abandoned.
    threading.Thread(target=work, args=arguments, daemon=True, name=_NAME).start()


@atexit.register
def _wait_for_all() -> None:
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    seconds = _LONGEST_WAIT_SECONDS if error is None else _WAIT_AFTER_ERROR_SECONDS
    deadline = time.monotonic() + seconds
    running = [thread for thread in threading.enumerate() if thread.name == _NAME]
    try:
        for thread in running:
            thread.join(max(deadline - time.monotonic(), 0.0))
    except KeyboardInterrupt as interrupt:  # the user is in a hurry
        error = interrupt
    if error is not None and any(thread.is_alive() for thread in running):
        _end_process(error)


def _end_process(error: BaseException) -> NoReturn:
    """End as an error that nothing has caught does, without Python's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with ignore_errors("flushing a stream"):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def release(iterator: tf.data.Iterator) -> threading.Event:
    """End a `tf.data.Iterator` in another thread."""
    # Ending one may block until AUTOTUNE's next round, up to a minute for one that ran for long;
    # each has its own thread, so none waits for another. An operation empties it, which lets other
    # Python threads run meanwhile, unlike dropping the object.
    done = threading.Event()
    with contextlib.suppress(RuntimeError):  # no new threads at interpreter shutdown
        start_thread(_work, iterator, done)
    return done


def _work(iterator: tf.data.Iterator, done: threading.Event) -> None:
    with ignore_errors("releasing an iterator"):
        dataset = iterator_adapter.iterated_data_set(iterator)
        if dataset is not None:
            iterator_adapter.restart_iterator(iterator, dataset.take(0))
    done.set()


class HeldIterator:
    """A pass of a pipeline in Python; `ahead` is an element that nobody has asked for yet."""

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        keep_alive: object = None,
        iterator: tf.data.Iterator | None = None,
    ) -> None:
        if iterator is None:
            iterator = start(pipeline)
        self.threads = threads_of(iterator)
        hold_functions_of(iterator, (pipeline, keep_alive))
        self.read = adapter.element_reader(iterator)
        self.iterator = iterator
        self.ahead: concurrent.futures.Future[Any] | None = None

    def read_ahead(self, read: Callable[[], object]) -> None:
        """Call a function, which reads the next element, in another thread."""
        ahead = concurrent.futures.Future[Any]()
        with contextlib.suppress(RuntimeError):  # no new threads at interpreter shutdown
            start_thread(_fulfil, ahead, read)
            self.ahead = ahead

    def release(self, after: Callable[[], None] | None = None) -> None:
        """Destroy the iterator in another thread, then call `after` there."""
        # A pass that is garbage never gets here: handing its parts to another thread while the
        # collector works on them crashes, so they are destroyed in place.
        held = [self.__dict__.pop("iterator", None), self.__dict__.pop("read", None)]
        start_thread(_release, held, self.ahead, after)


def _fulfil(ahead: concurrent.futures.Future[Any], read: Callable[[], object]) -> None:
    try:
        ahead.set_result(read())
    except BaseException as error:  # for the thread that asks
        ahead.set_exception(error)


def _release(
    held: list[object],
    ahead: concurrent.futures.Future[Any] | None,
    after: Callable[[], None] | None,
) -> None:
    if ahead is not None:
        concurrent.futures.wait([ahead])
    held.clear()
    if after is not None:
        with ignore_errors("releasing an iterator"):
            after()
