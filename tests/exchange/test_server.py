"""Who may connect, what is refused, and what happens when one side goes."""

import contextlib
import socket
import threading
from concurrent.futures import Future

import grpc
import numpy as np
import pytest
from services import CREDENTIAL, TIMEOUT, Twice, connected, contribution, serving, twice, wait_until

from keras_het.exchange import message as messages
from keras_het.exchange import server as server_module
from keras_het.exchange import wire
from keras_het.exchange.client import Client
from keras_het.exchange.message import HEADER_BYTES, Kind, Message, encode
from keras_het.exchange.secret import make_keys
from keras_het.exchange.server import Server


@pytest.fixture
def service():
    return Twice()


@pytest.fixture
def server(service):
    with serving(service.handle) as server:
        yield server


@pytest.fixture
def client(server):
    with connected(server) as client:
        yield client


class Recorder:
    """A connection by hand: any metadata, any pieces."""

    def __init__(self, server):
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(server.address, options)
        self.open = self.channel.stream_stream(f"/{wire.ROOM}/{wire.OPEN}")

    def hello(self):
        return self.channel.unary_unary(f"/{wire.ROOM}/{wire.HELLO}")(b"", timeout=TIMEOUT)

    def metadata(self, **changes):
        nonce, own = changes.get("nonce") or self.hello(), b"o" * 16
        keys = make_keys(changes.get("credential", CREDENTIAL), "twice", 0, nonce, own)
        made = {
            wire.SERVICE: "twice",
            wire.SENDER: "0",
            wire.NONCE: nonce,
            wire.CLIENT_NONCE: own,
            wire.PROOF: keys.proof,
        }
        return made, keys

    def send(self, metadata, pieces):
        """Status of a connection on which pieces are sent, and the pieces that answer them."""
        answers = []
        call = self.open(iter(pieces), metadata=tuple(metadata.items()), timeout=TIMEOUT)
        try:
            answers.extend(call)
        except grpc.RpcError as error:
            return error.code(), answers
        return grpc.StatusCode.OK, answers


@pytest.fixture
def recorder(server):
    recorder = Recorder(server)
    yield recorder
    recorder.channel.close()


def test_answers_come_when_they_are_ready(server, client, service):
    waiting = client.send(contribution(0, [1.0]))
    for size in (0, 1, 3_000_000):  # the last one in several pieces
        np.testing.assert_array_equal(twice(client, np.ones(size)), np.full(size, 2.0))
    assert not waiting.done()
    service.waiting[0].set_result(Message(Kind.SUM, (), (np.float32([5.0]),)))
    assert waiting.result(TIMEOUT).vectors[0].tolist() == [5.0]
    wait_until(lambda: server.budget.held == 0)


def test_many_requests_wait_without_a_thread_each(client, service):
    waiting = [client.send(contribution(0, [float(i)])) for i in range(300)]
    twice(client, [1.0])
    assert threading.active_count() < 50
    for number, each in enumerate(service.waiting):
        each.set_result(Message(Kind.SUM, (), (np.float32([number]),)))
    assert [w.result(TIMEOUT).vectors[0][0] for w in waiting] == list(range(300))


def test_connections_leave_no_thread(server, service):
    with connected(server) as first:
        twice(first, [1.0])  # the server's threads are there, too
        before = threading.active_count()
        for number in range(10):
            with connected(server) as client:
                waiting = client.send(contribution(0, [1.0]))
                assert twice(client, [1.0]) == [2.0]
            with pytest.raises(ConnectionError, match="was closed"):
                waiting.result(TIMEOUT)
            assert not client.is_there(1.0) and len(service.waiting) == number + 1
        wait_until(lambda: threading.active_count() <= before)


def test_an_error_of_a_request_is_raised_where_it_was_made(client, service):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+: A slot is not negative"):
        twice(client, [1.0], slot=-1)
    waiting = client.send(contribution(0, [1.0]))
    assert service.has_waiting.wait(TIMEOUT)
    service.waiting[0].set_exception(ConnectionError("Another run has begun."))
    with pytest.raises(ConnectionError, match="Another run has begun"):
        waiting.result(TIMEOUT)
    assert twice(client, [1.0]) == [2.0]


def test_another_secret_is_refused_before_anything_is_read(server, service, recorder, monkeypatch):
    monkeypatch.setattr(server_module, "decode", lambda *_: pytest.fail("read"))
    with pytest.raises(PermissionError, match="shared secret or the cluster differs"):
        Client(server.address, "twice", b"another").connect(TIMEOUT)
    sent, stop = [], threading.Event()

    def endless():
        while not stop.is_set():
            sent.append(len(sent))
            yield b"x" * 2**20

    metadata, _ = recorder.metadata(credential=b"another")
    status, answers = recorder.send(metadata, endless())
    stop.set()
    assert (status, answers) == (grpc.StatusCode.UNAUTHENTICATED, [])
    assert len(sent) < 20  # what the network takes in before anybody asks for it
    assert service.taken == [] and server.budget.held == 0


def test_connections_without_a_right_proof(server, service, recorder):
    good, _ = recorder.metadata()
    wrong = {
        wire.SENDER: ["1", "x", ""],
        wire.SERVICE: ["thrice", ""],
        wire.NONCE: [b"", b"n" * 16],
        wire.CLIENT_NONCE: [b"", b"p" * 16, b"o" * 17],
        wire.PROOF: [b"", b"p" * 32],
    }
    for name, values in wrong.items():
        for value in [*values, None]:
            metadata = {**recorder.metadata()[0], name: value}
            if value is None:
                del metadata[name]
            status, answers = recorder.send(metadata, [b"x"])
            assert status not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN), (name, value)
            assert answers == []
    assert service.taken == []
    assert recorder.send(good, [])[0] is grpc.StatusCode.UNAVAILABLE  # was closed


def test_what_was_recorded_is_worth_nothing_later(server, service, recorder):
    metadata, keys = recorder.metadata()
    pieces = list(encode(contribution(1, [1.0])._replace(number=1), keys.requests))
    _, answers = recorder.send(metadata, pieces)
    assert len(answers) == len(service.taken) == 1
    # the connection as a whole, and its messages on another one
    assert recorder.send(metadata, pieces)[0] is grpc.StatusCode.ABORTED
    assert recorder.send(recorder.metadata()[0], pieces)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert len(service.taken) == 1
    # a message again, one left out, and an answer in place of a request
    for numbers in ([1, 1], [2], [0]):
        metadata, keys = recorder.metadata()
        pieces = [
            piece
            for number in numbers
            for piece in encode(Message(Kind.JOIN, (1,), (), number), keys.requests)
        ]
        status, answers = recorder.send(metadata, pieces)
        assert status is grpc.StatusCode.INVALID_ARGUMENT and len(answers) == len(numbers) - 1
    metadata, keys = recorder.metadata()
    pieces = encode(contribution(1, [1.0])._replace(number=1), keys.answers)
    assert recorder.send(metadata, pieces)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert len(service.taken) == 1


def test_a_server_that_started_again_takes_nothing_of_before(service):
    with serving(service.handle) as server:
        metadata, _ = Recorder(server).metadata()
        address = server.address
    again = Server(address)
    again.serve("twice", CREDENTIAL, service.handle)
    again.start()
    try:
        assert Recorder(again).send(metadata, [b"x"])[0] is grpc.StatusCode.ABORTED
    finally:
        again.close()


@pytest.mark.parametrize("rounds", [25, pytest.param(500, marks=pytest.mark.full)])
def test_random_messages_over_the_network_have_no_effect(server, service, recorder, rounds):
    """From one that knows the secret: each connection ends at the first wrong piece."""
    random = np.random.default_rng(1)
    with connected(server) as client:
        twice(client, [1.0])
        for _ in range(rounds):
            metadata, keys = recorder.metadata()
            piece = bytearray(*encode(contribution(1, [1.0] * 5), keys.requests))
            piece[random.integers(HEADER_BYTES)] ^= random.integers(1, 256)
            wrong = random.bytes(random.integers(1, 200)) if random.random() < 0.5 else piece
            others = [random.bytes(20) for _ in range(random.integers(20))]
            status, answers = recorder.send(metadata, [bytes(wrong), *others])
            assert (status, answers) == (grpc.StatusCode.INVALID_ARGUMENT, [])
        assert service.taken == [(0, 1)]
        assert twice(client, [1.0]) == [2.0]
        wait_until(lambda: server.budget.held == 0)


def test_a_client_that_goes_in_the_middle_of_a_message(server, service, recorder):
    metadata, keys = recorder.metadata()
    (whole,) = encode(contribution(1, np.ones(1000))._replace(number=1), keys.requests)
    sent, stay = threading.Event(), threading.Event()

    def half():
        yield whole[: len(whole) // 2]
        sent.set()
        stay.wait(TIMEOUT)

    call = recorder.open(half(), metadata=tuple(metadata.items()))
    assert sent.wait(TIMEOUT)
    wait_until(lambda: server.budget.held == 4000)
    call.cancel()
    stay.set()
    wait_until(lambda: server.budget.held == 0)
    assert service.taken == []


def test_answers_that_wait_have_a_bound(service):
    with serving(service.handle, most_bytes=1000) as server:
        with connected(server) as client:
            waiting = client.send(contribution(0, [1.0]))
            assert service.has_waiting.wait(TIMEOUT)
            service.waiting[0].set_result(Message(Kind.SUM, (), (np.ones(300, np.float32),)))
            with pytest.raises(MemoryError, match="holds 4 bytes"):
                waiting.result(TIMEOUT)
        wait_until(lambda: server.budget.held == 0)


def test_requests_that_wait_have_a_bound(service):
    with serving(service.handle, most_bytes=1000, largest_message=2000) as server:
        with connected(server) as client:
            waiting = client.send(contribution(0, np.ones(200)))
            assert twice(client, [1.0]) == [2.0]
            wait_until(lambda: server.budget.held == 800)  # given back once the answer is sent
            too_much = client.send(contribution(1, np.ones(100)))
            for each in (waiting, too_much):  # the connection ends, with all that waits on it
                with pytest.raises(MemoryError, match="holds 800 bytes"):
                    each.result(TIMEOUT)
        wait_until(lambda: server.budget.held == 0)
        with connected(server) as client:
            assert twice(client, [1.0]) == [2.0]
            with pytest.raises(ValueError, match="2400 bytes; expected: 2000 at most"):
                twice(client, np.ones(600))


def test_connections_have_a_bound(service):
    with serving(service.handle, most_connections=2) as server, connected(server) as client:
        assert twice(client, [1.0]) == [2.0]
        with connected(server), pytest.raises(MemoryError, match="oncurrent RPC limit"):
            Client(server.address, "twice", CREDENTIAL).connect(TIMEOUT)
        assert twice(client, [1.0]) == [2.0]


def test_a_service_that_starts_again_ends_its_connections(server, client, service):
    waiting = client.send(contribution(0, [1.0]))
    assert service.has_waiting.wait(TIMEOUT)
    server.serve("twice", b"another", service.handle)
    with pytest.raises(ConnectionError, match="has started again"):
        waiting.result(TIMEOUT)
    with pytest.raises(PermissionError):
        client.connect(TIMEOUT)


def test_a_client_connects_again_to_the_next_server_at_the_address(service):
    with serving(service.handle) as server:
        client = Client(server.address, "twice", CREDENTIAL)
        assert twice(client, [1.0]) == [2.0]
        address = server.address
    with pytest.raises(ConnectionError, match=r"has ended|Stream removed|closed"):
        client.send(contribution(1, [1.0])).result(TIMEOUT)
    again = Server(address)
    again.serve("twice", CREDENTIAL, service.handle)
    again.start()
    assert twice(client, [1.0]) == [2.0]
    client.close()
    again.close()


def test_a_server_without_the_secret_is_refused(monkeypatch, service):
    """It admits everybody, and cannot show that it knows what the client knows."""
    monkeypatch.setattr("keras_het.exchange.secret.Keys.is_shown", lambda keys, proof: True)
    with serving(service.handle) as server:
        client = Client(server.address, "twice", b"another")
        with pytest.raises(PermissionError, match="does not know the shared secret"):
            client.connect(TIMEOUT)
        client.close()


def test_addresses_that_are_not_one_of_this_machine(server):
    for address in ("0.0.0.0:0", "[::]:0", ":0"):
        with pytest.raises(ValueError, match="listens on one address"):
            Server(address)
    with pytest.raises(OSError, match="somebody listens there"):
        Server(server.address)
    with pytest.raises(OSError, match="does not have the address"):
        Server("203.0.113.7:0")
    listening = {each for each in socket.gethostbyname_ex("localhost")[2]}
    assert server.address.split(":")[0] in listening


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"127.0.0.1:{silent.getsockname()[1]}", "twice", CREDENTIAL)
        another_thread_connects = client._lock
        for waits_behind in (contextlib.nullcontext(), another_thread_connects):
            with waits_behind, pytest.raises(TimeoutError, match=r"did not answer within 0\.2 s"):
                client.connect(0.2)
        assert not client.is_there(0.2)
        with pytest.raises(ConnectionError, match="There is no connection"):
            client.send(contribution(1, [1.0]))
        client.close()


def test_a_client_that_was_closed_does_not_connect(client):
    client.close()
    with pytest.raises(ConnectionError, match="was closed"):
        client.connect(TIMEOUT)


def test_a_connection_that_two_threads_end_fails_once(client):
    stream = client._stream
    stream.opened = Future()
    stream.opened.done = lambda: False  # the other thread is about to set it
    stream.opened.set_result(None)
    stream.close()
    with pytest.raises(ConnectionError, match="was closed"):
        client.send(contribution(1, [1.0])).result(TIMEOUT)


def test_an_answer_that_does_not_come_in_time(server):
    with connected(server) as client, pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        client.ask(contribution(0, [1.0]), 0.2)


def test_pieces_are_no_longer_than_what_a_server_takes(server):
    assert dict(wire.options())["grpc.max_receive_message_length"] == messages.PIECE_BYTES
