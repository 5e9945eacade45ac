"""Bad requests of every kind, while a good worker trains: its result is what it would be alone."""

import threading

import numpy as np
import tensorflow as tf
from addresses import free_address

from keras_het import private_api
from keras_het.strategy.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    Status,
    credential,
)
from keras_het.strategy.rules import AsyncSGD

PARTITIONS = Partitions(((4, 3), (2,)), partition_size=9)  # 14 elements: 9 + 5
GOOD = credential(b"0123456789abcdef", "model")
NUM_BAD, NUM_CLIENTS = 2000, 3
SPECS = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64), tf.TensorSpec(None, tf.float32))


class Fuzzer:
    """Sends random requests, each of which must be refused."""

    def __init__(self, address, seed):
        self.random = np.random.default_rng(seed)
        self.rpc = private_api.RpcClient(address, f"fuzzer_{seed}", timeout_in_ms=20_000)
        self.accepted = []
        self.sent = 0

    def credential(self):
        wrong = [b"", GOOD[:-1], GOOD + b"\0", bytes(self.random.integers(0, 256, 32).tolist())]
        return wrong[self.random.integers(len(wrong))]

    def request(self):
        """A method and its arguments; one or more of them are wrong."""
        part = int(self.random.integers(2))
        size = PARTITIONS.sizes[part]
        change = self.random.normal(size=size).astype("float32")
        arguments = {
            "credential": GOOD,
            "client": np.int32(self.random.integers(NUM_CLIENTS)),
            "samples": np.float32(self.random.integers(1, 9)),
            "version": np.int64(0),
            "sequence": np.int64(0),
            "change": change,
        }
        kind = self.random.integers(10)
        if kind == 0:
            arguments["credential"] = self.credential()
        elif kind == 1:
            arguments["client"] = np.int32(self.random.choice([-1, NUM_CLIENTS, 2**31 - 1]))
        elif kind == 2:
            arguments["version"] = np.int64(-self.random.integers(1, 2**62))
        elif kind == 3:
            change[self.random.integers(size)] = self.random.choice([np.nan, np.inf, -np.inf])
        elif kind == 4:
            arguments["samples"] = np.float32(self.random.choice([np.nan, np.inf]))
        elif kind == 5:
            arguments["change"] = np.ones(self.random.choice([0, size - 1, size + 1]), "float32")
        elif kind == 6:
            arguments["change"] = change.astype(self.random.choice(["float64", "int32"]))
        elif kind == 8:
            arguments["sequence"] = np.int64(-self.random.integers(1, 2**62))
        elif kind == 7:
            arguments.pop(str(self.random.choice(list(arguments))))
        else:
            return f"push_{part + 2}", list(arguments.values())
        return f"push_{part}", list(arguments.values())

    def run(self, number):
        for _ in range(number):
            method, arguments = self.request()
            tensors = [tf.constant(argument) for argument in arguments]
            answer = self.rpc.call(method, tensors, output_specs=SPECS)
            self.sent += 1
            if bool(answer.is_ok()) and int(answer.get_value()[0]) == Status.OK:
                self.accepted.append((method, arguments))


def test_bad_requests_change_nothing(cpu_devices):
    service = ParameterService(
        free_address(), PARTITIONS, AsyncSGD(0.1, momentum=0.5), GOOD, NUM_CLIENTS
    )
    service.start()
    fuzzer = Fuzzer(service.address, seed=11)
    thread = threading.Thread(target=fuzzer.run, args=(NUM_BAD,))
    client = ParameterClient(service.address, PARTITIONS, GOOD, client=0)
    random = np.random.default_rng(5)
    versions = tf.zeros([2], tf.int64)
    momentum, expected, pushes = np.zeros(14), np.zeros(14), 0
    thread.start()
    while thread.is_alive() or pushes < 20:
        gradient = random.normal(size=14).astype("float32")
        answer = client.push(
            list(tf.split(gradient, PARTITIONS.sizes)), versions, 8, [tf.zeros([9]), tf.zeros([5])]
        )
        np.testing.assert_array_equal(answer.statuses, [Status.OK] * 2)
        versions = answer.versions
        pushes += 1
        momentum = 0.5 * momentum + gradient
        expected = expected - 0.1 * momentum
    thread.join()
    assert fuzzer.sent == NUM_BAD
    assert fuzzer.accepted == []
    np.testing.assert_array_equal(service.versions(), [pushes] * 2)
    center = np.concatenate([np.ravel(value) for value in service.center()])
    np.testing.assert_allclose(center, expected, rtol=1e-4, atol=1e-4)
