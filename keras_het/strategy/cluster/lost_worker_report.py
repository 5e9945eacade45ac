"""Names the lost worker also where an error of TensorFlow ends the program."""

from __future__ import annotations

import sys
from types import TracebackType

from keras_het.strategy.cluster.peer_watch import (
    PeerWatch,
    WorkerLostError,
    may_be_a_lost_connection,
)
from keras_het.strategy.cluster.stop_signals import stop_signals


def install_report(watch: PeerWatch) -> None:
    """Makes an uncaught error of a broken connection end with the name of the lost worker.

    `fit`, `evaluate` and `predict` raise `WorkerLostError` themselves; a custom loop and the calls
    before it get TensorFlow's error, which names sockets.

    Args:
        watch: the watch of this process.
    """
    show = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        message = None
        if may_be_a_lost_connection(error):
            code = stop_signals.exit_code_in_place_of_error()
            if code is not None:
                raise SystemExit(code)  # Python ends with it
            message = watch.wait_for_loss()
        if message is None:
            show(kind, error, traceback)
        else:
            show(WorkerLostError, WorkerLostError(message), traceback)

    sys.excepthook = report
