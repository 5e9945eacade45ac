"""To whom a loader's threads give way, and what other programs use of the host."""

import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from keras_het.loader.host_threads import ForeignLoad, LoaderPriority

BUSY, QUIET = (2.0, 0.0), (0.0, 3.0)  # CPUs of others and idle ones, of four
ENDS = [QUIET, *[BUSY] * 6]  # threads gave way, and do no longer


class Host:
    """A host of four CPUs of which each reading is known."""

    cpus = frozenset(range(4))

    def __init__(self, *readings):
        self.readings = list(readings)
        self.friends = []
        self.seconds = 1.0

    def read(self, friends):
        self.friends.append(friends)
        return self.readings.pop(0)


@pytest.mark.parametrize(
    ("readings", "values"),
    [
        pytest.param([QUIET] * 4, [10] * 4, id="nobody else"),
        pytest.param([BUSY] * 9, [0] * 9, id="others compute from the start"),
        pytest.param([BUSY, None, BUSY, QUIET], [0, 0, 0, 10], id="until a job is known"),
        pytest.param([QUIET] + [BUSY] * 7, [10] * 6 + [0, 0], id="others begin"),
        pytest.param([QUIET, *[BUSY] * 5] * 2, [10] * 12, id="others compute now and then"),
        pytest.param([QUIET] + [(3.5, 0.5)] * 8, [10] * 9, id="a CPU is idle"),
        pytest.param([(0.9, 0.3)] * 8, [0] * 8, id="little is idle"),
        pytest.param([QUIET] + [(1.0, 0.0)] * 8, [10] * 9, id="jobs keep the host busy"),
        pytest.param(ENDS + [(1.0, 0.0)] * 12, [0] * 12, id="they get less now"),
        pytest.param([QUIET, *[BUSY, BUSY, None] * 3], [10] * 10, id="not known now and then"),
        pytest.param(ENDS + [QUIET] * 12, [0] * 11 + [10], id="quiet for a while"),
        pytest.param(ENDS + ([QUIET] * 11 + [BUSY]) * 2, [0] * 24, id="pauses"),
    ],
)
def test_threads_give_way_unless_other_programs_keep_the_host_busy(readings, values):
    priority = LoaderPriority(10, Host(*readings))
    assert priority.value == 0
    found, changes = [], []
    for _ in readings:
        changes.append(priority.observe())
        found.append(priority.value)
    assert found[-len(values) :] == values
    assert changes == [now != before for before, now in itertools.pairwise([0, *found])]


def test_looks_are_not_too_short():
    host = Host(QUIET)
    host.seconds = 0.2
    priority = LoaderPriority(10, host)
    assert not any(priority.observe() for _ in range(9))
    assert host.friends == []
    host.seconds = 0.3
    assert priority.observe({7})
    assert host.friends == [{7}]


def test_what_costs_threads_to_take_back_is_given_again_later():
    priority = LoaderPriority(10, Host(*ENDS, *[QUIET] * 48))
    assert [priority.observe() for _ in ENDS][-1]
    priority.cost_threads()
    assert [priority.observe() for _ in range(48)] == [False] * 47 + [True]
    assert priority.value == 10


def test_who_gives_no_way_does_not_look():
    priority = LoaderPriority(0)
    assert not priority.observe()
    assert priority.value == 0


class System:
    """CPU times as the operating system tells them."""

    def __init__(self, monkeypatch):
        self.now, self.cpu, self.processes = 0.0, [], {}
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: self.cpu)
        monkeypatch.setattr(psutil, "Process", self.process)
        monkeypatch.setattr("keras_het.loader.host_threads.own_cpus", lambda: frozenset({0, 2}))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def process(self, pid):
        if pid not in self.processes:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(cpu_times=lambda: SimpleNamespace(**self.processes[pid]))

    def at(self, now, cpus, **processes):
        names = ("user", "nice", "system", "idle", "iowait")
        self.now = now
        self.cpu = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in cpus]
        ids = {"own": None, "friend": 7}
        self.processes = {
            ids[name]: {"user": seconds / 2, "system": seconds / 2}
            for name, seconds in processes.items()
        }


IDLE = (0.0, 0.0, 0.0, 0.0, 0.0)
ALL_OF_THE_OTHERS = (1.0, 0.5, 0.5, 0.0, 0.0)  # two seconds without a pause


def test_own_cpus_count_without_own_time_and_that_of_friends(monkeypatch):
    system = System(monkeypatch)
    system.at(100.0, [IDLE, IDLE, IDLE], own=5.0, friend=1.0)
    load = ForeignLoad()
    assert load.read({7}) is None, "no time has gone by, and the friend is new"
    system.at(102.0, [(1.0, 0.0, 0.2, 0.5, 0.3), ALL_OF_THE_OTHERS, (0.0, 1.6, 0.0, 0.4, 0.0)])
    system.processes = {None: {"user": 6.0, "system": 0.0}, 7: {"user": 1.0, "system": 0.4}}
    foreign, idle = load.read({7})
    assert (foreign, idle) == pytest.approx(((2.8 - 1.0 - 0.4) / 2, 1.2 / 2))
    system.at(104.0, [(2.8, 0.0, 0.2, 0.7, 0.3), ALL_OF_THE_OTHERS, (0.0, 3.6, 0.0, 0.4, 0.0)])
    system.processes = {None: {"user": 6.5, "system": 0.0}}
    foreign, idle = load.read({7})
    assert (foreign, idle) == pytest.approx(((3.8 - 0.5) / 2, 0.2 / 2)), "the friend is gone"


def test_a_system_that_tells_nothing(monkeypatch):
    system = System(monkeypatch)
    system.at(100.0, [IDLE], own=5.0)
    load = ForeignLoad()
    system.at(101.0, [IDLE], own=6.0)
    assert load.read() is None
    monkeypatch.setattr(psutil, "cpu_times", raise_runtime_error)
    assert load.read() is None


def raise_runtime_error(percpu):
    raise RuntimeError("no /proc/stat")


@pytest.mark.alone
def test_a_program_that_computes_counts_unless_it_is_a_friend():
    endless = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process = psutil.Process(endless.pid)
        alone, together = ForeignLoad(), ForeignLoad()
        together.read({endless.pid})
        alone.read()
        began, before = time.monotonic(), sum(process.cpu_times()[:2])
        while (used := sum(process.cpu_times()[:2]) - before) < 1.0:
            assert time.monotonic() - began < 60
            os.sched_yield()
        foreign, rest = alone.read(), together.read({endless.pid})
        seconds = time.monotonic() - began
        assert foreign[0] - rest[0] == pytest.approx(used / seconds, abs=0.2)
    finally:
        endless.kill()
        endless.wait(10)
