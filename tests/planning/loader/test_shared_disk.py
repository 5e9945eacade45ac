"""Simulated jobs that read from one disk: what all of them have of it, and each of them."""

import dataclasses

import pytest
from shared_disk import START, Host, Job, mean_loaders, throughput

from keras_het.planning.loader import FixedController, LoaderPlan, Reading, ReadingCeiling

# A disk that is busy 10 ms with a batch gives 100 batches/s; one thread alone reads 20.
DISK = {"disk_seconds": 0.010, "wait_seconds": 0.040}
MOST = 100.0
LONG = 240.0


def hungry(name, device_seconds=0.005, **options):
    return Job(name, **DISK, device_seconds=device_seconds, **options)


def satisfied(name, **options):
    """A job that needs a twentieth of a disk, and ten threads for it."""
    return Job(name, 0.0004, 0.0796, 0.008, **options)


def trained(*jobs, until=LONG, **options):
    host = Host(list(jobs), **options)
    host.run(until)
    return host


def total(host, start=LONG / 2, end=LONG):
    return sum(throughput(job, start, end) for job in host.jobs)


NOISES = pytest.mark.parametrize("noise", [0.0, 0.1])


@NOISES
def test_two_equal_jobs_have_half_of_the_disk_each_with_few_threads(noise):
    alone = trained(hungry("a"), hungry("b"), shares=False, noise=noise)
    host = trained(hungry("a"), hungry("b"), noise=noise)
    for job in host.jobs:
        assert throughput(job, LONG / 2, LONG) == pytest.approx(MOST / 2, rel=0.15)
    assert total(host) >= 0.93 * total(alone)
    assert sum(mean_loaders(job, LONG / 2, LONG) for job in host.jobs) <= 32
    assert sum(mean_loaders(job, LONG / 2, LONG) for job in alone.jobs) >= 128


@NOISES
def test_a_disk_that_suffers_from_many_readers_gives_more(noise):
    options = {"best_threads": 16, "loss": 0.05, "noise": noise}
    alone = trained(hungry("a"), hungry("b"), shares=False, **options)
    host = trained(hungry("a"), hungry("b"), **options)
    assert total(host) >= 1.3 * total(alone)
    assert total(host) >= 0.92 * MOST


@NOISES
def test_a_faster_device_gets_more_of_the_disk(noise):
    """Four times the speed: four times the batches, where the one to grow first had as many."""
    host = trained(hungry("fast"), hungry("slow", 0.020), noise=noise)
    of_fast, of_slow = (throughput(job, LONG / 2, LONG) for job in host.jobs)
    assert 3.0 <= of_fast / of_slow <= 5.0
    assert of_fast + of_slow >= 0.92 * MOST
    assert host.ceiling.parts["fast"] >= 3 * host.ceiling.parts["slow"]


def test_who_comes_later_gets_as_much():
    host = trained(hungry("first"), hungry("late", starts=60.0))
    of_first, of_late = (throughput(job, LONG / 2, LONG) for job in host.jobs)
    assert of_late == pytest.approx(of_first, rel=0.2)


@NOISES
def test_the_part_of_a_job_that_is_gone_returns(noise):
    host = trained(hungry("a"), hungry("b", ends=120.0), noise=noise)
    assert any(parts for when, _, parts in host.ceilings if when < 120.0)
    assert host.ceiling.parts == {}
    assert throughput(host.jobs[0], 130.0, LONG) >= 0.95 * MOST


def test_a_disk_that_becomes_faster_gets_more_readers():
    host = trained(hungry("a"), hungry("b"), speed=0.3)
    before = sum(mean_loaders(job, LONG / 2, LONG) for job in host.jobs)
    assert total(host) >= 0.9 * 0.3 * MOST
    host.speed = 3.0
    host.run(3 * LONG)
    assert sum(mean_loaders(job, 2 * LONG, 3 * LONG) for job in host.jobs) > before
    assert total(host, 2 * LONG, 3 * LONG) >= 0.9 * 3 * MOST


@NOISES
def test_jobs_on_disks_of_their_own_keep_what_they_had(noise):
    jobs = [hungry("a"), satisfied("b", disk="other")]
    alone = trained(*(dataclasses.replace(job, controller=None) for job in jobs), shares=False)
    host = trained(*(dataclasses.replace(job, controller=None) for job in jobs), noise=noise)
    for with_others, without in zip(host.jobs, alone.jobs, strict=True):
        least = 0.92 * throughput(without, 0.0, LONG)
        assert throughput(with_others, 0.0, LONG) >= least


def test_jobs_for_which_the_disk_is_enough_are_left_alone():
    plans = [
        [job.plans for job in trained(satisfied("a"), satisfied("b"), shares=shares).jobs]
        for shares in (False, True)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(hungry("a"), id="reading"),
        pytest.param(Job("a", 0.0, 0.0, 0.002, cpu_seconds=0.009), id="computing"),
    ],
)
def test_a_job_alone_moves_as_if_there_were_no_budget(job):
    plans = [
        trained(dataclasses.replace(job, controller=None), shares=shares).jobs[0].plans
        for shares in (False, True)
    ]
    assert plans[0]
    assert plans[0] == plans[1]


def test_jobs_that_compute_move_as_if_there_were_no_budget():
    def jobs():
        return [Job(name, 0.0, 0.0, 0.002, cpu_seconds=0.009) for name in "ab"]

    hosts = [trained(*jobs(), shares=shares) for shares in (False, True)]
    plans = [[job.plans for job in host.jobs] for host in hosts]
    assert all(plans[0])
    assert plans[0] == plans[1]
    assert hosts[1].ceiling.number == 0


def test_a_job_that_computes_is_not_bounded_by_those_that_read():
    computing = Job("c", 0.0, 0.0, 0.002, cpu_seconds=0.009)
    host = trained(hungry("a"), hungry("b"), computing)
    assert host.ceiling.parts.keys() == {"a", "b"}


@NOISES
def test_a_budget_that_was_given_is_kept_and_divided_by_need(noise):
    host = trained(hungry("fast"), hungry("slow", 0.020), given=10, noise=noise)
    assert {threads for _, threads, _ in host.ceilings if threads is not None} == {10}
    assert sum(host.ceiling.parts.values()) == 10
    assert sum(job.loaders for job in host.jobs) <= 10
    assert host.ceiling.parts["fast"] >= 2 * host.ceiling.parts["slow"]


def test_a_division_of_first_windows_that_mislead_does_not_stay():
    """While buffers fill all devices wait as much; ten threads for 160 are worth as much anyhow."""
    ceiling = ReadingCeiling()
    first = {"fast": reading(8, 7.0, idle=0.95), "slow": reading(8, 7.0, idle=0.95)}
    for name in first:
        ceiling.update(name, first, 6.0, given=10)
    assert ceiling.parts == {"fast": 5, "slow": 5}
    for began in (10.0, 20.0, 30.0, 40.0):
        later = {}
        for name, device_seconds in (("fast", 0.001), ("slow", 0.005)):
            part = ceiling.parts[name]
            idle = 1.0 - 12.0 * part * device_seconds
            later[name] = reading(part, 12.0 * part, idle, began, ceiling.number)
        for name in later:
            ceiling.update(name, later, began + 6.0, given=10)
    assert ceiling.parts == {"fast": 8, "slow": 2}
    assert ceiling._trial is None, "and is kept"


def test_a_division_that_fails_keeps_no_other_trial_away():
    """What job a reads does not depend on its threads: it only seems to need most of them."""
    ceiling, kinds = ReadingCeiling(), set()
    both = {name: reading(8, 10.0, 0.5) for name in "ab"}
    ceiling.update("a", both, 6.0)
    ceiling._divide(16, {"a": 24.0, "b": 24.0}, 6.0)
    began = 10.0
    while began < 3600.0:
        jobs = {}
        for name in "ab":
            loaders = ceiling.parts.get(name, 8)
            rate, device = (min(2.0, loaders), 0.025) if name == "a" else (1.25 * loaders, 1 / 30)
            idle = max(1.0 - rate * device, 0.0)
            jobs[name] = reading(loaders, rate, idle, began, ceiling.number, seconds=8.0)
        for name in jobs:
            ceiling.update(name, jobs, began + 8.0)
        kinds.add(None if ceiling._trial is None else ceiling._trial.kind)
        began += 8.5
    assert kinds & {"more threads", "fewer threads"}


def test_other_jobs_learn_again():
    """A ceiling that held for long leaves nothing that keeps later jobs from having one."""

    def train(names, loaders, began):
        for _ in range(120):
            parts = {name: ceiling.parts.get(name, loaders) for name in names}
            told(ceiling, began, **{name: (parts[name], 50.0, 0.75) for name in names})
            began += 7.0
        return began

    ceiling = ReadingCeiling()
    end = train("ab", 40, 0.0)
    assert ceiling.threads is not None
    train("xy", 128, end + 3600.0)
    assert ceiling.threads is not None


def test_a_budget_goes_with_who_gave_it():
    """A job that computes has given it, and ends."""
    ceiling = ReadingCeiling()
    ceiling.update("b", {"b": reading(24)}, 6.0, given=4)
    assert ceiling.parts == {"b": 4}
    ceiling.update("b", {"b": reading(4, began=10.0)}, 16.0)
    assert ceiling.parts == {}


def test_a_budget_that_was_given_holds_for_a_job_alone():
    host = trained(hungry("a"), given=3)
    assert host.jobs[0].loaders <= 3
    assert throughput(host.jobs[0], LONG / 2, LONG) == pytest.approx(3 * 20.0, rel=0.05)


def test_jobs_that_follow_no_ceiling_prove_nothing():
    jobs = [hungry(name, controller=FixedController(LoaderPlan(40, 2))) for name in "ab"]
    host = trained(*jobs)
    assert host.ceiling.threads is None or host.ceiling._trial is not None


# --- step by step


def reading(loaders=40, rate=50.0, idle=0.75, began=0.0, number=0, seconds=6.0):
    steps = int(rate * seconds)
    return Reading(loaders, steps, seconds, idle, began, began + seconds, number)


def told(ceiling, began, seconds=6.0, **jobs):
    """All jobs have had a window, as (loaders, steps/s, idle fraction)."""
    number = ceiling.number
    readings = {
        name: reading(*values, began=began, number=number, seconds=seconds)
        for name, values in jobs.items()
    }
    for name in readings:
        ceiling.update(name, readings, began + seconds)
    return ceiling


def begun():
    """Two equal jobs that were measured, so that fewer threads are being tried."""
    ceiling = told(ReadingCeiling(), 0.0, a=(40, 50.0, 0.75), b=(40, 50.0, 0.75))
    told(ceiling, 10.0, a=(40, 50.0, 0.75), b=(40, 50.0, 0.75))
    assert ceiling.parts == {"a": 20, "b": 20}
    return ceiling


def test_fewer_threads_are_kept_if_all_together_are_as_fast():
    ceiling = told(begun(), 20.0, a=(20, 50.0, 0.75), b=(20, 50.0, 0.75))
    ceiling = told(ceiling, 30.0, a=(20, 50.0, 0.75), b=(20, 50.0, 0.75))
    assert ceiling.threads == 10, "and fewer still are tried"


def test_fewer_threads_are_taken_back_if_they_cost_throughput():
    ceiling = begun()
    told(ceiling, 20.0, a=(20, 45.0, 0.78), b=(20, 45.0, 0.78))
    told(ceiling, 30.0, a=(20, 45.0, 0.78), b=(20, 45.0, 0.78))
    assert (ceiling.threads, ceiling.parts) == (None, {})


def test_the_first_moments_of_a_trial_say_nothing():
    ceiling = begun()
    for began in (20.0, 20.2):
        told(ceiling, began, seconds=0.2, a=(20, 20.0, 0.9), b=(20, 20.0, 0.9))
    assert ceiling.parts == {"a": 20, "b": 20}
    told(ceiling, 21.0, seconds=0.5, a=(20, 20.0, 0.9), b=(20, 20.0, 0.9))
    assert ceiling.parts == {}, "but half a second does"


@pytest.mark.parametrize(("later", "kept"), [(52.0, True), (46.0, False)])
def test_a_doubtful_trial_is_looked_at_longer(later, kept):
    ceiling = begun()
    for began in (20.0, 22.0):  # the first of a job that has moved ends what was gathered before
        told(ceiling, began, seconds=2.0, a=(20, 46.0, 0.77), b=(20, 46.0, 0.77))
    assert ceiling.parts == {"a": 20, "b": 20}
    told(ceiling, 30.0, seconds=4.0, a=(20, later, 0.75), b=(20, later, 0.75))
    assert (ceiling.threads == 10) == kept
    assert (ceiling.parts == {}) != kept


def test_what_one_loses_must_be_gained_by_another():
    for of_b, kept in ((65.0, True), (50.0, False)):
        ceiling = begun()
        told(ceiling, 20.0, a=(20, 35.0, 0.82), b=(20, of_b, 0.7))
        told(ceiling, 30.0, a=(20, 35.0, 0.82), b=(20, of_b, 0.7))
        assert (ceiling.threads is not None) == kept


def test_a_small_job_may_not_lose_what_nobody_gains():
    """All together lose 2 %, which is noise; the one with few threads loses two thirds."""
    ceiling = told(ReadingCeiling(), 0.0, a=(97, 50.0, 0.75), b=(3, 50.0, 0.0))
    told(ceiling, 10.0, a=(97, 50.0, 0.75), b=(3, 50.0, 0.0))
    parts = ceiling.parts
    assert sum(parts.values()) == 50
    for began in (20.0, 30.0):
        told(ceiling, began, a=(parts["a"], 50.0, 0.75), b=(parts["b"], 17.0, 0.6))
    assert (ceiling.threads, ceiling.parts) == (None, {})


def test_a_window_counts_once_and_only_if_it_knew_the_division():
    ceiling = begun()
    late = {name: reading(20, 50.0, began=20.0, number=ceiling.number) for name in "ab"}
    early = {name: reading(20, 50.0, began=20.0, number=ceiling.number - 1) for name in "ab"}
    short = {name: dataclasses.replace(each, seconds=1.9) for name, each in late.items()}
    before = ceiling.number
    for readings in (early, short, short, short):
        for name in readings:
            ceiling.update(name, readings, 26.0)
    assert ceiling.number == before, "nothing is known yet"


def test_a_job_that_goes_ends_what_is_tried():
    ceiling = begun()
    ceiling.update("a", {"a": reading(20, began=20.0)}, 26.0)
    assert (ceiling.threads, ceiling.parts) == (None, {})


def test_a_ceiling_is_remembered_for_a_while():
    for pause, remembered in ((60.0, True), (6000.0, False)):
        ceiling = ReadingCeiling()
        both = {name: reading() for name in "ab"}
        ceiling.update("a", both, 2.0, given=12)
        ceiling.update("a", {"a": reading()}, 3.0)
        assert ceiling.parts == {}
        ceiling.update("a", both, 3.0 + pause)
        assert (sum(ceiling.parts.values()) == 12) == remembered


def test_the_start_is_that_of_the_other_plants():
    assert hungry("a").loaders == START.loaders


@pytest.mark.parametrize("change", [{"loaders": 0}, {"steps": 0}, {"seconds": 0.0}])
def test_readings_are_checked(change):
    with pytest.raises(ValueError, match="above zero"):
        dataclasses.replace(reading(), **change)
