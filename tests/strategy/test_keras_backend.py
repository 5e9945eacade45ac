"""On another backend Keras sees no strategy: each worker would train alone, without a word."""

import os
import subprocess
import sys

import keras
import pytest

import keras_het
from keras_het.fit.model_strategy import heterogeneous_strategy, local_replicas

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


@pytest.mark.parametrize("wanted", ["HeterogeneousStrategy", "callbacks.BatchBalancer"])
def test_it_is_said_before_keras_fails_to_import_another_backend(wanted):
    assert "Received: the backend 'no_such_backend'" in error_of(wanted, "no_such_backend")


# Keras's models of another backend lack what only TensorFlow's have.
IMPORTED_JAX = """
import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
keras.backend.backend = lambda: "jax"
del TensorFlowTrainer._maybe_symbolic_build
"""


@pytest.mark.parametrize("wanted", ["HeterogeneousStrategy", "callbacks.BatchBalancer"])
@pytest.mark.quick("HeterogeneousStrategy")
def test_it_is_said_where_keras_was_imported_with_another_backend_before(wanted):
    assert "Received: the backend 'jax'" in error_of(wanted, "tensorflow", IMPORTED_JAX)


def error_of(wanted, backend, before=""):
    """The last line of a process that wants a part of the package."""
    code = f"{before}\nimport keras_het; keras_het.{wanted}"
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]
