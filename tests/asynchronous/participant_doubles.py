"""An async worker and the leader of a sync group, without model and strategy, one beside the other.

Both train by adding to their weights; their service is in this process.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
from service_doubles import Service
from services import wait_until

from keras_het.asynchronous.exchange import AsyncWorker
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine
from keras_het.asynchronous.exchange.pace import PushPace
from keras_het.asynchronous.exchange.participant import (
    HybridOptions,
    ModelVectors,
    StatisticsAveraging,
)
from keras_het.asynchronous.parameter_service import Partitions, Status
from keras_het.asynchronous.parameter_service.sample_ledger import Stage, TrainingFacts

PARTITIONS = Partitions(((2,),))
BATCH = 4
TRAINS_ALONE = {"goes_on_without_service": True, "timeout_seconds": 0.0}


def service_of(rule, alpha=0.5, **options):
    """A service of weights and of moving statistics."""
    return Service(PARTITIONS, rule, state_rule=StatisticsAveraging(alpha), **options)


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


class Vectors(ModelVectors):
    """Of no model."""

    def __init__(self, weights, state=None):
        self.weights, self.state = weights, state
        self.num_weights = len(PARTITIONS.sizes)
        self.sizes = PARTITIONS.sizes * (1 if state is None else 2)


class Ledger:
    """Of a training that runs; counts the samples that are reported, and gives batch after batch.

    It notes the epochs in which it was asked ahead.
    """

    stage, used = Stage.RUNNING, 0

    def __init__(self):
        self.asked = []

    def report(self, presence, used=0):
        self.used += used
        return TrainingFacts(num_batches=8, stage=self.stage)

    def ask_ahead(self, epoch):
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
    _number = 1

    def __init__(self, service, client=1, **options):
        self.rule = service.rule
        self.options = HybridOptions(self.rule, **({"period": 1} | options))
        self.vectors = Vectors(Values(), Values() if service.state_rule else None)
        exchange, self._opened = service.exchange(client), ExitStack()
        ask = exchange.transport.greet
        self._engine = ExchangeEngine(exchange, ask, self.options, "Training", self._note_loss)
        self._ledger, self._pace = Ledger(), PushPace()
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
    def __init__(self, service, **options):
        self._options = HybridOptions(service.rule, **(TRAINS_ALONE | options))
        self._leader = SimpleNamespace(num_participants=2)
        self._exchange = service.exchange(0)
        self._taken_until, self._waits = 0, False
        find = lambda: self._find_restarted()  # noqa: E731
        arguments = self._exchange, find, self._options, "The sync group", self._note_loss
        self.engine = ExchangeEngine(*arguments)
        self.values = self._exchange.attach()

    @property
    def weights(self):
        return self.values[0]

    def train(self, change=0.0, wait=False):
        values = [own + np.float32(change) for own in self.values]
        self.values = self.exchange(values, BATCH, push=True, wait=wait)

    def meet(self):
        self.train(wait=True)

    def _find_restarted(self):
        return []

    def _open(self):
        pass
