"""Continuation of a pipeline in a differently tuned copy, exactly where the running one is."""

# The running iterator's state, buffers included, is restored into an iterator of the other
# pipeline.

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
from typing import Any, NoReturn

import tensorflow as tf

from keras_het.ignored_errors import ignore_errors
from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import LoaderThreads, start, threads_of

_WITHOUT_STATE = {
    "DirectedInterleave": (
        "sample_from_datasets and choose_from_datasets may hang once one of their sources has ended"
    ),
    "DataService": "the tf.data service cannot save its iterators",
    "PrefetchToDevice": "prefetch_to_device cannot save its iterators",
    "CopyToDevice": "copy_to_device cannot save its iterators",
    "Snapshot": "its snapshot in files can be written by one iterator only",
}


class HandoverError(RuntimeError):
    """A pipeline cannot be handed over; the running one continues unharmed."""


def why_not(dataset: tf.data.Dataset) -> str | None:
    """Return why a dataset can never be handed over, None if there is no known reason."""
    for node in adapter.upstream_of(dataset):
        if adapter.draws_from_generator(node):
            return "Dataset.from_generator cannot save where its generator is"
        if adapter.is_file_cache(node):
            # saving moves the old iterator to the next shard of the files: that of the new one
            return "its cache in files can be written by one iterator only"
        kind = type(node).__name__
        for name, reason in _WITHOUT_STATE.items():
            if name in kind:
                return reason
    if dataset.options().experimental_symbolic_checkpoint:
        return (
            "experimental_symbolic_checkpoint drops buffers, and hangs with a parallel interleave"
        )
    return None


def has_memory_cache(dataset: tf.data.Dataset) -> bool:
    """Tell whether elements are cached in memory: after a handover the cache starts over."""
    return any("Cache" in type(node).__name__ for node in adapter.upstream_of(dataset))


def difference(running: tf.data.Dataset, other: tf.data.Dataset) -> str | None:
    """Return why one dataset cannot continue another, None if there is no known reason."""
    reason = why_not(running) or why_not(other)
    if reason:
        return reason
    if running.element_spec != other.element_spec:
        return f"elements differ: {running.element_spec} became {other.element_spec}"
    before, after = _operations(running), _operations(other)
    kinds = [[_kind(node) for node in nodes] for nodes in (before, after)]
    if kinds[0] != kinds[1]:
        return f"operations differ: {' '.join(kinds[0])} became {' '.join(kinds[1])}"
    for old, new in zip(before, after, strict=True):
        reason = _node_difference(old, new)
        if reason:
            return reason
    return None


def hand_over(
    iterator: tf.data.Iterator, dataset: tf.data.Dataset, prepared: tf.data.Iterator | None = None
) -> tf.data.Iterator:
    """Move an iterator to another pipeline after its pending calls; the caller releases it."""
    running = iterator_adapter.iterated_data_set(iterator)
    if running is None:
        raise HandoverError("It is not known which dataset the iterator belongs to.")
    reason = difference(running, dataset)
    if reason:
        raise HandoverError(f"The pipeline cannot be handed over: {reason}.")
    threads = LoaderThreads()
    try:
        # First of all: a new iterator of the same shuffle takes an order from its sequence.
        state = iterator_adapter.save_iterator(iterator)
        new = iter(dataset) if prepared is None else prepared
        with threads.started_here():
            iterator_adapter.restore_iterator(new, state)
    except tf.errors.OpError as error:
        text = str(error.message).splitlines()[0][:300]
        raise HandoverError(f"TensorFlow refused to hand the pipeline over: {text}") from error
    new.keras_het_was_handed_over, new.keras_het_threads = True, threads
    return new


def was_handed_over(iterator: tf.data.Iterator) -> bool:
    """Tell whether an iterator continues another: TensorFlow then shows no model of it."""
    return getattr(iterator, "keras_het_was_handed_over", False)


def _operations(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    # options are not an operation of an iterator
    return [
        node
        for node in adapter.upstream_of(dataset)
        if not adapter.is_options(node) and not iterator_adapter.is_adjustable(node)
    ]


def _kind(node: tf.data.Dataset) -> str:
    return type(node).__name__.removeprefix("_").removesuffix("Dataset")


def _node_difference(old: tf.data.Dataset, new: tf.data.Dataset) -> str | None:
    if adapter.is_batch(old):
        sizes = [adapter.batch_arguments(node) for node in (old, new)]
        if sizes[0] == sizes[1]:
            return None
        # TensorFlow loses data or crashes here if `map` and `batch` are fused, its default
        return f"batch size and drop_remainder were {sizes[0]} and would be {sizes[1]}"
    before, after = adapter.constants_of(old), adapter.constants_of(new)
    for name in sorted(before.keys() | after.keys()):
        values = before.get(name), after.get(name)
        if repr(values[0]) != repr(values[1]):  # NaN is what NaN was
            return f"{name} of {_kind(old)} was {values[0]} and would be {values[1]}"
    return None


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
