"""On another backend Keras sees no strategy: each worker would train alone, without a word."""

import keras
import pytest

import keras_het
from keras_het.callbacks.local_replicas import local_replicas
from keras_het.callbacks.model_strategy import heterogeneous_strategy

REFUSAL = "Received: the backend 'jax'(.|\n)*KERAS_BACKEND=tensorflow"


@pytest.fixture(autouse=True)
def jax(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")


def test_no_strategy_is_made():
    with pytest.raises(ValueError, match=REFUSAL):
        keras_het.HeterogeneousStrategy()


def test_callbacks_without_a_strategy_say_it_too():
    model = object()  # models of other backends have no `distribute_strategy`
    with pytest.raises(ValueError, match=REFUSAL):
        heterogeneous_strategy(model, None)
    with pytest.raises(ValueError, match=REFUSAL):
        local_replicas(model)
