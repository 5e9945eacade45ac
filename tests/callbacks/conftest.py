"""A cluster of one synchronous and one asynchronous worker, seen from this process."""

import json

import pytest
from addresses import free_address

import keras_het
from keras_het.loader.host_threads import ForeignLoad


@pytest.fixture(autouse=True)
def nobody_else_on_the_host(monkeypatch):
    """Other tests beside these are no programs that loaders must hold their own against."""
    monkeypatch.setattr(ForeignLoad, "read", lambda load, friends=(): (0.0, len(load.cpus)))
    monkeypatch.setattr(ForeignLoad, "seconds", 1.0)


@pytest.fixture(params=[True, False], ids=["strategy", "alone"])
def devices(request, logical_devices):
    """Of a training under the strategy; none for one without it."""
    return logical_devices if request.param else ()


@pytest.fixture
def strategy(monkeypatch, logical_devices):
    """Of the synchronous worker; the other one never comes."""
    cluster = {"worker": [free_address()], "async": [free_address()]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("KERAS_HET_SERVICE_ADDRESS", free_address())
    monkeypatch.setenv("KERAS_HET_SECRET", "a secret that only tests know")
    return keras_het.HeterogeneousStrategy()
