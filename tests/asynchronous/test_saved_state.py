"""Backups of what the service keeps, by a leader that may lose it."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from service_doubles import PROOF, Service, serving

from keras_het.asynchronous.exchange import HybridOptions
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine, VectorExchange
from keras_het.asynchronous.parameter_service import Partitions
from keras_het.asynchronous.parameter_service.channel import ServiceLostError
from keras_het.asynchronous.rules import AsyncSGD
from keras_het.callbacks import BackupAndRestore
from keras_het.strategy.training_state import TrainingState

PARTITIONS = Partitions(((5,),), partition_bytes=12)


@pytest.fixture
def served():
    with serving(Service(PARTITIONS, AsyncSGD(0.1, momentum=0.5))) as (connect, (server,)):
        yield connect(proof=PROOF, seconds=0.3), server


def leader_of(client, goes_on):
    """As a leader is whose service other processes hold, as far as backups are concerned."""
    center = object.__new__(Center)
    options = HybridOptions(
        AsyncSGD(0.1), goes_on_without_service=goes_on, timeout_seconds=3600.0
    )  # it asks after the test
    exchange = VectorExchange(client, options.rule)
    center.engine = ExchangeEngine(
        [exchange], lambda: None, options, "The sync group", center._note_loss
    )
    return center


def test_a_backup_without_a_service_keeps_the_state_of_the_one_before(
    served, tmp_path, monkeypatch
):
    client, server = served
    center, backup = leader_of(client, goes_on=True), BackupAndRestore(str(tmp_path))
    strategy = SimpleNamespace(_training_state=TrainingState(center.exported))
    monkeypatch.setattr(backup, "_strategy", lambda: strategy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd")
    before = backup._service_state()
    assert set(before) == {f"service/{name}" for name in client.export()}
    server.close()
    for _ in range(2):  # the second time nobody is asked
        backup._folder.add(model, {"position": np.array("{}"), **before})
        found = backup._service_state()
        assert center.engine.is_lost
        np.testing.assert_equal(found, before)
    center.engine.watch.stop()
    strategy._training_state.export = None  # a training without a service
    assert backup._service_state() == {}


def test_a_backup_ends_a_training_that_shall_not_go_on_alone(served):
    client, server = served
    center = leader_of(client, goes_on=False)
    server.close()
    with pytest.raises(ServiceLostError, match="parameter service at "):
        center.exported()
    assert center.engine.is_given_up
