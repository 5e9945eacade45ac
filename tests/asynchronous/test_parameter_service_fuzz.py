"""Bad pushes while a good worker trains: its result is what it would be alone."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from service_doubles import PROOF as GOOD
from service_doubles import connect, start_service

from keras_het import private_api
from keras_het.asynchronous.parameter_service import FloatWire, Partitions, Status, TopKWire
from keras_het.asynchronous.rules import AsyncSGD, RoundRobinEASGD
from keras_het.rpc.admission import token

PARTITIONS = Partitions(((4, 3), (2,)), partition_size=9)  # 14 elements: two of seven
NUM_CLIENTS = 3
LARGEST = np.float32(3.4e38)  # two of them are too large together
SPECS = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64), tf.TensorSpec(None, tf.float32))


class Fuzzer:
    """Sends random pushes, each of which must be refused for the values that it brings.

    What every function refuses (tokens, numbers, shapes) is in test_service_functions_fuzz.
    """

    def __init__(self, address, seed, wire=None):
        self.wire = wire or FloatWire()
        self.random = np.random.default_rng(seed)
        self.rpc = private_api.RpcClient(address, f"fuzzer_{seed}", timeout_in_ms=20_000)
        self.accepted = []
        self.sent = 0

    def request(self):
        """A method and its arguments, one of which is wrong."""
        part = int(self.random.integers(2))
        size = PARTITIONS.sizes[part]
        change = self.random.normal(size=size).astype("float32")
        client, samples = self.random.integers(NUM_CLIENTS), self.random.integers(1, 9)
        is_top = isinstance(self.wire, TopKWire)
        kind = self.random.integers(6 if is_top else 4)
        if kind == 0:
            client = self.random.choice([-1, NUM_CLIENTS, 2**31 - 1])
        elif kind == 1:
            samples = self.random.choice([np.nan, np.inf, -8, LARGEST])
        elif kind == 2:
            # NaN is not among the largest values
            bad = [np.inf, -np.inf, *([] if is_top else [np.nan])]
            change[self.random.integers(size)] = self.random.choice(bad)
        elif kind == 3:
            change[self.random.integers(size)] = change[-1] = change[0] = LARGEST
        values, *places = [np.array(t) for t in self.wire.encode(change)[0]]
        if kind == 4:
            foreign = self.random.choice([-1, 9, 2**31 - 1, -(2**31)])
            places[0][self.random.integers(places[0].size)] = foreign
        elif kind == 5:
            places = [[places[0][:-1], np.repeat(places[0], 2)][self.random.integers(2)]]
        proof = token(GOOD, f"push_{size}", tf.timestamp())
        numbers = np.int32(part), np.int32(client), np.float32(samples), np.int64(0), np.int64(0)
        return f"push_{size}", [proof, *numbers, values, *places]

    def run(self, number):
        for _ in range(number):
            method, arguments = self.request()
            tensors = [tf.constant(argument) for argument in arguments]
            answer = self.rpc.call(method, tensors, output_specs=SPECS)
            self.sent += 1
            if bool(answer.is_ok()) and int(answer.get_value()[0]) == Status.OK:
                self.accepted.append((method, arguments))


WIRES = {"float32": FloatWire(), "float16": FloatWire("float16"), "top": TopKWire(0.4)}


@pytest.mark.quick("few top")
@pytest.mark.parametrize(
    ("wire", "num_bad"),
    [("float32", 2000), ("float16", 700), ("top", 700), ("top", 150)],
    ids=[*WIRES, "few top"],
)
def test_bad_requests_change_nothing(logical_devices, wire, num_bad):
    format_ = WIRES[wire]
    rule = AsyncSGD(0.1, momentum=0.5)
    service = start_service(PARTITIONS, rule, NUM_CLIENTS, wire=format_)
    fuzzer = Fuzzer(service.address, 11, format_)
    thread = threading.Thread(target=fuzzer.run, args=(num_bad,))
    client = connect(service, wire=format_)
    random = np.random.default_rng(5)
    versions = tf.zeros([2], tf.int64)
    momentum, expected, pushes = np.zeros(14), np.zeros(14), 0
    thread.start()
    while thread.is_alive() or pushes < 20:
        gradient = random.normal(size=14).astype("float32")
        zeros = [tf.zeros([size]) for size in PARTITIONS.sizes]
        answer = client.push(tf.split(gradient, PARTITIONS.sizes), versions, 8, zeros)
        np.testing.assert_array_equal(answer.statuses, [Status.OK] * 2)
        versions = answer.versions
        pushes += 1
        if wire != "float32":  # what a message does not carry is left
            carried = zip(tf.split(gradient, PARTITIONS.sizes), answer.residuals, strict=True)
            gradient = np.concatenate([sent - left for sent, left in carried])
        momentum = 0.5 * momentum + gradient
        expected = expected - 0.1 * momentum
    thread.join()
    assert fuzzer.sent == num_bad
    assert fuzzer.accepted == []
    np.testing.assert_array_equal(service.versions(), [pushes] * 2)
    center = np.concatenate([np.ravel(value) for value in service.center()])
    np.testing.assert_allclose(center, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_bad_requests_hold_up_nobody_who_waits_for_a_turn(logical_devices):
    """They may pass a turn on, and change nothing else; who is told to wait gets a later turn."""
    rule, num_bad = RoundRobinEASGD(NUM_CLIENTS), 700
    service = start_service(PARTITIONS, rule, NUM_CLIENTS)
    fuzzer = Fuzzer(service.address, seed=12)
    thread = threading.Thread(target=fuzzer.run, args=(num_bad,))
    clients = [connect(service, i) for i in range(NUM_CLIENTS)]
    random, versions, taken = np.random.default_rng(6), tf.zeros([2], tf.int64), []
    expected = [np.zeros(size) for size in PARTITIONS.sizes]
    thread.start()
    alone = 0
    while alone < 3 * NUM_CLIENTS:
        alone += not thread.is_alive()
        number = len(taken) % NUM_CLIENTS
        weights = [random.normal(size=size).astype("float32") for size in PARTITIONS.sizes]
        answer = clients[number].push(weights, versions, 8, weights)
        statuses = answer.statuses.numpy()
        assert set(statuses) <= {Status.OK, Status.WAIT}
        for part, status in enumerate(statuses):
            expected[part] += (status == Status.OK) * rule.alpha * (weights[part] - expected[part])
        taken.append(statuses == Status.OK)
    assert fuzzer.sent == num_bad and fuzzer.accepted == []
    np.testing.assert_array_equal(service.versions(), np.sum(taken, axis=0))
    assert np.all(taken[-NUM_CLIENTS:])  # the first of them may have waited for their turn
    for values, own in zip(service.center_partitions(), expected, strict=True):
        np.testing.assert_allclose(values, own, rtol=1e-4, atol=1e-4)
