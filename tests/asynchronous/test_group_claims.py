"""The sync group knows its batches before it needs them, whatever its period becomes."""

import dataclasses
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from participant_doubles import Values, Vectors
from service_doubles import Clock

from keras_het.asynchronous.exchange import sync_group
from keras_het.asynchronous.exchange.claims import Grant, GroupClaims
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.exchange.sync_group import SyncGroup
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage
from keras_het.loader.input.data_pass import ClaimedPass
from keras_het.rules import Delta

NUM_BATCHES = 200


class CenterOfBatches:
    """Hands out the batches of one epoch; each claim of the group is followed by another's."""

    def start_epoch(self, epoch):
        self.next, self.theirs = 0, []

    def exchange(self, values, samples, push, wait=False):
        return values

    def claim(self, epoch, count):
        first, granted = self.next, min(count, NUM_BATCHES - self.next)
        self.next += granted
        if self.next < NUM_BATCHES:
            self.theirs.append(self.next)
            self.next += 1
        return Grant(first, granted, granted < count)

    def add_used(self, samples):
        pass


class Group(SyncGroup):
    """A sync group of one worker without model and strategy, told its periods by the test."""

    def __init__(self, periods, steps_per_execution=1):
        self.options = HybridOptions(Delta(), period=periods[0], adapts_period=True)
        self.rule, self.first_pass = self.options.rule, 0
        self.model = SimpleNamespace(steps_per_execution=steps_per_execution)
        self.vectors = Vectors(Values(1.0))
        self._mean_gradient, self._claims = None, None
        self._pace = SimpleNamespace(computed=lambda steps, samples: None, exchanging=nullcontext)
        self._service, self.center = ExitStack(), CenterOfBatches()
        self._epoch = self._steps = self._samples = self._num_known = self._counted = 0
        self.strategy = SimpleNamespace(num_workers=1)
        self.period, self._periods = periods[0], iter(periods)

    def _next_period(self):
        return next(self._periods, self.period)


class Batches:
    def __init__(self):
        self.wanted, self.numbers = [], iter(range(NUM_BATCHES))

    def order(self, wanted):
        self.wanted.append(wanted)

    def read(self):
        number = next(self.numbers)
        return ([number], np.array([1])) if self.wanted[number] else None

    def close(self):
        pass


def train(group, steps_per_execution):
    """Numbers of the batches of an epoch, taken as `fit` takes them."""
    run = ClaimedPass(Batches(), group.claims(), lookahead=2, number=0)
    taken = []
    while not run.ended:
        before = len(taken)
        with suppress(StopIteration):
            for _ in range(steps_per_execution):
                taken += run.next_element()[0]
        if steps := len(taken) - before:
            group.steps_done(steps, steps)
    return taken


PERIODS = {
    "fixed": [3],
    "grows": [1, 1, 1, 3, 3, 8, 8, 25],
    "grows at once": [1, 25],
    "shrinks": [25, 8, 3, 1],
    "up and down": [2, 7] * 20,
}


@pytest.mark.parametrize("steps_per_execution", [1, 4, 32])
@pytest.mark.parametrize("periods", PERIODS.values(), ids=PERIODS.keys())
def test_every_batch_is_taken_once(periods, steps_per_execution):
    group = Group(periods, steps_per_execution)
    for epoch in range(2):
        group.start_epoch(epoch)
        taken = train(group, steps_per_execution)
        assert sorted(taken + group.center.theirs) == list(range(NUM_BATCHES))


def test_batches_are_not_claimed_further_ahead_than_needed():
    group = Group(PERIODS["up and down"])
    group.start_epoch(0)
    for _ in range(60):
        group.steps_done(1, 1)
        assert 1 <= group._num_known <= 2 * 7


def test_a_batch_of_which_nobody_knows_whose_it_is_is_not_passed_over():
    claims = GroupClaims(())
    claims.add(Grant(0, 2, False))
    run = ClaimedPass(Batches(), claims, lookahead=2, number=0)
    assert [run.next_element()[0] for _ in range(2)] == [[0], [1]]
    with pytest.raises(RuntimeError, match=r"Batch 2 .* before its owner was known"):
        run.next_element()


class CenterOfOneWorker(CenterOfBatches):
    """Has an async worker that trains and waits until the given times, in seconds slept."""

    def __init__(self, clock, trains_until, waits_until):
        self._clock, self._trains, self._waits = clock, trains_until, waits_until
        self.stages, self.concluded = [], None

    def read(self):
        return Values().read()

    def set_stage(self, stage):
        self.stages.append(stage)

    def present(self, presence):
        now = self._clock.now
        found = Presence.TRAINING if now < self._trains else Presence.WAITING
        return [1] if presence == found and now < self._waits else []

    def conclude(self):
        self.concluded = self._clock.now


@pytest.mark.parametrize(
    "trains_until, waits_until, concluded",
    [(1.5, 1.8, 1.8), (0.5, 0.7, 0.7), (0.0, 0.0, 0.0), (99.0, 99.0, 2.0)],
    ids=["slower than shutdown_timeout_seconds", "in time", "nobody", "silent"],
)
def test_who_is_still_training_gets_the_final_weights(
    monkeypatch, trains_until, waits_until, concluded
):
    """With `shutdown_timeout_seconds` of 1, for the last change and again for the final weights."""
    group, clock = Group([1]), Clock()
    group.options = dataclasses.replace(group.options, shutdown_timeout_seconds=1.0)
    group.center = center = CenterOfOneWorker(clock, trains_until, waits_until)
    monkeypatch.setattr(sync_group, "time", clock)
    group.end()
    assert center.stages == [Stage.ENDING, Stage.CLOSED]
    assert center.concluded == pytest.approx(concluded, abs=0.05)


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("push", [True, False])
def test_an_exchange_reads_each_vector_once(push, leads):
    """A read copies it from the device. The other members get what the leader has."""
    group = Group([1])
    group.vectors = Vectors(Values(1.0), Values(1.0))
    if not leads:
        group.center = None
    group._exchange(push)
    for each in (group.vectors.weights, group.vectors.state):
        assert each.copies.count("read") == leads
        np.testing.assert_array_equal(each.values, float(leads))


@pytest.mark.parametrize("first", [0, 7, 2**20, 2**24 + 1, 3_000_000_001])
def test_a_grant_of_a_long_epoch_reaches_the_members_as_it_is(first):
    """In a collective of float32, which does not have all whole numbers above 2**24."""
    grant = Grant(first, 12, True)
    assert Grant.from_numbers(np.array(grant.to_numbers(), np.float32).tolist()) == grant
