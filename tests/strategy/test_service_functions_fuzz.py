"""Bad requests to every other function of the service change nothing; good ones still do."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address

from keras_het.strategy.hybrid.offers import Offers, make_offer
from keras_het.strategy.hybrid.service_spec import ServiceSpec
from keras_het.strategy.hybrid.serving import ServingProcess
from keras_het.strategy.parameter_service import ParameterService, Partitions, Status, credential
from keras_het.strategy.parameter_service.function_client import FunctionClient, NoAnswerError
from keras_het.strategy.parameter_service.function_server import FunctionServer
from keras_het.strategy.parameter_service.gate import Gate
from keras_het.strategy.parameter_service.sample_ledger import (
    LARGEST_EPOCH,
    Presence,
    SampleLedger,
    Stage,
    TrainingFacts,
)
from keras_het.strategy.rules import AsyncSGD, Signal

PARTITIONS = Partitions(((4, 3), (2,)), partition_size=9)  # 14 elements: two of seven
SECRET = b"0123456789abcdef"
GOOD = credential(SECRET, "model")
NUM_CLIENTS, NUM_BAD = 3, 600
STATUS = tf.TensorSpec([], tf.int32)
NUMBERS = tf.TensorSpec(None, tf.float64)
BOOL = (STATUS, tf.TensorSpec([], tf.bool))
FLOATS = {
    "ledger_lead": (STATUS, NUMBERS),
    "ledger_pace": (STATUS, NUMBERS, NUMBERS),
    "export_7": (STATUS, tf.TensorSpec(None, tf.int64), tf.TensorSpec([], tf.string)),
    "push_7": (STATUS, tf.TensorSpec(None, tf.int64), tf.TensorSpec(None, tf.float32)),
}


class Requests:
    """Random requests with one thing wrong: the credential, or a value that is out of range."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def make(self):
        """Credential, function and arguments."""
        function, arguments, wrong = self.one_of(self.kinds())
        if not wrong or self.random.integers(3) == 0:
            return self.wrong_credential(), function, arguments
        place, value = self.one_of(wrong)
        arguments[place] = value
        return GOOD, function, arguments

    def kinds(self):
        """Functions, good arguments, and what is wrong in the place of one of them."""
        bad_client = self.one_of([-1, NUM_CLIENTS, 2**31 - 1])
        bad_size = self.random.normal(size=4).astype("float32")
        center = self.random.normal(size=7).astype("float32")
        broken = center.copy()
        broken[self.random.integers(7)] = self.one_of([np.nan, np.inf, -np.inf])
        piece = tf.io.serialize_tensor(center).numpy()  # of the momentum
        broken_piece = self.one_of([b"", b"x" * 40, piece[:-1], piece + b"x"])
        broken_piece = self.one_of([broken_piece, tf.io.serialize_tensor(broken).numpy()])
        version, below = (tf.io.serialize_tensor(np.int64([n])).numpy() for n in (0, -1))
        facts = np.array([int(Stage.CLOSED), 7, 1, 2, 3, 4, 5, 6], np.int64)
        bad_epoch = facts.copy()
        bad_epoch[2] = self.one_of([-1, LARGEST_EPOCH, 2**62])
        bad_stage = facts.copy()
        bad_stage[0] = int(Stage.CLOSED) + 1
        number = np.int64
        of_partition = [
            ("restore_7", [center], [(0, broken), (0, bad_size)]),
            ("set_state_7", [np.array([1, 7]), np.int32(1), number(0), piece],
             [(0, np.array([1])), (0, np.array([1, 8])), (0, np.array([1, 7, 7])),
              (1, np.int32(2)), (1, np.int32(-1)), (1, np.int32(0)), (2, number(-1)),
              (2, number(1)), (2, number(2**62)), (3, broken_piece)]),
            ("set_state_7", [np.array([1, 7]), np.int32(0), number(0), version], [(3, below)]),
            ("export_7", [np.int32(1), number(0)],
             [(0, np.int32(2)), (0, np.int32(-1)), (1, number(-1))]),
            ("signal_7", [np.int32(1), np.int32(0)],
             [(0, np.int32(bad_client)), (1, np.int32(max(Signal) + 1)), (1, np.int32(-1))]),
            ("latest_7", [np.int32(1)], [(0, np.int32(bad_client))]),
            ("push_7", [np.int32(1), np.float32(8), number(0), number(1), center],
             [(0, np.int32(bad_client)), (1, np.float32(-8)), (1, np.float32(np.nan)),
              (2, number(-1)), (3, number(-1)), (4, broken), (4, bad_size)]),
            ("close_7", [], []),
        ]  # fmt: skip
        of_ledger = [
            ("ledger_claim", [np.int32(1), number(0), number(1)],
             [(0, np.int32(bad_client)), (1, number(-1)), (1, number(LARGEST_EPOCH)),
              (2, number(0)), (2, number(-(2**62)))]),
            ("ledger_report", [np.int32(1), np.array([1, 3]), np.int32(1)],
             [(0, np.int32(bad_client)), (1, np.array([1, -1])), (1, np.array([-1, 3])),
              (2, np.int32(max(Presence) + 1))]),
            ("ledger_pace", [np.int32(1), np.array([50.0, 8.0, 0.1, 0.05])],
             [(0, np.int32(bad_client)), (1, np.array([np.nan, 8.0, 0.1, 0.05])),
              (1, np.array([-50.0, 8.0, 0.1, 0.05])), (1, np.array([50.0, 0.0, 0.1, 0.05])),
              (1, np.array([50.0, 8.0, np.inf, 0.05])), (1, np.array([50.0, 8.0, 0.1, -1.0])),
              (1, np.array([50.0, 8.0, 0.1]))]),
            ("ledger_lead", [np.int32(0), np.array([1, 3]), facts],
             [(0, np.int32(1)), (0, np.int32(bad_client)), (1, np.array([1, -1])),
              (1, np.array([-1, 3])), (2, bad_epoch), (2, bad_stage), (2, facts[:5])]),
        ]  # fmt: skip
        return [*map(self.of_a_partition, of_partition), *of_ledger]

    def of_a_partition(self, kind):
        """The number of the partition comes before the other arguments."""
        function, arguments, wrong = kind
        bad_number = np.int32(self.one_of([-1, 2, 2**31 - 1, -(2**31)]))
        wrong = [(place + 1, value) for place, value in wrong]
        return function, [np.int32(1), *arguments], [(0, bad_number), *wrong]

    def one_of(self, choices):
        return choices[self.random.integers(len(choices))]

    def wrong_credential(self):
        return self.one_of([b"", GOOD[:-1], GOOD + b"\0", bytes(self.random.bytes(32))])


@pytest.fixture
def service(cpu_devices):
    server = FunctionServer(free_address())
    rule = AsyncSGD(0.1, momentum=0.5)
    parameters = ParameterService(
        server.address, PARTITIONS, rule, GOOD, NUM_CLIENTS, server=server
    )
    ledger = SampleLedger(server, Gate(GOOD), NUM_CLIENTS)
    ledger.start_epoch(0, TrainingFacts(50, 17))
    ledger.set_stage(Stage.RUNNING)
    server.start()
    return parameters, ledger, server


def snapshot(parameters, ledger):
    variables = [v for v in vars(ledger).values() if isinstance(v, tf.Variable)]
    state = parameters.state()
    return [*parameters.center(), *state.values(), *[v.numpy() for v in variables]]


def test_bad_requests_change_nothing(service):
    parameters, ledger, server = service
    before, requests = snapshot(parameters, ledger), Requests(seed=3)
    clients, accepted = {}, []
    for _ in range(NUM_BAD):
        proof, function, arguments = requests.make()
        if proof not in clients:
            clients[proof] = FunctionClient(server.address, proof, 20)
        specs = {"ledger_claim": (STATUS, None, None)}.get(function, (STATUS, None))
        specs = STATUS if function in ("restore_7", "set_state_7") else specs
        specs = tf.nest.map_structure(lambda spec: spec or tf.TensorSpec(None, tf.int64), specs)
        if function == "signal_7":
            specs = (STATUS, STATUS)
        elif function == "close_7":
            specs = BOOL
        elif function in FLOATS:
            specs = FLOATS[function]
        answer = clients[proof].call(function, [tf.constant(a) for a in arguments], specs)
        if bool(answer.is_ok()):
            status = tf.nest.flatten(answer.get_value())[0]
            if int(status) in (Status.OK, Status.WAIT):
                accepted.append((proof == GOOD, function, arguments))
    assert accepted == []
    for now, then in zip(snapshot(parameters, ledger), before, strict=True):
        np.testing.assert_array_equal(now, then)
    # none that failed in its middle has kept the lock
    arguments = [tf.constant(number) for number in (1, 1, int(Signal.NOTHING))]
    assert int(clients[GOOD].ask("signal_7", arguments, (STATUS, STATUS))[0]) == Status.OK
    server.close()


def test_the_same_requests_without_a_fault_are_accepted(service):
    """The fuzzer's requests fail for the fault that they have, and for nothing else."""
    parameters, ledger, server = service
    client = FunctionClient(server.address, GOOD, 20)
    pairs = (STATUS, tf.TensorSpec(None, tf.int64))
    specs = {
        "restore_7": STATUS,
        "set_state_7": STATUS,
        "signal_7": (STATUS, STATUS),
        "ledger_claim": (STATUS, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64)),
        "ledger_report": pairs,
        "latest_7": pairs,
        "close_7": BOOL,
        **FLOATS,
    }
    for function, arguments, _ in Requests(seed=4).kinds():
        answer = client.ask(function, [tf.constant(a) for a in arguments], specs[function])
        assert int(tf.nest.flatten(answer)[0]) == Status.OK
    assert ledger.claimed.tolist() == [0, 1, 0] and ledger.used.tolist() == [3, 3, 0]
    assert ledger.stage == Stage.CLOSED
    assert np.abs(parameters.center()[0]).max() > 0
    server.close()


def spec():
    return ServiceSpec(
        shapes=((2,),),
        state_shapes=(),
        rule={"class_name": "Delta", "config": {}},
        state_rule={"class_name": "Delta", "config": {}},
        wire="float32",
        num_clients=2,
        staleness_bound=None,
        fingerprint="model",
        num_services=1,
        partition_size=7,
    )


@pytest.mark.full
def test_a_process_that_serves_survives_offers_that_it_cannot_read(cpu_devices):
    address, said = free_address(), []
    offers = Offers(SECRET)
    server = FunctionServer(address)
    offers.register_on(server)
    server.start()
    with pytest.raises(PermissionError, match="secret differs"):
        make_offer(address, b"another secret!!", spec(), 0, 10)
    assert not offers.is_pending
    make_offer(address, SECRET, spec(), 0, 10)
    assert offers.is_pending and offers.take()[1] == 0 and not offers.is_pending
    server.close()
    process = ServingProcess(address, SECRET, lambda: "not taken" in said[-1], said.append)
    for text in ("[0, 17", "17", '[0, "{}"]'):
        process._offers._text.assign(text)
        assert process.serve_one() is False
        assert "cannot be read" in said.pop()
    # of another version: values of other types
    for changed in ({"num_clients": "two"}, {"wire": 5}, {"rule": 5}, {"partition_size": None}):
        text = json.dumps([0, dataclasses.replace(spec(), **changed).to_json()])
        process._offers._text.assign(text)
        assert process.serve_one() is False
        assert "an offer was not taken" in said.pop()


def test_an_offer_to_nobody_says_what_to_start(cpu_devices):
    with pytest.raises(ConnectionError, match="keras-het serve") as caught:
        make_offer(free_address(), SECRET, spec(), 0, 0.5)
    assert isinstance(caught.value.__cause__, NoAnswerError)
