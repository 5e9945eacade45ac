"""A data service under a strategy, and one that loses a worker."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from consumers import TIMEOUT, child_environment
from numbers_model import model_of_zeros, pairs_of_numbers

import keras_het
from keras_het.loader import service

PROGRAM = Path(__file__).parent / "program_dispatcher.py"

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


class Server:
    """A part of a data service in a process of its own, ready when it has said so."""

    def __init__(self, command: list[str], ready: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], env=child_environment(), stdout=subprocess.PIPE, text=True
        )
        self._ready = ready
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        assert self._is_ready.wait(TIMEOUT), "it said nothing"

    def kill(self) -> None:
        self._process.kill()  # SIGKILL: it takes leave of nobody
        self._process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)

    def _read(self) -> None:
        for line in self._process.stdout:
            if self._ready in line:
                self._is_ready.set()


def worker(dispatcher: str, port: str, patience: int = 1) -> Server:
    options = ["--dispatcher", dispatcher, "--port", port, "--patience", str(patience)]
    command = ["-m", "keras_het", "loader-worker", *options]
    return Server(command, "ready for the dispatcher")


def dispatcher_at(port: str, work_dir: Path | None) -> Server:
    settings = {"port": int(port), "work_dir": work_dir and str(work_dir)}
    return Server([str(PROGRAM), json.dumps(settings)], "READY")


@pytest.mark.full
def test_a_killed_worker_that_comes_back_costs_what_it_was_reading() -> None:
    samples, batch, port = 400, 4, free_address().rpartition(":")[2]
    numbers = tf.data.Dataset.range(samples).map(lambda number: number * 1).batch(batch)
    with service(workers=0) as data:
        workers = [worker(data.address, port)]
        try:
            workers[0].wait_until_ready()
            shared = iter(data.distribute(numbers, "job"))
            got = [next(shared).numpy() for _ in range(3)]
            workers[0].kill()
            # at the same address, where TensorFlow keeps asking
            workers.append(worker(data.address, port))
            got += [element.numpy() for element in shared]
        finally:
            for one in workers:
                one.kill()
    found = np.concatenate(got).tolist()
    lost = sorted(set(range(samples)) - set(found))
    assert len(found) == len(set(found)), "an element came twice"
    # what is on the way, what waits to be taken, and what was being read
    assert len(lost) <= 4 * batch, lost


@pytest.mark.full
def test_a_killed_dispatcher_with_a_journal_goes_on(tmp_path: Path) -> None:
    samples, batch = 400, 4
    ports = [free_address().rpartition(":")[2] for _ in range(2)]
    numbers = tf.data.Dataset.range(samples).map(lambda number: number * 1).batch(batch)
    servers = [dispatcher_at(ports[0], tmp_path)]
    try:
        servers[0].wait_until_ready()
        address = f"127.0.0.1:{ports[0]}"
        servers.append(worker(address, ports[1], TIMEOUT))
        servers[1].wait_until_ready()
        shared = service(address).distribute(numbers, "job")
        epoch = iter(shared)
        got = [next(epoch).numpy() for _ in range(3)]
        servers[0].kill()
        servers.append(dispatcher_at(ports[0], tmp_path))
        servers[2].wait_until_ready()
        got += [element.numpy() for element in epoch]
        again = [element.numpy() for element in shared]
    finally:
        for server in servers:
            server.kill()
    found = np.concatenate(got).tolist()
    assert len(found) == len(set(found)), "an element came twice"
    # what the journal says was given out, and the answer that died with the dispatcher: the worker
    # asks for one number of the source at a time
    lost = sorted(set(range(samples)) - set(found))
    assert len(lost) <= 1, lost
    assert sorted(np.concatenate(again)) == list(range(samples)), "the next epoch is a whole one"


def test_a_journal_needs_a_port(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a fixed port"):
        service(work_dir=tmp_path)
