"""What stands beside a service in these tests: its clients, lost calls, a clock."""

import json

import numpy as np
import tensorflow as tf
from addresses import free_address

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.exchange.hosting import ServiceSpec
from keras_het.asynchronous.parameter_service import ParameterClient, ParameterService, credential
from keras_het.asynchronous.rules import serialize
from keras_het.rpc.channel import LocalChannel

SECRET = b"0123456789abcdef"
PROOF = credential(SECRET, "model")


def service_spec(**changed):
    """What a leader tells the processes that serve, of a small model and the rule "delta"."""
    delta = {"class_name": "Delta", "config": {}}
    given = {
        "shapes": ((2,),),
        "state_shapes": (),
        "rule": delta,
        "state_rule": delta,
        "wire": "float32",
        "num_participants": 3,
        "staleness_bound": None,
        "fingerprint": "model",
        "num_services": 1,
        "partition_size": 7,
    }
    return ServiceSpec(**(given | changed))


def start_service(partitions, rule, num_clients=3, **options):
    service = ParameterService(free_address(), partitions, rule, PROOF, num_clients, **options)
    service.start()
    return service


class SharedService:
    """A service that is as new for each test that needs one like it."""

    def __init__(self, service):
        self.service, self.exchanges = service, []
        owned = [variables_of(part) for part in service._parts]
        owned += [slots.values() for slots in service.slots()]
        self._new = [(variable, variable.numpy()) for own in owned for variable in own]

    def begin_again(self):
        for exchange in self.exchanges:
            if exchange.pending is not None:  # a push that still travels would count
                exchange.pending.push.wait()
        self.exchanges.clear()
        for variable, value in self._new:
            variable.assign(value)


_SHARED = {}


def variables_of(owner):
    return [value for value in vars(owner).values() if isinstance(value, tf.Variable)]


def shared_service(partitions, rule, num_clients=3, **options):
    """A service like that of `start_service`, which must not be closed.

    Tracing its functions takes longer than most tests. Two in one test must differ.
    """
    settings = {name: getattr(value, "name", value) for name, value in options.items()}
    key = partitions, json.dumps([serialize(rule), num_clients, settings])
    if key not in _SHARED:
        _SHARED[key] = SharedService(start_service(partitions, rule, num_clients, **options))
    _SHARED[key].begin_again()
    return _SHARED[key].service


def connect(service, client=0, **options):
    return ParameterClient(service.address, service.partitions, PROOF, client, **options)


def exchange_with(service, client=0, rule=None, **options):
    exchange = VectorExchange(connect(service, client, **options), rule or service._rule)
    for shared in _SHARED.values():
        if shared.service is service:
            shared.exchanges.append(exchange)
    return exchange


def client_within(service, client=0):
    return connect(service, client, channels=[LocalChannel(service._server)])


def exchange_within(service, client, samples, changes):
    own = client_within(service, client)
    return own.push(changes, service.versions(), samples, changes).partitions


def flat(partitions):
    return np.concatenate([np.array(part) for part in partitions])


class LostCall:
    """A call whose answer never came."""

    def is_ok(self):
        return tf.constant(False)

    def get_error(self):
        return tf.constant(4), tf.constant("deadline exceeded")


def lose_answer(exchange, *parts):
    """Waits until a push has arrived, and loses its answers, or those of some parts."""
    push = exchange.pending.push
    push.wait()
    for part in parts or range(len(push.calls)):
        push.calls[part] = LostCall()


class Clock:
    """Time that passes as it is slept."""

    now = 0.0

    def monotonic(self):
        return self.now

    __call__ = monotonic

    def sleep(self, seconds):
        self.now += seconds
