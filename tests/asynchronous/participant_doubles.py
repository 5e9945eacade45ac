"""An async worker and the leader of a sync group, without model and strategy, one beside the other.

Both train by adding to their weights; their service is in this process.
"""

from types import SimpleNamespace

import numpy as np
from service_doubles import Service
from services import wait_until

from keras_het.asynchronous.exchange import AsyncWorker
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine
from keras_het.asynchronous.exchange.pace import PushPace
from keras_het.asynchronous.exchange.participant import HybridOptions, StatisticsAveraging
from keras_het.asynchronous.parameter_service import Partitions, Status
from keras_het.asynchronous.parameter_service.sample_ledger import Stage

PARTITIONS = Partitions(((2,),))
BATCH = 4
TRAINS_ALONE = {"goes_on_without_service": True, "timeout_seconds": 0.0}


def services(rule, alpha=0.5, **options):
    own = Service(PARTITIONS, rule, **options)
    return own, Service(PARTITIONS, StatisticsAveraging(alpha))


class Values:
    """Variables as one vector; notes how often it is copied."""

    partitions = PARTITIONS

    def __init__(self, value=0.0):
        self.values, self.copies = [np.full(2, value, np.float32)], []

    def read(self):
        self.copies.append("read")
        return list(self.values)

    def write(self, values):
        self.copies.append("write")
        self.values = list(values)

    def add(self, change):
        self.values = [own + np.float32(change) for own in self.values]


def vectors_of(weights, state=None):
    both = [weights] if state is None else [weights, state]
    return SimpleNamespace(weights=weights, state=state, all=both)


class Ledger:
    """Of a training that runs; counts the samples that are reported."""

    stage, used = Stage.RUNNING, 0

    def report(self, presence, used=0):
        self.used += used
        training = SimpleNamespace(first_pass=0, num_batches=8, fingerprint=0)
        return SimpleNamespace(stage=self.stage, epoch=0, training=training)


class Early:
    """Gives the batch after the last one; notes the epochs in which it was asked ahead."""

    def __init__(self):
        self.asked = []

    def ask(self, epoch):
        self.asked.append(epoch)

    def take(self, epoch, after):
        return Status.OK, after + 1, 1

    def service_lost(self):
        pass


class Participant:
    def wait_until_answered(self):
        """At the next exchange the participant tries to attach again."""
        wait_until(lambda: self.engine.watch.has_answered)


class Worker(Participant, AsyncWorker):
    num_batches, fingerprint, first_pass, num_participants, _num_parts = 8, 0, 0, 2, 1
    _number, _connection, _heartbeat = 1, None, None

    def __init__(self, service, *state, client=1, **options):
        self.rule = service.rule
        self.options = HybridOptions(self.rule, **({"period": 1} | options))
        self.vectors = vectors_of(*(Values() for _ in (service, *state)))
        exchanges = [each.exchange(client) for each in (service, *state)]
        ask = exchanges[0].transport.greet
        self._engine = ExchangeEngine(exchanges, ask, self.options, "Training", self._note_loss)
        self._ledger, self._early_claim, self._pace = Ledger(), Early(), PushPace()
        self._plan = self._mean_gradient = self._planned_period = self._logs = self._claims = None
        self._steps = self._samples = self._unreported = self._stage = self._worker = 0
        self._start_from_center()

    @property
    def engine(self):
        return self._engine

    @property
    def weights(self):
        return self.vectors.weights.values[0]

    def train(self, change=0.0):
        self.vectors.weights.add(change)
        self.steps_done(1, BATCH)

    meet = AsyncWorker.meet_center


class Leader(Participant, Center):
    def __init__(self, service, *state, **options):
        self._options = HybridOptions(service.rule, **(TRAINS_ALONE | options))
        self._leader = SimpleNamespace(num_participants=2)
        self._exchanges = [each.exchange(0) for each in (service, *state)]
        self._taken_until, self._waits = 0, False
        find = lambda: self._find_restarted()  # noqa: E731
        arguments = self._exchanges, find, self._options, "The sync group", self._note_loss
        self.engine = ExchangeEngine(*arguments)
        self.values = self.engine.attach()

    @property
    def weights(self):
        return self.values[0][0]

    def train(self, change=0.0, wait=False):
        self.values = [[own + np.float32(change) for own in each] for each in self.values]
        self.exchange(self.values, BATCH, push=True, wait=wait)

    def meet(self):
        self.train(wait=True)

    def _find_restarted(self):
        return []

    def _open(self):
        pass
