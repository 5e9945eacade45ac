"""What stands beside a service in these tests: its clients, lost answers, a clock."""

import contextlib
from concurrent.futures import Future
from functools import partial

import numpy as np

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.parameter_service import ParameterClient, ParameterService, credential
from keras_het.asynchronous.parameter_service.client import SERVICE, Channel, RemoteChannel
from keras_het.asynchronous.parameter_service.hosting import ServiceSpec
from keras_het.exchange.server import Server
from keras_het.rules import get

ASYNCHRONOUS = {  # settings of each rule, for three workers
    "async_easgd": {"num_workers": 3},
    "async_measgd": {"num_workers": 3},
    "async_sgd": {"learning_rate": 0.1},
    "async_sgd momentum": {"learning_rate": 0.1, "momentum": 0.5, "staleness_damping": True},
    "async_sgd keras": {"optimizer": "adam", "reference_batch_size": 8, "warmup_pushes": 4},
    "delay_compensated": {"learning_rate": 0.1, "compensation": 0.4, "num_workers": 3},
    "delay_compensated adaptive": {
        **{"learning_rate": 0.1, "compensation": 2.0, "num_workers": 3, "decay": 0.9}
    },
    "delayed_nesterov": {"num_workers": 3, "period": 4},
    "delta": {},
    "delta scaled": {"scale": 0.3},
    "elastic_averaging": {"alpha": 0.4},
    "hogwild_easgd": {"num_workers": 3},
    "round_robin_easgd": {"num_workers": 3},
}


def make_rule(case, cases=ASYNCHRONOUS):
    return get({"class_name": case.split()[0], "config": cases[case]})


SECRET = b"0123456789abcdef"
PROOF = credential(SECRET, "model")
SECONDS = 30.0  # the hard time-out of what other threads do


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
        "max_staleness": None,
        "fingerprint": "model",
        "num_services": 1,
        "partition_bytes": 28,
    }
    return ServiceSpec(**(given | changed))


class Service(ParameterService):
    """The parts of a vector in this process, with a center of zeros unless it awaits one.

    The parts of moving statistics follow, if there is a rule for them.
    """

    def __init__(
        self, partitions, rule, num_workers=3, awaits_center=False, state_rule=None, **options
    ):
        super().__init__(num_workers)
        self.partitions, self.rule, self.wire = partitions, rule, options.get("wire")
        self.state_rule = state_rule
        self.hold(partitions, rule, **options)
        if state_rule is not None:
            self.hold(partitions, state_rule, len(partitions.sizes))
        if not awaits_center:
            self.set_center(np.zeros((1 + (state_rule is not None)) * partitions.size))

    def set_center(self, vector):
        sizes = self.partitions.sizes * (1 if self.state_rule is None else 2)
        values = np.split(np.asarray(vector, np.float32), np.cumsum(sizes)[:-1])
        for number, part in self.parts.items():
            part.set_center(values[number])

    @property
    def center(self):
        count = len(self.partitions.sizes)
        return flat([self.parts[number].center for number in sorted(self.parts) if number < count])

    @property
    def state_center(self):
        return self.parts[len(self.partitions.sizes)].center

    @property
    def versions(self):
        return [self.parts[number].version for number in sorted(self.parts)]

    def client(self, worker=0, handle=None, **options):
        """A client within this process, as another worker; it takes messages like a remote one."""
        channel = Channel("here", handle or partial(self.handle, worker))
        state = self.partitions if self.state_rule is not None else None
        given = {"wire": self.wire, "state": state}
        return ParameterClient([channel], self.partitions, **given | options)

    def own_client(self):
        return self.client(handle=partial(self.handle, 0, is_own=True), wire=None)

    def exchange(self, worker=1, rule=None, **options):
        rule = rule or self.rule
        client = self.client(worker, may_wait=rule.may_wait, **options)
        return VectorExchange(client, rule, self.state_rule)


@contextlib.contextmanager
def serving(*services, handlers=None):
    """Serve what services hold; yields what connects a client to all of them, and the servers.

    Without services it serves one handler, and yields what connects a channel to it.
    """
    servers, channels = [], []
    for handle in handlers or [service.handle for service in services]:
        servers.append(Server("127.0.0.1:0"))
        servers[-1].serve(SERVICE, PROOF, handle)
        servers[-1].start()

    def connect(worker=0, proof=PROOF, seconds=SECONDS, **options):
        own = [RemoteChannel(server.address, proof, worker, seconds) for server in servers]
        channels.extend(own)
        if not services:
            return own[0]
        given = {"partitions": services[0].partitions, "wire": services[0].wire}
        return ParameterClient(own, **given | options)

    try:
        yield connect, servers
    finally:
        for each in (*channels, *servers):
            each.close()


def flat(parts):
    return np.concatenate([np.ravel(part) for part in parts])


def lost(error="lost"):
    call = Future()
    call.set_exception(ConnectionError(error))
    return call


def lose_answer(exchange, *parts):
    """Wait until a push has been answered, and lose the answers, or those of some parts."""
    push = exchange.pending
    push.answer()
    for part in parts or range(len(push.calls)):
        push.calls[part] = lost()


class Clock:
    """Time that passes as it is slept."""

    now = 0.0

    def monotonic(self):
        return self.now

    __call__ = monotonic

    def sleep(self, seconds):
        self.now += seconds
