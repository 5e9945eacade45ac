"""Consumers of different speed share a data set: each element once, and the fast one takes more."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from consumers import TIMEOUT, Consumer, child_environment, started_together
from numbers_model import model_of_zeros, pairs_of_numbers

import keras_het
from keras_het.loader import DataService, service
from keras_het.loader.data_service.servers import _check_host, _is_here, start_worker

SAMPLES, BATCH = 480, 4
FAST, SLOW = 0.01, 0.04
pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def consumers(*settings) -> Iterator[list[Consumer]]:
    running = [Consumer(samples=SAMPLES, batch=BATCH, **each) for each in settings]
    try:
        yield running
    finally:
        for consumer in running:
            consumer.kill()


@pytest.mark.full
def test_the_split_follows_the_speed_and_every_element_comes_once() -> None:
    with (
        service(workers=1) as data,
        consumers(
            {"address": data.address, "seconds": FAST, "epochs": 2},
            {"address": data.address, "seconds": SLOW, "epochs": 2},
        ) as (fast, slow),
    ):
        started_together(fast, slow)
        fast.wait_for_end()
        slow.wait_for_end()
    for epoch in range(2):
        assert sorted(fast.epochs[epoch] + slow.epochs[epoch]) == list(range(SAMPLES))
    counts = len(fast.numbers), len(slow.numbers)
    # the devices are 4:1; equal parts would be 1:1
    assert counts[0] > 2 * counts[1] > 0, counts


@pytest.mark.full
@pytest.mark.parametrize("requests", [1, 8])
def test_a_killed_consumer_loses_what_it_had_asked_for_and_no_more(requests: int) -> None:
    settings = {"seconds": FAST, "requests": requests}
    with service() as data, consumers({"address": data.address, **settings}) as (killed,):
        numbers = tf.data.Dataset.range(SAMPLES).map(lambda number: number * 1).batch(BATCH)
        mine = data.distribute(numbers, "test").as_numpy_iterator()
        first = next(mine)
        started_together(killed)
        killed.wait_for_batches(3)
        killed.kill()
        assert not killed.has_ended
        rest = [number for batch in mine for number in batch]
    got = [*first, *rest, *killed.numbers]
    lost = set(range(SAMPLES)) - set(got)
    assert len(got) == len(set(got)), "an element came twice"
    assert len(lost) % BATCH == 0
    # on the way to it, one that waits to be taken, and one that it had not yet written down
    assert len(lost) <= (requests + 2) * BATCH, sorted(lost)


def test_workers_in_other_processes_do_the_work() -> None:
    command = [sys.executable, "-m", "keras_het", "loader-worker", "--dispatcher"]
    with service(workers=0) as data:
        worker = subprocess.Popen(
            [*command, data.address],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert "ready for the dispatcher" in first_line(worker)
            numbers = tf.data.Dataset.range(50).batch(5)
            got = np.concatenate(list(data.distribute(numbers, "a job").as_numpy_iterator()))
            assert sorted(got) == list(range(50))
            worker.send_signal(signal.SIGTERM)
            output, errors = worker.communicate(timeout=TIMEOUT)
            assert worker.returncode == 0, errors
            assert "stopped" in output
        finally:
            worker.kill()
            worker.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(TIMEOUT)
    assert lines, "no line"
    return lines[0]


@pytest.mark.full
def test_a_worker_ends_when_its_dispatcher_is_gone() -> None:
    command = [sys.executable, "-m", "keras_het", "loader-worker", "--patience", "1"]
    data = service(workers=0)
    worker = subprocess.Popen(
        [*command, "--dispatcher", data.address],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "ready" in first_line(worker)
        data.close()
        output, errors = worker.communicate(timeout=TIMEOUT)
        assert worker.returncode == 0, errors
        assert "is gone" in output
    finally:
        worker.kill()
        worker.communicate()
        data.close()


@pytest.mark.full
def test_a_worker_for_nobody_says_so() -> None:
    with socket.socket() as held:  # bound but not listening: nobody answers there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "keras_het", "loader-worker", "--dispatcher", address],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        with pytest.raises(ConnectionError, match=rf"answers at {address}.*Start one"):
            service(address)
    assert done.returncode == 2
    assert f"answers at {address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_trains_from_the_service_and_others_may_join() -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(8)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with service() as data, service(f"grpc://{data.address}", workers=1) as joined:
        shared = joined.distribute(rows, "train")
        losses = model.fit(shared, epochs=3, verbose=0).history["loss"]
        assert losses[2] < losses[0]
        assert model.optimizer.iterations.numpy() >= 24


def test_a_strategy_uses_each_element_once() -> None:
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0", "CPU:1"], shares=[3, 1])
    with service() as data, strategy.scope():
        model, shared = model_of_zeros(), pairs_of_numbers(data)
        seen = model.evaluate(shared, verbose=0, return_dict=True)["seen"]
    assert seen == pytest.approx(np.mean(np.arange(64.0) ** 2))


def test_after_close_nothing_listens() -> None:
    data = service()
    host, port = data.address.split(":")
    socket.create_connection((host, int(port)), 5).close()
    data.close()
    data.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), 5)
    with pytest.raises(RuntimeError, match="was closed"):
        data.distribute(tf.data.Dataset.range(3), "job")


def test_a_port_that_is_taken_is_named() -> None:
    with service(workers=0) as data:
        port = int(data.address.split(":")[1])
        with pytest.raises(OSError, match=rf"listen on port {port}: another server"):
            service(port=port)


def test_a_host_that_is_not_this_machine_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"Received: host='255.255.255.255'. Give a name"):
        service(host="255.255.255.255")


@pytest.mark.skipif(sys.platform != "linux", reason="of 127.0.0.0/8 others have 127.0.0.1 only")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_all_addresses_of_this_machine_are_its_own(host) -> None:
    """Debian gives the machine's name 127.0.1.1, to which one connects from 127.0.0.1."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert _is_here(f"{host}:{server.getsockname()[1]}")


def test_an_address_that_no_socket_here_can_have_is_elsewhere(monkeypatch) -> None:
    class Elsewhere:
        """A connection to another machine."""

        family = socket.AF_INET

        def __enter__(self) -> Elsewhere:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def getpeername(self) -> tuple[str, int]:
            return "192.0.2.1", 4000  # of documentation (RFC 5737)

        def getsockname(self) -> tuple[str, int]:
            return "198.51.100.1", 5000

    monkeypatch.setattr(socket, "create_connection", lambda *_: Elsewhere())
    assert not _is_here("192.0.2.1:4000")
    for host in ("127.0.0.1", "127.0.1.1", "127.0.0.2", "::1", "localhost"):
        with pytest.raises(ValueError, match=f"cannot reach a worker here under host='{host}'"):
            _check_host("192.0.2.1:4000", host)
    # what this machine takes its own name for tells nothing of what others do
    for host in ("192.0.2.7", socket.gethostname()):
        _check_host("192.0.2.1:4000", host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_a_worker_is_not_at_all_interfaces(host, monkeypatch) -> None:
    def starts(config) -> None:
        pytest.fail(f"a worker was started as {config.worker_address}")

    monkeypatch.setattr(tf.data.experimental.service, "WorkerServer", starts)
    with pytest.raises(ValueError, match=r"which means all interfaces.*Give one address"):
        start_worker("127.0.0.1:4000", host)


def test_a_service_that_cannot_start_leaves_nothing(monkeypatch) -> None:
    def fail(*_) -> None:
        raise OSError("no worker")

    monkeypatch.setattr("keras_het.loader.data_service.data_service.start_worker", fail)
    port = int(free_address().split(":")[1])
    with pytest.raises(OSError, match="no worker"):
        service(port=port)
    with service(workers=0, port=port) as data:
        assert data.address.endswith(f":{port}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": "nonsense"}, r"'host:port'. Received: 'nonsense'"),
        ({"address": "host:99999"}, r"'host:port'. Received"),
        ({"workers": -1}, r"workers must be.*Received: -1"),
        ({"host": ""}, r"host must be a name or an address of this machine. Received: ''"),
        ({"host": "0.0.0.0", "workers": 0}, r"Received: '0.0.0.0', which means all interfaces"),
        ({"host": "0", "workers": 0}, r"Received: '0', which means all interfaces"),
        ({"host": "::"}, r"Received: '::', which means all interfaces"),
        ({"port": 70000}, r"port must be.*Received: 70000"),
        ({"address": "a:1", "port": 5}, r"leave it out to join"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        service(**arguments)


@pytest.fixture(scope="module")
def idle_service() -> Iterator[DataService]:
    with service(workers=0) as data:
        yield data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"job": ""}, r"job must be a name.*Received: ''"),
        ({"job": "a", "max_outstanding_requests": 0}, r"at least 1. Received: 0"),
    ],
)
def test_wrong_jobs_are_refused(idle_service, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        idle_service.distribute(tf.data.Dataset.range(3), **arguments)


def test_python_in_the_pipeline_is_refused(idle_service) -> None:
    spec = tf.TensorSpec([], tf.int64)
    generated = tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=spec)
    called = tf.data.Dataset.range(3).map(lambda n: tf.numpy_function(abs, [n], tf.int64))
    for dataset in (generated, called):
        with pytest.raises(ValueError, match=r"calls Python.*map it after distribute"):
            idle_service.distribute(dataset, "job")


def test_other_objects_are_refused(idle_service) -> None:
    with pytest.raises(TypeError, match=r"needs a tf.data.Dataset. Received: \[1\]"):
        idle_service.distribute([1], "job")
