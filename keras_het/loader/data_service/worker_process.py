"""Process that only prepares data for consumers elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from keras_het.loader.data_service.addresses import check_reachable, is_reachable, split_address
from keras_het.loader.data_service.servers import start_worker

_CONNECT_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 1.0


def run_worker(dispatcher: str, host: str, port: int = 0, patience: float = 10.0) -> None:
    """Run a worker until SIGINT or SIGTERM, or until the dispatcher is gone.

    Args:
        dispatcher: "host:port" of the dispatcher.
        host: name or address under which consumers reach this machine.
        port: port of the worker, 0 for a free one.
        patience: how long the dispatcher may be away, in seconds.

    Raises:
        ValueError: if `dispatcher` is not an address, or consumers cannot use `host`.
        ConnectionError: if no dispatcher answers there.
        OSError: if the port is taken.
    """
    split_address(dispatcher)
    dispatcher = dispatcher.removeprefix("grpc://")
    check_reachable(dispatcher, _CONNECT_SECONDS)
    stop = threading.Event()
    before = {number: signal.signal(number, _setter(stop)) for number in _SIGNALS}
    try:
        server = start_worker(dispatcher, host, port, patience)
        _say(f"ready for the dispatcher at {dispatcher}")
        gone = _wait(dispatcher, stop, patience)
        _say(f"the dispatcher at {dispatcher} is gone" if gone else "stopped")
        server.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _setter(stop: threading.Event) -> Callable[[int, FrameType | None], None]:
    return lambda number, frame: stop.set()


def _wait(dispatcher: str, stop: threading.Event, patience: float) -> bool:
    """Wait, and tell whether the dispatcher's end ended it."""
    seen = time.monotonic()
    while not stop.wait(_LOOK_EVERY_SECONDS):
        if is_reachable(dispatcher, _LOOK_EVERY_SECONDS):
            seen = time.monotonic()
        elif time.monotonic() - seen > patience:
            return True
    return False


def _say(text: str) -> None:
    sys.stdout.write(f"[keras-het] loader worker: {text}\n")
    sys.stdout.flush()
