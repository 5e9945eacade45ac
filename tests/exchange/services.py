"""Servers and clients that tests of the exchange start."""

import contextlib
import threading
from concurrent.futures import Future

import numpy as np

from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.server import Server

CREDENTIAL = b"of these tests only, 32 bytes..."
TIMEOUT = 30.0


class Twice:
    """A service that gives back twice the values it gets, and keeps those of slot 0 waiting."""

    def __init__(self):
        self.taken = []
        self.waiting = []
        self.has_waiting = threading.Event()

    def handle(self, sender, request):
        if request.kind is Kind.JOIN:
            return Message(Kind.DONE)
        _, slot, _ = request.numbers
        self.taken.append((sender, slot))
        if slot == 0:
            self.waiting.append(Future())
            self.has_waiting.set()
            return self.waiting[-1]
        if slot < 0:
            raise ValueError("A slot is not negative.")
        return Message(Kind.SUM, (), (2 * request.vectors[0],))


@contextlib.contextmanager
def serving(handler, **options):
    server = Server("127.0.0.1:0", **options)
    server.serve("twice", CREDENTIAL, handler)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def connected(server, credential=CREDENTIAL, sender=0):
    client = Client(server.address, "twice", credential, sender)
    try:
        client.connect(TIMEOUT)
        yield client
    finally:
        client.close()


def contribution(slot, values):
    return Message(Kind.CONTRIBUTION, (1, slot, 1), (np.asarray(values, np.float32),))


def twice(client, values, slot=1):
    return client.ask(contribution(slot, values), TIMEOUT).vectors[0]


def wait_until(condition):
    """Wait for what another thread does; the test's own time-out is the hard one."""
    stop = threading.Event()
    for _ in range(int(TIMEOUT / 0.01)):
        if condition():
            return
        stop.wait(0.01)
    raise AssertionError("It did not come to pass.")
