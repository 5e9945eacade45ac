"""A data service under a strategy, and one that loses a worker."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from consumers import TIMEOUT, child_environment
from numbers_model import model_of_zeros, pairs_of_numbers

import keras_het
from keras_het.loader import service

pytestmark = pytest.mark.timeout(120)


def test_fit_under_a_strategy_trains_each_element_once_an_epoch() -> None:
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0", "CPU:1"], shares=[3, 1])
    with service() as data, strategy.scope():
        model, shared = model_of_zeros(), pairs_of_numbers(data)
        history = model.fit(shared, epochs=2, verbose=0).history
        steps = int(model.optimizer.iterations.numpy())
    assert steps == 2 * 8
    # each epoch has its own order, and the same numbers
    np.testing.assert_allclose(history["seen"], [np.mean(np.arange(64.0) ** 2)] * 2, rtol=1e-5)


class Worker:
    """A worker of a data service in a process of its own."""

    def __init__(self, dispatcher: str, port: str) -> None:
        command = [sys.executable, "-m", "keras_het.launch", "loader-worker"]
        self._process = subprocess.Popen(
            [*command, "--dispatcher", dispatcher, "--port", port, "--patience", "1"],
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        assert self._is_ready.wait(TIMEOUT), "the worker said nothing"

    def kill(self) -> None:
        self._process.kill()  # SIGKILL: it takes leave of nobody
        self._process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)

    def _read(self) -> None:
        for line in self._process.stdout:
            if "ready for the dispatcher" in line:
                self._is_ready.set()


def test_a_killed_worker_that_comes_back_costs_what_it_was_reading() -> None:
    samples, batch, port = 400, 4, free_address().rpartition(":")[2]
    numbers = tf.data.Dataset.range(samples).map(lambda number: number * 1).batch(batch)
    with service(workers=0) as data:
        workers = [Worker(data.address, port)]
        try:
            workers[0].wait_until_ready()
            shared = iter(data.distribute(numbers, "job"))
            got = [next(shared).numpy() for _ in range(3)]
            workers[0].kill()
            # at the same address, where TensorFlow keeps asking
            workers.append(Worker(data.address, port))
            got += [element.numpy() for element in shared]
        finally:
            for worker in workers:
                worker.kill()
    found = np.concatenate(got).tolist()
    lost = sorted(set(range(samples)) - set(found))
    assert len(found) == len(set(found)), "an element came twice"
    # what is on the way, what waits to be taken, and what was being read
    assert len(lost) <= 4 * batch, lost
