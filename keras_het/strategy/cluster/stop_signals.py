"""Signals, and the end of a worker's script: the first signal ends training in an orderly way."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from keras_het.ignored_errors import ignore_errors

if TYPE_CHECKING:
    from keras_het.strategy.cluster.stop_request import StopRequest

_logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# `timeout` and others that forward a signal send it to a process and to its group: twice.
_SAME_SIGNAL_SECONDS = 0.2
# How long the main thread may take to return from TensorFlow before its collectives are aborted.
_PATIENCE_SECONDS = 2.0
# After SIGTERM: how long the running step may take to end, and then the process.
_SECONDS_FOR_STEP = 5.0
_SECONDS_TO_LEAVE = 0.5
_SECONDS_TO_SEND_AGAIN = 0.05
# An error of a collective within this time after a signal is a consequence of it.
_SECONDS_TO_END = 15.0


class StopSignals:
    """Receiver of this process's signals, which keeps handlers that the user installed."""

    def __init__(self) -> None:
        self.saving = threading.Lock()
        """Held while a backup is written, which a process that must end finishes first."""
        self._is_leaving = False
        self._raised = (0, 0.0)
        self._requests: weakref.WeakSet[StopRequest] = weakref.WeakSet()
        self._abort: Callable[[str], None] = lambda message: None
        self._is_installed = False
        self._numbers_received: list[int] = []
        self._num_sent_again = 0
        self._last = (0, 0.0)
        self._was_received = threading.Event()
        self._forking = threading.local()

    def add(self, request: StopRequest) -> None:
        """Have signals stop the loops of a strategy; held by a weak reference only."""
        self._requests.add(request)

    def install(
        self, abort: Callable[[str], None] | None = None, numbers: Sequence[int] = SIGNALS
    ) -> None:
        """Handle signals without another handler; in the main thread, after joining a cluster."""
        self._abort = abort or self._abort
        if threading.current_thread() is not threading.main_thread():
            _logger.debug("no signals: only the main thread may handle them")
            return
        for number in numbers:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._receive)
            elif handler is not None:
                signal.signal(number, handler)  # TensorFlow has replaced the handler
        if not self._is_installed:
            self._is_installed = True
            self._start_thread()
            os.register_at_fork(
                before=self._hold, after_in_parent=self._release, after_in_child=self._forget
            )
            atexit.register(self.leave)

    def ask(self, number: int) -> bool:
        """Stop at the next step boundary, from any thread; False if no loop of Keras has begun."""
        running = [each for each in list(self._requests) if each.is_in_steps]
        for each in running:
            each.ask(number)
        return bool(running)

    def exception(self, number: int) -> BaseException:
        """Return the exception that ends the script with a signal's exit code, 143 or 130."""
        self._raised = (number, time.monotonic())
        if number == signal.SIGINT:  # a script may catch it and continue
            self._numbers_received = []
            return KeyboardInterrupt()
        return SystemExit(128 + number)

    def exit_code_in_place_of_error(self) -> int | None:
        """Return the exit code for a collective that failed because a signal ends this process."""
        number, since = self._raised
        is_late = time.monotonic() - since > _SECONDS_TO_END
        return None if number == 0 or is_late else 128 + number

    @property
    def has_received_sigterm(self) -> bool:
        return signal.SIGTERM in self._numbers_received

    def leave(self) -> None:
        """Make any further signal end the process at once: the script is at its end."""
        self._is_leaving = True

    def _start_thread(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        other = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if other != -1:  # an event loop's
            signal.set_wakeup_fd(other)
            return
        self._sockets = reader, writer
        threading.Thread(target=self._watch, name="keras_het-signals", daemon=True).start()

    def _hold(self) -> None:
        """Block signals during a fork: the child would report its own to its parent."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _forget(self) -> None:
        """Reset in a forked process, which its parent's training does not concern."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if self.is_ours(number):
                is_interrupt = number == signal.SIGINT
                signal.signal(
                    number, signal.default_int_handler if is_interrupt else signal.SIG_DFL
                )
        self._release()

    def is_ours(self, number: int) -> bool:
        """Tell whether no handler of the user's has a signal."""
        return signal.getsignal(number) == self._receive

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        self._was_received.set()
        if self._is_leaving:
            os._exit(128 + number)
        if not self.ask(number):
            exception = self.exception(number)
            if not _makes_an_exception(frame):
                raise exception
            threading.Timer(_SECONDS_TO_SEND_AGAIN, self._send_again, (number,)).start()

    def _send_again(self, number: int) -> None:
        self._num_sent_again += 1
        os.kill(os.getpid(), number)

    def _watch(self) -> None:
        while received := self._sockets[0].recv(1):
            number = received[0]
            if number in SIGNALS and self.is_ours(number):
                self._look_after(number)

    def _look_after(self, number: int) -> None:
        if self._num_sent_again:
            self._num_sent_again -= 1
            return
        now = time.monotonic()
        is_same = self._last[0] == number and now - self._last[1] < _SAME_SIGNAL_SECONDS
        if is_same:
            return
        self._last = (number, now)
        is_stronger = number == signal.SIGTERM not in self._numbers_received
        self._numbers_received.append(number)
        name = signal.Signals(number).name
        is_again = len(self._numbers_received) > 1 and not is_stronger
        if is_again:
            os.write(2, f"[keras_het] {name} again: ends at once\n".encode())
        if is_again or self._is_leaving:
            os._exit(128 + number)
        time.sleep(_SAME_SIGNAL_SECONDS)  # a second signal sent after the message is deliberate
        if any(each.is_in_steps for each in list(self._requests)):
            _logger.warning("%s: stopping after this step; send it again to stop at once.", name)
            if number == signal.SIGTERM:
                threading.Thread(target=self._end_in_time, args=(now,), daemon=True).start()
        elif not self._was_received.wait(_PATIENCE_SECONDS):
            self._abort(f"{name} ends this worker")
            if number == signal.SIGTERM:
                threading.Thread(target=self._end_process, args=(now,), daemon=True).start()
        self._was_received.clear()

    def _end_in_time(self, since: float) -> None:
        """End a process that SIGTERM has not ended in a step, whatever that waits for."""
        time.sleep(_SECONDS_FOR_STEP)
        self.end_now(since, "The step did not end in time: what counts is the newest backup.")

    def end_now(self, since: float, why: str) -> None:
        """End after the backup that is written: by an exception if Python can still raise it."""
        with self.saving:
            if self._raised[1] > since:
                return  # the script ends
            _logger.warning("%s", why)
            for each in list(self._requests):
                each.end_now(signal.SIGTERM)
            self._send_again(signal.SIGTERM)
            self._end_process(since)

    def _end_process(self, since: float) -> None:
        """End the process, unless the main thread has begun to."""
        time.sleep(_SECONDS_TO_LEAVE)
        if self._raised[1] < since:
            for stream in (sys.stdout, sys.stderr):
                with ignore_errors("flushing a stream"):
                    stream.flush()
            os._exit(128 + signal.SIGTERM)


def _makes_an_exception(frame: FrameType | None) -> bool:
    """Tell whether a second exception would be lost: TensorFlow's C++ waits for the pending one."""
    return frame is not None and isinstance(frame.f_locals.get("self"), BaseException)


stop_signals = StopSignals()
"""The signals of this process."""


_LONGEST_WAIT_SECONDS = 10.0
_SECONDS_AFTER_SIGTERM = 1.0


def leave_quickly() -> None:
    """Make interpreter shutdown fast; called when a process begins to train."""
    # Python would search all objects for garbage several times: seconds with TensorFlow's.
    atexit.unregister(_forgo_search)
    atexit.register(_forgo_search)


def _forgo_search() -> None:
    for each in gc.get_objects():
        kind: Any = type(each)
        if _is_file(kind):
            with ignore_errors("flushing a file"):
                each.flush()
    gc.freeze()
    gc.disable()


@functools.cache  # for a million objects of few types
def _is_file(kind: type) -> bool:
    return issubclass(kind, io.IOBase)


def leave_together(strategy: Callable[[], Any]) -> None:
    """Wait, before this process exits, until the other workers have finished their last step."""
    # A collective is over for one worker while another still fetches its result from it. After an
    # error there is nothing to wait for; `sys.exit` leaves no trace that tells it from a normal
    # end.
    stop_signals.leave()
    live = strategy()
    if live is None or live.has_lost_workers or _failed():
        return
    hurries = stop_signals.exit_code_in_place_of_error() == 128 + signal.SIGTERM
    call_for(
        _SECONDS_AFTER_SIGTERM if hurries else _LONGEST_WAIT_SECONDS,
        live.extended.wait_for_departure,
    )
    live._stop_watching()  # a worker that exits first is not lost


def call_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in another thread, and stop waiting for its end after some time."""

    def call() -> None:
        with ignore_errors("taking leave"):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _failed() -> bool:
    """Tell whether the interpreter is ending because of an exception."""
    return getattr(sys, "last_value", None) is not None
