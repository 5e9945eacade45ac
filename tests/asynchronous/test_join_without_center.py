"""An async worker that joins while a part of the service was restarted."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from service_doubles import Service

from keras_het.asynchronous.exchange import async_worker
from keras_het.asynchronous.exchange.async_worker import AsyncWorker
from keras_het.asynchronous.exchange.connection import Connection
from keras_het.asynchronous.exchange.exchange_engine import NoCenterError
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service import Partitions
from keras_het.asynchronous.rules import Delta

PARTITIONS = Partitions(((2,),))


class Ledger:
    """Of a training that runs."""

    def report(self, presence: Any, used: int = 0) -> Any:
        training = SimpleNamespace(first_pass=0, num_batches=8, fingerprint=0)
        return SimpleNamespace(training=training, epoch=0)


class Worker(AsyncWorker):
    """Joins a service without model and strategy."""

    num_batches, fingerprint, first_pass, _num_parts = 8, 0, 0, 1

    def __init__(self, connect_seconds: float) -> None:
        self.options = HybridOptions(Delta(), timeout_seconds=30.0, connect_seconds=connect_seconds)
        self.written: list[Any] = []
        weights = SimpleNamespace(write=self.written.append)
        self.vectors = SimpleNamespace(weights=weights, state=None, all=[weights])
        self._number, self._unreported, self._heartbeat, self._connection = 1, 0, None, None


def joins(worker: Worker, service: Service, refusals: int) -> int:
    """Has the worker join a service that gets its center after some refusals; how many came."""
    center = service.exchange()
    pull, met = center.pull, []

    def pull_and_note(*arguments: Any) -> Any:
        try:
            return pull(*arguments)
        except NoCenterError as error:
            met.append(error)
            if len(met) == refusals:
                service.set_center([3.0, 3.0])
            raise

    center.pull = pull_and_note  # type: ignore[method-assign]
    closed: list[bool] = []
    connection = Connection([center], Ledger(), Ledger(), lambda: closed.append(True))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_worker, "open_connection", lambda worker, client: connection)
        try:
            worker._join()
        finally:
            worker.leave()
    assert closed == [True]
    return len(met)


@pytest.fixture
def service() -> Service:
    return Service(PARTITIONS, Delta(), awaits_center=True)


def test_waits_until_the_leader_has_brought_the_center(service: Service) -> None:
    worker = Worker(connect_seconds=60.0)
    assert joins(worker, service, refusals=3) == 3
    np.testing.assert_array_equal(worker.written[0][0], [3.0, 3.0])


def test_a_center_that_never_comes_is_an_error_in_time(service: Service) -> None:
    worker = Worker(connect_seconds=0.2)
    with pytest.raises(ConnectionError, match="restarted, and has no center"):
        joins(worker, service, refusals=-1)
    assert not worker.written
