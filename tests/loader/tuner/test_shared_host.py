"""Tuned trainings of one host, through their sessions: each keeps to its part, and gives it up."""

import pytest
import tensorflow as tf
from workers import make_workers

from keras_het.loader import Knobs, tunable_pipeline
from keras_het.loader import host_budget as host_share
from keras_het.loader.host_budget import HostBudget
from keras_het.loader.input.tuning_session import TuningSession
from keras_het.planning.loader import (
    FixedController,
    JobModel,
    LoaderController,
    LoaderPlan,
    TunerController,
)

CPUS = 8.0
HUNGRY = JobModel(0.040, 0.002, cpu_seconds=0.040)
SECONDS_OF_A_WINDOW = 1.0  # of a controller that keeps its plan


class Scripted(FixedController):
    """Keeps its plan, says what its job needs, and notes what it is given."""

    def __init__(self, plan, job=HUNGRY):
        super().__init__(plan)
        self.job = job
        self.cpus = []

    def set_cpus(self, cpus):
        self.cpus.append(cpus)


class BusyHost:
    """Every CPU is busy with `loaders` threads of the pipeline, whatever this machine does."""

    def __init__(self, loaders, seconds_of_a_window):
        self.idle_cpus = 0.0
        self.loader_cpu_seconds = loaders * seconds_of_a_window
        self.loader_queue_seconds = 0.0

    def begin(self, threads):
        pass

    def mark(self, threads):
        pass

    def add(self, threads):
        pass


@pytest.fixture
def make_session(tmp_path, monkeypatch):
    """Sessions of jobs that share a host of eight CPUs."""
    # the time between two looks at the file is real, that of the steps here is not
    monkeypatch.setattr(host_share, "_SECONDS_BETWEEN_UPDATES", 0.0)
    sessions = []

    def make(controller, max_reader_threads=None):
        budget = HostBudget(CPUS, tmp_path / "jobs", range(8), max_reader_threads)
        session = TuningSession(lambda plan, cpus, most: controller, budget=budget)
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def build(knobs):
    rows = tf.data.Dataset.range(400).map(lambda row: row * 2, knobs.num_parallel_calls)
    return rows.batch(4).prefetch(knobs.prefetch)


def begun(session, threads=2):
    session.open(iter(tunable_pipeline(build, Knobs(2 * threads, 2, threads))))
    return session


def test_a_job_has_the_host_until_another_comes_and_again_when_it_goes(make_session):
    controllers = [Scripted(LoaderPlan(2, 2)) for _ in range(2)]
    assert isinstance(controllers[0], LoaderController)
    first, second = (begun(make_session(controller)) for controller in controllers)
    first.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    assert controllers[0].cpus == [CPUS]
    second.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    first.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    assert controllers[0].cpus[1:] == controllers[1].cpus == [pytest.approx(CPUS / 2)]
    second.close()
    first.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    assert controllers[0].cpus[-1] == CPUS


def test_a_job_that_does_not_wait_leaves_the_others_what_it_does_not_use(make_session):
    """It has no model yet: what its threads use is what it needs."""
    satisfied, hungry = Scripted(LoaderPlan(2, 2), None), Scripted(LoaderPlan(2, 2))
    sessions = [begun(make_session(controller)) for controller in (satisfied, hungry)]
    sessions[0]._host = BusyHost(0.1, SECONDS_OF_A_WINDOW)
    for session in sessions:
        session.after_step(SECONDS_OF_A_WINDOW, 0.0, 20)
    assert sessions[0].job.cpu_seconds == pytest.approx(0.1 / 20)
    assert hungry.cpus[0] > 0.75 * CPUS


def test_a_worker_with_a_larger_share_gets_more_of_the_host(make_session):
    data = make_workers(lambda: tunable_pipeline(build, Knobs(4, 2, 2)), (1, 1), [[3, 1]])
    iterators = [iter(worker) for worker in data]
    for iterator in iterators:
        next(iterator)
    controllers = [Scripted(LoaderPlan(2, 2)) for _ in data]
    sessions = [make_session(controller) for controller in controllers]
    for _ in range(2):
        for session, iterator in zip(sessions, iterators, strict=True):
            if session.live is None:
                session.open(iterator)
            session.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    heavy, light = (controller.cpus[-1] for controller in controllers)
    assert [session.job.weight for session in sessions] == [1.5, 0.5]
    assert heavy > light
    for iterator in iterators:
        iterator.close()


def test_loaders_go_when_another_job_starts(make_session):
    """Eight loaders keep eight CPUs busy; then somebody else needs half of them."""
    session = make_session(TunerController(LoaderPlan(8, 2), CPUS))
    begun(session, threads=8)
    step, steps = 0.010, 10
    session._host = BusyHost(8, step * steps)

    def train_until_it_moves(steps):
        for _ in range(steps):
            if session.moves:
                break
            session.after_step(step, 0.6 * step, 1)
            if session.change is not None:
                session.change[0].wait(60)

    train_until_it_moves(200)
    assert session.moves == [], "alone, it has them all"
    other = begun(make_session(Scripted(LoaderPlan(2, 2), session.job)))
    other.after_step(SECONDS_OF_A_WINDOW, 0.5, 1)
    train_until_it_moves(200)
    (move,) = session.moves
    assert move.refused is None
    assert move.plan == LoaderPlan(4, 2)
    assert "CPUs are busy" in move.plan.reason
    assert session.pipeline.knobs.threads == 4


def test_reading_threads_are_divided_by_need_and_return(make_session):
    """The loaders of both jobs only wait, and a device that waits more needs more of them."""
    controllers = [TunerController(LoaderPlan(8, 2), CPUS, max_loaders=8) for _ in range(2)]
    sessions = [begun(make_session(each, max_reader_threads=10), threads=8) for each in controllers]
    for session in sessions:
        session._host = BusyHost(0.0, SECONDS_OF_A_WINDOW)

    def is_divided():
        parts = [session.share.reading_loaders or 0 for session in sessions]
        threads = [session.pipeline.knobs.threads for session in sessions]
        return sum(parts) == 10 and parts[0] > parts[1] and threads[1] <= parts[1] < 8

    def train_until(condition, waits):
        for _ in range(100):
            for session, wait in waits:
                session.after_step(0.1, wait, 1)
                if session.change is not None:
                    session.change[0].wait(60)
            if condition():
                return True
        return False

    waits = list(zip(sessions, (0.09, 0.05), strict=True))
    assert train_until(is_divided, waits)
    sessions[0].close()
    assert train_until(lambda: sessions[1].share.reading_loaders == 10, waits[1:])
