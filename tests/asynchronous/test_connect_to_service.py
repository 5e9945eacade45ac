"""Waiting for a parameter service that is still to start."""

from __future__ import annotations

import logging

import pytest
from addresses import free_address
from service_doubles import Clock

from keras_het.asynchronous.exchange import connection
from keras_het.asynchronous.exchange.connection import connect
from keras_het.asynchronous.parameter_service import ParameterClient, Partitions, credential


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(connection, "time", found)
    return found


def service_from(clock: Clock, seconds: float) -> object:
    def make() -> str:
        if clock.now < seconds:
            raise ConnectionError("Nobody answers at 10.0.0.5:5050.")
        return "connected"

    return make


@pytest.mark.parametrize(("starts", "sentences"), [(9.0, 0), (20.0, 1), (200.0, 1)])
def test_says_once_that_it_waits(
    clock: Clock, caplog: pytest.LogCaptureFixture, starts: float, sentences: int
) -> None:
    with caplog.at_level(logging.WARNING, "keras_het"):
        assert connect(service_from(clock, starts), 300.0, "Or it has ended.") == "connected"
    assert len(caplog.messages) == sentences
    if sentences:
        assert "for 10 s; waiting up to 300 s for it to start. Or it has ended. (" in caplog.text
        assert "Nobody answers at 10.0.0.5:5050." in caplog.text


def test_ends_with_the_last_error(clock: Clock) -> None:
    with pytest.raises(ConnectionError, match="Nobody answers"):
        connect(service_from(clock, 1e9), 300.0)
    assert 300.0 <= clock.now < 301.0


@pytest.mark.timeout(60)
def test_no_service_is_an_error_that_says_so_in_time() -> None:
    partitions, proof = (
        Partitions([(3,)], partition_size=3),
        credential(b"0123456789abcdef", "model"),
    )
    with pytest.raises(ConnectionError, match=r"did not answer within 1 s.*Start it first"):
        ParameterClient(free_address(), partitions, proof, 0, timeout_seconds=1.0)
