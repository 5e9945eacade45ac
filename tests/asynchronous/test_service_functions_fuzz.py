"""Bad requests to every other function of the service change nothing; good ones still do."""

import json

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from devices import create_logical_devices
from service_doubles import PROOF as GOOD
from service_doubles import SECRET, service_spec, variables_of
from wrong_tokens import wrong_token

from keras_het import private_api
from keras_het.asynchronous.exchange.hosting import HostedParts, ServingProcess, make_offer
from keras_het.asynchronous.parameter_service import ParameterService, Partitions, Status
from keras_het.asynchronous.parameter_service.sample_ledger import (
    LARGEST_EPOCH,
    LeaderLedger,
    Presence,
    SampleLedger,
    Stage,
    TrainingFacts,
)
from keras_het.asynchronous.rules import AsyncSGD, Signal
from keras_het.rpc.admission import LONGEST_AGE_SECONDS, Gate, token
from keras_het.rpc.channel import FunctionClient, LocalChannel, NoAnswerError, error_of
from keras_het.rpc.server import FunctionServer, hello_function

PARTITIONS = Partitions(((4, 3), (2,)), partition_size=9)  # 14 elements: two of seven
NUM_CLIENTS, UNAVAILABLE = 3, 14
STATUS = tf.TensorSpec([], tf.int32)


def replaced(values, place, value):
    copy = values.copy()
    copy[place] = value
    return copy


class Requests:
    """Random requests with one thing wrong: the credential, or a value that is out of range."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def make(self):
        function, arguments, wrong = self.one_of(self.kinds())
        if not wrong or self.random.integers(3) == 0:
            return wrong_token(self.random, GOOD, function), function, arguments
        place, value = self.one_of(wrong)
        arguments[place] = value
        return token(GOOD, function, tf.timestamp()), function, arguments

    def kinds(self):
        """Functions, good arguments, and what is wrong in the place of one of them."""
        bad_client = self.one_of([-1, NUM_CLIENTS, 2**31 - 1])
        bad_size = self.random.normal(size=4).astype("float32")
        center = self.random.normal(size=7).astype("float32")
        not_finite = self.one_of([np.nan, np.inf, -np.inf])
        broken = replaced(center, self.random.integers(7), not_finite)
        piece = tf.io.serialize_tensor(center).numpy()  # of the momentum
        broken_piece = self.one_of([b"", b"x" * 40, piece[:-1], piece + b"x"])
        broken_piece = self.one_of([broken_piece, tf.io.serialize_tensor(broken).numpy()])
        version, below = (tf.io.serialize_tensor(np.int64([n])).numpy() for n in (0, -1))
        facts = np.array([int(Stage.CLOSED), 7, 1, 2, 3, 4, 5, 6], np.int64)
        bad_epoch = replaced(facts, 2, self.one_of([-1, LARGEST_EPOCH, 2**62]))
        bad_stage = replaced(facts, 0, int(Stage.CLOSED) + 1)
        pace = np.array([50.0, 8.0, 0.1, 0.05, 0.1, 1.0])
        bad_paces = [
            (0, np.nan),
            (0, -50.0),
            (1, 0.0),
            (2, np.inf),
            *((i, -1.0) for i in range(2, 6)),
        ]
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
            ("ledger_pace", [np.int32(1), pace],
             [(0, np.int32(bad_client)), (1, pace[:3]),
              *((1, replaced(pace, place, value)) for place, value in bad_paces)]),
            ("ledger_lead", [np.int32(0), np.array([1, 3]), facts],
             [(0, np.int32(1)), (0, np.int32(bad_client)), (1, np.array([1, -1])),
              (1, np.array([-1, 3])), (2, bad_epoch), (2, bad_stage), (2, facts[:5])]),
        ]  # fmt: skip
        return [*map(self.of_a_partition, of_partition), *of_ledger]

    def of_a_partition(self, kind):
        """The number of the partition comes before the other arguments."""
        function, arguments, wrong = kind
        bad_number = np.int32(self.one_of([-1, 2, 2**31 - 1, -(2**31), [], [1], [[1]]]))
        wrong = [(place + 1, value) for place, value in wrong]
        return function, [np.int32(1), *arguments], [(0, bad_number), *wrong]

    def one_of(self, choices):
        return choices[self.random.integers(len(choices))]


@pytest.fixture
def registered(monkeypatch):
    """What servers answer with behind their check, by name."""
    functions, register = {}, FunctionServer.register

    def note(server, name, function, *others):
        functions[name] = function.get_concrete_function()
        register(server, name, function, *others)

    monkeypatch.setattr(FunctionServer, "register", note)
    return functions


@pytest.fixture(scope="module")
def served():
    """A service beside a ledger, what its functions return, and its variables as they are new."""
    create_logical_devices()
    server = FunctionServer(free_address())
    rule = AsyncSGD(0.1, momentum=0.5)
    parameters = ParameterService(
        server.address, PARTITIONS, rule, GOOD, NUM_CLIENTS, server=server
    )
    ledger = SampleLedger(server, Gate(GOOD), NUM_CLIENTS)
    owned = [variables_of(ledger), *map(variables_of, parameters._parts)]
    owned += [slots.values() for slots in parameters.slots()]
    new = [(variable, variable.numpy()) for own in owned for variable in own]
    server.start()
    outputs = {
        name: function.get_concrete_function().structured_outputs
        for name, function in server._methods.items()
    }
    yield parameters, ledger, server, outputs, new
    server.close()


@pytest.fixture
def service(served):
    """They, and what their functions return, in a training that has begun."""
    parameters, ledger, server, outputs, new = served
    for variable, value in new:
        variable.assign(value)
    leader = LeaderLedger(LocalChannel(server))
    leader.start_epoch(0, TrainingFacts(50, 17))
    leader.set_stage(Stage.RUNNING)
    leader.tell()
    return parameters, ledger, server, outputs


def snapshot(parameters, ledger):
    variables = [v for v in vars(ledger).values() if isinstance(v, tf.Variable)]
    state = parameters.state()
    return [*parameters.center(), *state.values(), *[v.numpy() for v in variables]]


@pytest.mark.quick("150")
@pytest.mark.parametrize("num_bad", [150, 600])
def test_bad_requests_change_nothing(service, num_bad):
    parameters, ledger, server, outputs = service
    before, requests = snapshot(parameters, ledger), Requests(seed=3)
    rpc, accepted = private_api.RpcClient(server.address, "fuzzer", timeout_in_ms=20_000), []
    for _ in range(num_bad):
        proof, function, arguments = requests.make()
        tensors = [tf.constant(argument) for argument in (proof, *arguments)]
        answer = rpc.call(function, tensors, output_specs=outputs[function])
        if bool(answer.is_ok()):
            status = tf.nest.flatten(answer.get_value())[0]
            if int(status) in (Status.OK, Status.WAIT):
                accepted.append((proof, function, arguments))
    assert accepted == []
    for now, then in zip(snapshot(parameters, ledger), before, strict=True):
        np.testing.assert_array_equal(now, then)
    # none that failed in its middle has kept the lock
    arguments = [tf.constant(number) for number in (1, 1, int(Signal.NOTHING))]
    client = FunctionClient(server.address, GOOD, 20)
    assert int(client.ask("signal_7", arguments, (STATUS, STATUS))[0]) == Status.OK


def test_the_same_requests_without_a_fault_are_accepted(service):
    """The fuzzer's requests fail for the fault that they have, and for nothing else."""
    parameters, ledger, server, outputs = service
    client = FunctionClient(server.address, GOOD, 20)
    for function, arguments, _ in Requests(seed=4).kinds():
        answer = client.ask(function, [tf.constant(a) for a in arguments], outputs[function])
        assert int(tf.nest.flatten(answer)[0]) == Status.OK
    assert ledger._claimed.numpy().tolist() == [0, 1, 0]
    assert ledger._used.numpy().tolist() == [3, 3, 0] and int(ledger._facts[0]) == Stage.CLOSED
    assert np.abs(parameters.center()[0]).max() > 0


def parts_of_a_hybrid_training(address):
    """What such a process answers with, and what may not change."""
    parts = HostedParts(address, 0, service_spec(state_shapes=((3,),)), SECRET)
    process = ServingProcess(address, SECRET, lambda: True)
    process.take_offers_on(parts.server)
    parts.start()
    of_parts = [*parts.weights._parts, *parts.state._parts]
    owners = (*of_parts, parts.ledger, parts, process)
    return parts, [variable for owner in owners for variable in variables_of(owner)]


DTYPES = (tf.int32, tf.int64, tf.float32, tf.float64, tf.string, tf.bool, tf.complex64)
SHAPES = ([], [0], [1], [2], [1, 1], [0, 3], [1, 0], [2, 2], [1] * 8)


def messages(specs, proof):
    """For each argument, the token too, other ranks, lengths and types; and one too few."""
    specs = [tf.TensorSpec([], tf.string), *specs]
    shapes = [[3 if size is None else size for size in spec.shape] for spec in specs]
    good = [proof, *map(tf.zeros, shapes[1:], [spec.dtype for spec in specs[1:]])]
    for place, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        near = [[shape[0] - 1], [shape[0] + 1], [1, *shape], [*shape, 1]] if shape else []
        others = [other for other in (*SHAPES, *near) if not spec.shape.is_compatible_with(other)]
        wrong = (
            [tf.fill(other, proof) for other in others]
            if place == 0
            else [tf.zeros(other, spec.dtype) for other in others]
        )
        wrong += [tf.zeros(shape, dtype) for dtype in DTYPES if dtype != spec.dtype]
        yield from ([*good[:place], value, *good[place + 1 :]] for value in wrong)
    yield good[:-1]


@pytest.mark.full
def test_no_shape_or_type_of_any_argument_is_trusted(logical_devices, registered, monkeypatch):
    """The token is right, so that only the check of shapes stands before the function."""
    register = FunctionServer.register
    monkeypatch.setattr(
        FunctionServer,
        "register",
        lambda server, name, function, gate, *others: register(
            server, name, function, Gate(GOOD), *others
        ),
    )
    address = free_address()
    server, kept = parts_of_a_hybrid_training(address)
    before = [variable.numpy() for variable in kept]
    rpc, accepted = private_api.RpcClient(address, "wrong shapes", timeout_in_ms=20_000), []
    for name, function in registered.items():
        specs, _ = function.structured_input_signature
        for message in messages(specs, token(GOOD, name, tf.timestamp())):
            answer = rpc.call(name, message, output_specs=function.structured_outputs)
            code, text = error_of(answer)
            assert code != UNAVAILABLE, (name, message, text)
            if code == 0 and int(tf.nest.flatten(answer.get_value())[0]) != Status.REFUSED:
                accepted.append((name, message))
    assert accepted == [] and registered
    for variable, value in zip(kept, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    server.close()


def test_a_token_opens_one_function_for_a_while(logical_devices):
    gate, now = Gate(GOOD), float(tf.timestamp())

    def admits(function, at):
        return bool(gate.admits(token(GOOD, function, at), "push"))

    assert admits("push", now)
    assert not admits("pull", now)
    edge = LONGEST_AGE_SECONDS - 5
    assert admits("push", now - edge) and admits("push", now + edge)
    assert not admits("push", now - edge - 10) and not admits("push", now + edge + 10)
    random = np.random.default_rng(3)
    for _ in range(60):
        assert not bool(gate.admits(wrong_token(random, GOOD, "push"), "push"))


@pytest.mark.full
def test_a_worker_whose_clock_is_wrong_asks_for_the_time(logical_devices):
    server = FunctionServer(free_address())
    server.register("hello", hello_function(), Gate(GOOD))
    server.start()
    wrong = FunctionClient(server.address, GOOD, 20)
    wrong._clock_ahead = -10_000.0  # as if its own clock were ahead by as much
    assert int(wrong.ask("hello", [], STATUS)) == Status.OK
    assert abs(wrong._clock_ahead) < LONGEST_AGE_SECONDS / 2
    stranger = FunctionClient(server.address, GOOD[:-1], 20)
    assert int(stranger.ask("hello", [], STATUS)) == Status.REFUSED
    server.close()


@pytest.mark.full
def test_a_process_that_serves_survives_offers_that_it_cannot_read(logical_devices):
    address, said = free_address(), []
    process = ServingProcess(address, SECRET, lambda: "not taken" in said[-1], said.append)
    server = FunctionServer(address)
    process.take_offers_on(server)
    server.start()
    with pytest.raises(PermissionError, match="secret differs"):
        make_offer(address, b"another secret!!", service_spec(), 0, 10)
    assert not process.is_offered_another
    make_offer(address, SECRET, service_spec(), 0, 10)
    assert process.is_offered_another
    server.close()
    parts = process._make_parts()
    assert (parts.spec, parts.ledger is not None) == (service_spec(), True)
    assert not process.is_offered_another
    parts.close()
    for text in ("[0, 17", "17", '[0, "{}"]'):
        process._offer.assign(text)
        assert process.serve_one() is False
        assert "cannot be read" in said.pop()
    # of another version: values of other types
    for changed in (
        {"num_participants": "two"},
        {"wire": 5},
        {"rule": 5},
        {"partition_size": None},
    ):
        text = json.dumps([0, service_spec(**changed).to_json()])
        process._offer.assign(text)
        assert process.serve_one() is False
        assert "an offer was not taken" in said.pop()


def test_an_offer_to_nobody_says_what_to_start(logical_devices):
    with pytest.raises(ConnectionError, match="keras-het serve") as caught:
        make_offer(free_address(), SECRET, service_spec(), 0, 0.5)
    assert isinstance(caught.value.__cause__, NoAnswerError)
