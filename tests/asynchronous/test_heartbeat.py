"""Reports that a worker is alive, and their end."""

import threading
from types import SimpleNamespace

from keras_het.asynchronous.exchange import AsyncWorker
from keras_het.asynchronous.exchange.async_worker import Heartbeat


class SilentLedger:
    """Leaves a report open until it is told to answer."""

    def __init__(self):
        self.asked, self.answers = threading.Event(), threading.Event()

    def report(self, presence):
        self.asked.set()
        assert self.answers.wait(60)


class LeavingWorker(AsyncWorker):
    """What of an async worker has to be ended."""

    def __init__(self, ledger):
        self._return = SimpleNamespace(stop=lambda: None)
        self._heartbeat = Heartbeat(ledger, 0.0)


def test_a_worker_that_leaves_does_not_wait_for_a_report_without_an_answer():
    ledger = SilentLedger()
    worker = LeavingWorker(ledger)
    thread = worker._heartbeat._thread
    assert ledger.asked.wait(30)
    end = threading.Thread(target=worker.leave, daemon=True)
    end.start()
    end.join(30)
    has_ended = not end.is_alive()
    ledger.answers.set()
    thread.join(30)
    assert has_ended and not thread.is_alive()
    assert worker._heartbeat is None
