"""A training asks for its part of the host by time, however long its windows are."""

import itertools
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_het.loader import tunable_pipeline
from keras_het.loader.host_budget import LONGEST_SILENCE_SECONDS, CpuPart
from keras_het.loader.input.tuning_session import TuningSession
from keras_het.planning.loader import FixedController, JobModel, LoaderPlan, ReadingNeed

JOB = JobModel(0.040, 0.002, cpu_seconds=0.040)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Budget:
    def __init__(self, clock, error=None):
        self._clock = clock
        self._error = error
        self.written = []
        self.needs = []
        self.reading_loaders, self.cpus = None, 8.0

    def update(self, job, reading=None):
        if self._error is not None:
            raise self._error
        self.written.append(self._clock())
        self.needs.append(reading)
        return 3.0

    def leave(self):
        self.written.append(None)


@pytest.fixture
def clock():
    return Clock()


def session_of(budget, clock):
    session = TuningSession(lambda plan, cpus, most: FixedController(plan))
    session.share = CpuPart(budget, clock)
    return session


def test_models_are_written_once_a_second(clock):
    budget = Budget(clock)
    share = CpuPart(budget, clock)
    answers = []
    for _ in range(10):
        answers.append(share.update(JOB))
        clock.now += 0.25
    assert budget.written == [1000.0, 1001.0, 1002.0]
    assert answers == [3.0, None, None, None] * 2 + [3.0, None]


def test_a_job_is_known_before_anything_was_measured(clock):
    budget = Budget(clock)
    share = CpuPart(budget, clock)
    share.announce()
    assert budget.written == [1000.0]
    assert share.update(JOB) == 3.0, "its model does not wait for a second"
    share.announce()
    assert budget.written == [1000.0] * 2, "its model stays in the file"


def test_a_session_announces_its_job_and_gives_way_to_those_that_share_the_host(clock):
    budget = Budget(clock)
    budget.processes = frozenset({7})
    friends = []
    session = session_of(budget, clock)
    session._priority = SimpleNamespace(value=0, observe=friends.append)
    session.open(iter(tunable_pipeline(lambda knobs: tf.data.Dataset.range(9).batch(3))))
    assert budget.written == [1000.0], "before the first batch"
    for _ in range(3):
        session.after_step(2.0, 0.0, 1)
    assert set(friends) == {frozenset({7})}
    session.close()


def test_the_latest_need_is_reported(clock):
    budget = Budget(clock)
    share = CpuPart(budget, clock)
    needs = [ReadingNeed(threads, 2000.0) for threads in (4.0, 5.0, 6.0)]
    for need in [*needs, None]:
        share.update(JOB, need)
        clock.now += 0.5
    assert budget.needs == [needs[0], needs[2]]
    clock.now += 60.0
    share.heartbeat()
    assert budget.needs[2:] == [None]


def test_a_job_with_long_steps_is_never_silent_for_long(clock):
    budget = Budget(clock)
    share = CpuPart(budget, clock)
    assert share.heartbeat() is None, "there is no model yet"
    share.update(JOB)
    for _ in range(200):
        clock.now += 20.0
        share.heartbeat()
    gaps = [after - before for before, after in itertools.pairwise(budget.written)]
    assert len(gaps) > 50
    assert max(gaps) <= 80.0 < LONGEST_SILENCE_SECONDS
    assert min(gaps) >= 60.0


def test_a_file_that_cannot_be_written_is_reported_once(clock, caplog):
    share = CpuPart(Budget(clock, OSError("disk is full")), clock)
    share.announce()
    assert caplog.messages == []
    for _ in range(3):
        assert share.update(JOB) is None
        clock.now += 100.0
    assert caplog.text.count("disk is full") == 1


def test_who_is_alone_asks_nobody(clock):
    share = CpuPart(None, clock)
    assert share.update(JOB) is None
    share.leave()


class NeverReady:
    def poll(self):
        return False

    def cancel(self):
        pass


def test_every_step_keeps_the_part_also_while_a_move_is_prepared(clock):
    budget = Budget(clock)
    session = session_of(budget, clock)
    session.share.update(JOB)
    controller = session.controller = FixedController(LoaderPlan(2, 2))
    parts = []
    controller.set_cpus = parts.append
    session.change = NeverReady(), None
    for _ in range(30):
        clock.now += 20.0
        session.after_step(20.0, 1.0, 1)
    assert len(budget.written) == 11
    assert parts == [3.0] * 10
    session.close()
    assert budget.written[-1] is None


def test_a_file_that_fails_later_gives_back_what_the_job_had_left(clock):
    budget = Budget(clock)
    budget.reading_loaders = 2
    share = CpuPart(budget, clock)
    assert share.update(JOB) == 3.0
    budget._error = OSError("disk is full")
    clock.now += 2.0
    assert share.update(JOB) == 8.0
    assert share.reading_loaders is None
    assert budget.written == [1000.0, None], "and has left"
    assert share.update(JOB) is None
