"""What a process holds of the center, and processes that serve what leaders offer."""

import contextlib
import dataclasses
import json
import threading

import numpy as np
import pytest
from addresses import free_address
from service_doubles import PROOF, SECONDS, SECRET, service_spec

from keras_het.asynchronous.parameter_service import credential
from keras_het.asynchronous.parameter_service.client import SERVICE
from keras_het.asynchronous.parameter_service.hosting import (
    _ABOUT,
    _OFFERS,
    HostedParts,
    ServingProcess,
    make_offer,
)
from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message


@pytest.fixture
def process():
    said, stop = [], threading.Event()
    process = ServingProcess("127.0.0.1:0", SECRET, stop.is_set, said.append)
    yield process, said, stop
    process.close()


@contextlib.contextmanager
def asking(address, service=SERVICE, proof=PROOF, sender=0):
    client = Client(address, service, proof, sender)
    try:
        yield lambda kind, *vectors: client.ask(Message(kind, (), vectors), SECONDS)
    finally:
        client.close()


def test_parts_are_shared_and_the_first_process_has_the_ledger():
    spec = service_spec(shapes=((20,),), state_shapes=((3,), (9,)), num_services=2)
    hosts = [HostedParts(None, place, spec, SECRET) for place in range(2)]
    held = [set(host.parameters.parts) for host in hosts]
    assert held[0] | held[1] == {*range(5)} and not held[0] & held[1]
    sizes = [part.size for host in hosts for part in host.parameters.parts.values()]
    assert sum(sizes) == 32 and [host.num_parts for host in hosts] == [2, 1]
    assert [host.ledger is not None for host in hosts] == [True, False]
    claim = Message(Kind.CLAIM, (0, 1))
    assert hosts[0].handle(1, claim).kind == Kind.GRANT
    with pytest.raises(ValueError, match="first process"):
        hosts[1].handle(1, claim)
    address = np.frombuffer(b"host:1", np.uint8)
    for sender, expected in ((1, b""), (0, b"host:1"), (2, b"host:1")):
        answer = hosts[0].handle(sender, Message(Kind.DIRECTORY, (), (address,)))
        assert answer.vectors[0].tobytes() == expected  # only the leader sets it


def test_a_synchronous_rule_is_refused():
    rule = {"class_name": "diloco", "config": {}}
    with pytest.raises(ValueError, match="cannot run the synchronous rule 'diloco'"):
        HostedParts(None, 0, service_spec(rule=rule), SECRET)


def test_a_training_is_served_from_its_offer_to_its_end(process):
    process, said, _ = process
    with pytest.raises(PermissionError, match="secret differs"):
        make_offer(process.address, b"another secret!!", service_spec(), 0, SECONDS)
    assert not process.is_offered_another
    make_offer(process.address, SECRET, service_spec(), 0, SECONDS)
    serving = threading.Thread(target=process.serve_one, daemon=True)
    serving.start()
    with asking(process.address) as ask, asking(process.address, proof=b"of the next") as ask_next:
        assert ask(Kind.LATEST).kind == Kind.STATUS
        with pytest.raises(PermissionError):
            ask_next(Kind.LATEST)
        ask(Kind.CLOSE_TRAINING)
        with pytest.raises(ConnectionError, match="ending"):  # who comes early waits
            ask_next(Kind.LATEST)
        ask(Kind.FINISH)
        serving.join(SECONDS)
        with pytest.raises((ConnectionError, NotImplementedError)):
            ask(Kind.LATEST)
        with pytest.raises(NotImplementedError, match="no service"):
            ask_next(Kind.LATEST)
    assert said[1:] == [
        "serving 1 partition of 1 variables to 3 participants, rule delta",
        "training has ended",
    ]


def test_a_leader_that_starts_again_ends_what_it_has_left(process):
    process, said, stop = process
    make_offer(process.address, SECRET, service_spec(), 0, SECONDS)
    serving = threading.Thread(target=lambda: process.serve_one() and process.serve_one())
    serving.start()
    with asking(process.address) as ask:
        ask(Kind.LATEST)
        make_offer(process.address, SECRET, service_spec(fingerprint="next"), 0, SECONDS)
        with pytest.raises((ConnectionError, PermissionError)):
            for _ in range(2):  # the connection ends, and the next one is refused
                ask(Kind.LATEST)
    with asking(process.address, proof=credential(SECRET, "next")) as ask:
        assert ask(Kind.LATEST).kind == Kind.STATUS
        ask(Kind.FINISH)
    serving.join(SECONDS)
    assert "training was left" in said and said[-1] == "training has ended"
    stop.set()
    assert process.serve_one() is False


def offers():
    yield from (b"", b"\xff", b"17", b"[0, 17", b"[0, {}]", b"[0, []]", b'["x", {}]')
    for changed in (  # as from another version
        {"num_participants": "two"},
        {"wire": 5},
        {"wire": "top-2"},
        {"rule": 5},
        {"rule": {"class_name": "unknown", "config": {}}},
        {"partition_bytes": None},
        {"shapes": ((-1,),)},
        {"state_shapes": 5},
    ):
        yield json.dumps([0, dataclasses.asdict(service_spec(**changed))]).encode()


def test_offers_that_cannot_be_read_are_refused_and_survived(process):
    process, said, _ = process
    with asking(process.address, _OFFERS, credential(SECRET, _ABOUT)) as ask:
        for count, text in enumerate(offers(), 1):
            with pytest.raises(ValueError, match=process.address):
                ask(Kind.OFFER, np.frombuffer(text, np.uint8))
            assert len(said) == count and said[-1].startswith("an offer was rejected: ")
        with pytest.raises(ValueError, match="expected: OFFER"):
            ask(Kind.LATEST)
    assert not process.is_offered_another
    make_offer(process.address, SECRET, service_spec(), 0, SECONDS)
    assert process.is_offered_another


def test_an_offer_to_nobody_says_what_to_start():
    with pytest.raises(ConnectionError, match="keras-het parameter-server"):
        make_offer(free_address(), SECRET, service_spec(), 0, 0.3)
