"""Workers wait for each other, say for whom, and not for ever."""

import contextlib
import logging
import select
import socket
import struct
import threading
import time

import pytest

from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.strategy.cluster import arrival
from keras_het.strategy.cluster.arrival import has_left, wait_for_peers

TIMEOUT = 30.0


@pytest.fixture
def addresses():
    with ReservedPorts(8) as ports:
        ports.release()
        yield ports.addresses


def peers_of(place, addresses):
    return {f"worker {i}": at for i, at in enumerate(addresses) if i != place}


def serve(address):
    host, port = address.split(":")
    return socket.create_server((host, int(port)))


def speak(server, connections=None):
    connections = [] if connections is None else connections
    with contextlib.suppress(OSError):
        while True:
            connections.append(server.accept()[0])
            connections[-1].sendall(b"as TensorFlow's server does")


def test_all_come_at_once_however_many(addresses):
    def come(place):
        left[place] = wait_for_peers(addresses[place], peers_of(place, addresses), TIMEOUT)
        # TensorFlow's server has the place from now on
        servers.append(serve(addresses[place]))

    left = {}
    servers = []
    threads = [threading.Thread(target=come, args=(place,)) for place in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for server in servers:
        server.close()
    assert sorted(left) == list(range(len(addresses)))
    assert all(0 < seconds <= TIMEOUT for seconds in left.values())


def test_who_is_missing_is_named(addresses, monkeypatch, caplog):
    monkeypatch.setattr(arrival, "_FIRST_MESSAGE_SECONDS", 0.5)
    with (
        caplog.at_level(logging.WARNING),
        serve(addresses[1]),
        pytest.raises(TimeoutError) as raised,
    ):
        wait_for_peers(addresses[0], peers_of(0, addresses[:3]), 1.2)
    assert str(raised.value).startswith(
        f"worker 2 ({addresses[2]}) did not start within startup_timeout_seconds=1.2."
    )
    assert f"Waiting for worker 2 ({addresses[2]}), " in caplog.text
    assert "worker 1" not in caplog.text
    assert caplog.text.count("Waiting for") == 2


@pytest.mark.full
def test_who_answers_before_this_worker_listens_is_of_an_earlier_start(addresses, caplog):
    own, old, waiting = addresses[:3]
    servers, connections = [serve(old), serve(waiting)], []
    threading.Thread(target=speak, args=(servers[0], connections), daemon=True).start()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError) as raised:
        wait_for_peers(own, {"worker 1": old, "worker 2": waiting}, 1.0)
    assert f"Waiting for worker 1 ({old}): still running from an earlier start" in caplog.text
    assert str(raised.value).startswith(
        f"worker 1 ({old}) did not start within startup_timeout_seconds=1."
    )
    assert f"worker 1 ({old}) still runs from an earlier start" in str(raised.value)

    def restart():
        while caplog.text.count("still running from an earlier start") < 2:
            time.sleep(0.01)
        servers[0].shutdown(socket.SHUT_RDWR)
        servers[0].close()
        for connection in connections:
            connection.close()
        # so soon that nobody has seen the port without a listener
        servers.append(serve(old))
        threading.Thread(target=speak, args=servers[-1:], daemon=True).start()

    restarts = threading.Thread(target=restart)
    restarts.start()
    with caplog.at_level(logging.WARNING):
        assert wait_for_peers(own, {"worker 1": old, "worker 2": waiting}, TIMEOUT) > 0
    restarts.join()
    for server in servers:
        server.close()


def test_who_greets_is_of_another_start_than_who_listened_there(
    addresses,
):
    own, other, running = addresses[:3]
    waits = threading.Thread(target=wait_for_peers, args=(own, {"worker 1": other}, TIMEOUT))
    waits.start()
    while not arrival._accepting([own]):
        time.sleep(0.01)
    assert has_left(own) and waits.is_alive()
    with serve(other):
        waits.join(TIMEOUT)
        assert not has_left(other)  # silent, as a process that is stopped
    with serve(running) as server:
        threading.Thread(target=speak, args=[server], daemon=True).start()
        assert not has_left(running)


def test_a_connection_that_is_reset_at_once_is_not_that_of_a_worker():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as attempt:
        attempt.connect(server.getsockname())
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # resets, as the end of a process with unread data does
        select.select([attempt], [], [], TIMEOUT)
        assert attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # told once, then cleared
        assert not arrival._is_connected(attempt)


def test_who_was_restarted_alone_ends_after_the_others(addresses, monkeypatch, caplog):
    monkeypatch.setattr(arrival, "_SECONDS_TO_RESTART", 0.5)
    own, old, late = addresses[:3]
    server, connections = serve(old), []
    threading.Thread(target=speak, args=(server, connections), daemon=True).start()

    def end():
        while "still running from an earlier start" not in caplog.text:
            time.sleep(0.01)
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in connections:
            connection.close()

    ends = threading.Thread(target=end)
    ends.start()
    told = rf"^worker 1 \({old}\) belonged to an earlier start.*Restart all workers"
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError, match=told):
        wait_for_peers(own, {"worker 1": old, "worker 2": late}, TIMEOUT)
    ends.join()


def test_a_name_that_is_not_known_yet_is_waited_for(addresses):
    with pytest.raises(TimeoutError, match=r"worker 1 \(no\.such\.host\.invalid:1\)"):
        wait_for_peers(addresses[0], {"worker 1": "no.such.host.invalid:1"}, 0.5)


def test_many_missing_ones_are_not_all_listed(addresses):
    many = {f"worker {i}": f"127.0.0.1:{i}" for i in range(1, 20)}
    with pytest.raises(TimeoutError, match=r"worker 8 \(127.0.0.1:8\) and 11 more did not"):
        wait_for_peers(addresses[0], many, 0.1)


def test_the_own_place_is_free_again(addresses):
    with pytest.raises(TimeoutError):
        wait_for_peers(addresses[0], {"worker 1": addresses[1]}, 0.1)
    host, port = addresses[0].split(":")
    socket.create_server((host, int(port)), reuse_port=False).close()


def test_a_further_strategy_finds_its_port_in_use_by_its_own_process(
    addresses,
):
    own, other = addresses[:2]
    with serve(own), serve(other):
        assert wait_for_peers(own, {"worker 1": other}, TIMEOUT, listens=False) > 0


def test_a_port_that_another_program_uses_is_named(addresses, monkeypatch):
    monkeypatch.setattr(arrival, "_SECONDS_TO_END", 0.1)
    with (
        serve(addresses[0]),
        pytest.raises(RuntimeError, match=f"listen at {addresses[0]}.*the same index"),
    ):
        wait_for_peers(addresses[0], peers_of(0, addresses), TIMEOUT)


def test_a_port_of_a_program_that_is_ending_is_waited_for(addresses, monkeypatch):
    monkeypatch.setattr(arrival, "_SECONDS_TO_END", TIMEOUT)
    ending = serve(addresses[0])
    waits = threading.Event()
    monkeypatch.setattr(arrival.time, "sleep", lambda _: (waits.set(), ending.close()))
    with pytest.raises(TimeoutError):
        wait_for_peers(addresses[0], peers_of(0, addresses), 0.1)
    assert waits.is_set()
