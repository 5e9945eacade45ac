"""One suite for all controllers, on simulated pipelines whose best setting is known."""

import itertools

import numpy as np
import pytest
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st
from loader_plants import (
    BLOCKING_IO,
    BURSTY,
    COMPUTING,
    PERFECT,
    START,
    STEPS,
    Plant,
    Work,
    drive,
    oracle,
)

from keras_het.planning.loader import (
    FixedController,
    LoaderController,
    LoaderPlan,
    LoaderWindow,
    StepSums,
    TunerController,
    WindowSize,
)

ONE_DISK = Work(0.040, 0.001, device_seconds=0.002, serial_seconds=0.016)
SLOW = Work(wait_seconds=1.2, cpu_seconds=0.1, device_seconds=0.2)


def controllers():
    return {"tuner": TunerController(START, 2.0), "fixed": FixedController(START)}


@pytest.mark.parametrize("name", controllers())
class TestEveryController:
    def test_has_the_methods_of_the_protocol(self, name):
        controller = controllers()[name]
        assert isinstance(controller, LoaderController)
        assert controller.name == name
        assert controller.plan == START

    def test_same_windows_same_plans(self, name):
        runs = [
            drive(Plant(lambda _: BLOCKING_IO, noise=0.1), controllers()[name], STEPS)
            for _ in range(2)
        ]
        assert runs[0].plans == runs[1].plans

    def test_leaves_a_perfect_pipeline_as_fast_as_it_was(self, name):
        outcome = drive(Plant(lambda _: PERFECT, noise=0.1), controllers()[name], STEPS)
        fixed = drive(Plant(lambda _: PERFECT, noise=0.1), FixedController(START), STEPS)
        assert outcome.steps_per_second >= 0.98 * fixed.steps_per_second
        assert all(plan.loaders <= START.loaders for _, plan in outcome.plans)


def test_a_plan_is_confirmed_once_a_window_has_proven_it():
    """Four times the loaders: twice the throughput keeps them, none takes them back."""
    for gain, kept in ((2.0, True), (1.0, False)):
        controller = TunerController(START, 2.0)
        trial = controller.observe(LoaderWindow(20, 2.0, 1.8, 2.0, 0.01))
        assert trial is not None
        assert trial.loaders > START.loaders
        assert (controller.plan, controller.confirmed_plan) == (trial, START)
        controller.observe(LoaderWindow(20, 2.0 / gain, 1.8 / gain, 2.0, 0.01))
        assert controller.confirmed_plan == (trial if kept else START)


def test_fixed_moves_nothing():
    assert drive(Plant(lambda _: BLOCKING_IO), FixedController(START), STEPS).plans == []


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(
    ("work", "least"),
    [
        pytest.param(BLOCKING_IO, 0.92, id="blocking I/O"),
        pytest.param(COMPUTING, 0.97, id="computing"),
        pytest.param(PERFECT, 0.98, id="perfect"),
        pytest.param(ONE_DISK, 0.92, id="one disk"),
    ],
)
def test_comes_close_to_the_best_fixed_plan_ramp_included(work, least, noise):
    def plant():
        return Plant(lambda _: work, noise=noise)

    best = oracle(plant, FixedController, STEPS)
    found = drive(plant(), TunerController(START, 2.0), STEPS)
    assert found.steps_per_second >= least * best


def test_blocking_io_exceeds_the_core_count_within_two_seconds():
    outcome = drive(Plant(lambda _: BLOCKING_IO), TunerController(START, 2.0), STEPS)
    when = next(now for now, plan in outcome.plans if plan.loaders >= 12)
    assert when < 2.0
    assert outcome.idle_fraction_at_end < 0.1


def test_a_slow_pipeline_takes_few_steps():
    outcome = drive(Plant(lambda _: SLOW), TunerController(START, 2.0), 120)
    assert outcome.idle_fraction_at_end < 0.1
    assert max(plan.loaders for _, plan in outcome.plans) <= 32


@pytest.mark.parametrize(
    ("cpus", "options"),
    [
        pytest.param(2.0, {"noise": 0.05}, id="no more CPUs"),
        pytest.param(8.0, {"cpus": 8.0, "neighbour_cpus": 7.0}, id="CPUs are taken"),
        pytest.param(2.0, {"endless_threads": 2}, id="others compute without end"),
    ],
)
def test_computing_loaders_do_not_exceed_the_cpus(cpus, options):
    outcome = drive(Plant(lambda _: COMPUTING, **options), TunerController(START, cpus), STEPS)
    assert max([plan.loaders for _, plan in outcome.plans], default=2) <= 2


def test_computing_loaders_use_idle_cpus():
    controller = TunerController(START, 8.0)
    outcome = drive(Plant(lambda _: COMPUTING, cpus=8.0), controller, STEPS)
    assert 5 <= controller.plan.loaders <= 8
    assert outcome.idle_fraction_at_end < 0.15


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_loaders_that_wait_grow_where_no_cpu_is_idle(noise):
    def plant():
        return Plant(lambda _: BLOCKING_IO, endless_threads=2, noise=noise)

    best = oracle(plant, FixedController, STEPS)
    found = drive(plant(), TunerController(START, 2.0), STEPS)
    assert found.steps_per_second >= 0.9 * best
    assert max(plan.loaders for _, plan in found.plans) >= 12


def test_on_a_busy_host_loaders_that_wait_keep_to_their_part():
    """0.05 CPUs each of 0.5, and no CPU that is idle: ten, however long the device waits."""
    controller = TunerController(START, 8.0)
    controller.set_cpus(0.5)
    starved = Work(wait_seconds=0.095, cpu_seconds=0.005, device_seconds=0.001)
    drive(Plant(lambda _: starved, cpus=8.0, endless_threads=8), controller, STEPS)
    assert 5 <= controller.plan.loaders <= 11


def test_one_disk_is_taken_back():
    controller = TunerController(START, 2.0)
    outcome = drive(Plant(lambda _: ONE_DISK), controller, STEPS)
    reasons = [plan.reason for _, plan in outcome.plans]
    assert any("did not pay" in reason for reason in reasons)
    assert controller.plan.loaders <= 8


def test_without_known_cpu_time_idle_cpus_decide():
    grown = TunerController(START, 2.0)
    drive(Plant(lambda _: BLOCKING_IO), grown, STEPS, knows_cpu=False)
    assert grown.plan.loaders >= 12
    stays = TunerController(START, 2.0)
    drive(Plant(lambda _: COMPUTING), stays, STEPS, knows_cpu=False)
    assert stays.plan.loaders <= 2


def test_moves_down_when_the_device_no_longer_waits():
    controller = TunerController(LoaderPlan(32, 2), 2.0)
    outcome = drive(Plant(lambda _: PERFECT, noise=0.05), controller, 6000)
    assert controller.plan.loaders <= 2
    assert outcome.idle_fraction_at_end < 0.03


def test_follows_from_io_to_computing_and_back():
    def work(step):
        return COMPUTING if STEPS <= step < 2 * STEPS else BLOCKING_IO

    def plant():
        return Plant(work, noise=0.05)

    controller = TunerController(START, 2.0)
    found = drive(plant(), controller, 3 * STEPS)
    best = oracle(plant, FixedController, 3 * STEPS)
    assert found.steps_per_second >= 0.92 * best
    assert controller.plan.loaders >= 12
    assert min(plan.loaders for _, plan in found.plans) <= 2


@pytest.mark.parametrize("work", [BLOCKING_IO, COMPUTING, PERFECT, ONE_DISK])
def test_does_not_flap(work):
    """In the second half of a long run it moves rarely, and ever more rarely."""
    outcome = drive(Plant(lambda _: work, noise=0.15), TunerController(START, 2.0), 20 * STEPS)
    late = [now for now, _ in outcome.plans if now > outcome.seconds / 2]
    assert len(late) <= 0.12 * outcome.seconds / 2


def test_carried_over_batches_do_not_count():
    """A move that cannot help is taken back though its first batches were ready at once."""
    plant = Plant(lambda _: ONE_DISK, buffered=2.0)
    controller = TunerController(LoaderPlan(4, 16), 2.0)
    for _ in range(600):
        before = controller.plan
        drive(plant, controller, 1)
        if controller.plan != before:
            plant.buffered = 16.0
    assert controller.plan.loaders <= 8


def test_bursts_get_a_longer_buffer():
    controller = TunerController(LoaderPlan(2, 2), 2.0)
    outcome = drive(Plant(lambda _: BURSTY), controller, 4000)
    best = oracle(lambda: Plant(lambda _: BURSTY), FixedController, 4000)
    assert outcome.steps_per_second >= 0.92 * best
    assert controller.plan.prefetch <= 16


def test_keeps_to_its_part_of_the_host():
    controller = TunerController(START, 8.0)
    controller.set_cpus(3.0)
    drive(Plant(lambda _: COMPUTING, cpus=8.0), controller, STEPS)
    assert controller.plan.loaders <= 3


def test_a_refused_plan_is_not_in_effect():
    controller = TunerController(START, 2.0)
    slow = LoaderWindow(10, 0.42, 0.36, idle_cpus=1.9, loader_cpu_seconds=0.01)
    plan = controller.observe(slow)
    assert plan is not None
    assert plan.loaders > 2
    controller.refused(plan)
    assert controller.plan == controller.confirmed_plan == START
    assert controller.observe(slow) is None or controller.plan.loaders == START.loaders


@examples(60)
@given(
    wait=st.floats(0.0, 0.3),
    cpu=st.floats(0.0005, 0.02),
    device=st.floats(0.001, 0.05),
    serial=st.floats(0.0, 0.02),
    noise=st.floats(0.0, 0.2),
    cpus=st.sampled_from([1.0, 2.0, 4.0, 16.0]),
    endless=st.sampled_from([0, 0, 2, 16]),
)
@example(wait=3 / 64, cpu=0.003, device=3 / 64, serial=0.0, noise=0.0, cpus=2.0, endless=0)
def test_any_pipeline_ends_no_slower_than_it_began(wait, cpu, device, serial, noise, cpus, endless):
    work = Work(wait, cpu, device, serial)
    start = LoaderPlan(max(int(cpus), 1), 2)

    def plant():
        return Plant(lambda _: work, cpus, endless_threads=endless, noise=noise)

    tuned = drive(plant(), TunerController(start, cpus), 1500)
    fixed = drive(plant(), FixedController(start), 1500)
    # Time that moves took, and trials of less that were taken back.
    moves = len(tuned.plans) * 0.02
    trials = sum(
        after - before
        for (before, _), (after, plan) in itertools.pairwise(tuned.plans)
        if plan.reason in ("fewer loaders did not pay", "less prefetch did not pay")
    )
    lost = (moves + trials) / tuned.seconds
    assert tuned.steps_per_second >= (0.95 - lost) * fixed.steps_per_second


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"plan": START, "cpus": 0.0}, "cpus=0.0"),
        ({"plan": LoaderPlan(200, 2), "cpus": 2.0}, "200 loaders"),
        ({"plan": LoaderPlan(2, 100), "cpus": 2.0}, "prefetch 100"),
    ],
)
def test_arguments_are_checked(arguments, match):
    with pytest.raises(ValueError, match=match):
        TunerController(**arguments)


@pytest.mark.parametrize(("loaders", "prefetch"), [(0, 1), (1, 0)])
def test_plans_are_checked(loaders, prefetch):
    with pytest.raises(ValueError, match="at least 1"):
        LoaderPlan(loaders, prefetch)


def test_sums_leave_out_what_is_skipped_and_continue_after_a_pause():
    sums = StepSums(WindowSize(skip_steps=2, min_steps=3, min_seconds=0.0))
    assert [sums.add(9.0, 9.0) for _ in range(2)] == [False, False]
    assert not sums.add(1.0, 0.5)
    sums.pause(1)
    assert sums.is_skipping
    assert not sums.add(9.0, 9.0)
    assert not sums.add(1.0, 0.0)
    assert sums.add(2.0, 0.5)
    assert (sums.steps, sums.seconds, sums.input_wait_seconds) == (3, 4.0, 1.0)
    assert sums.waiting_steps == 2


def test_windows_are_checked():
    with pytest.raises(ValueError, match="steps must be"):
        LoaderWindow(0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("idle_fraction", "windows"), [(0.041, 10), (0.11, 4), (0.21, 2), (0.5, 1)]
)
def test_tries_a_move_once_the_device_has_lost_what_a_failed_one_costs(idle_fraction, windows):
    """Half-second windows: 0.2 s of waiting, or one window in which the device waits a quarter."""
    controller = TunerController(START, 2.0)
    window = LoaderWindow(50, 0.5, 0.5 * idle_fraction, 1.0, 0.05, waiting_steps=20)
    plans = [controller.observe(window) for _ in range(windows)]
    assert plans[:-1] == [None] * (windows - 1)
    assert plans[-1] is not None
    controller.observe(LoaderWindow(50, 0.6, 0.5 * idle_fraction, 1.0, 0.05, waiting_steps=20))
    assert controller.plan == START, "a move that made it slower is taken back"


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_that_loaders_cannot_shorten_does_not_make_them_many(seed):
    """The time of taking a batch is a tenth of a short step, while the machine's speed drifts."""
    random = np.random.default_rng(seed)
    controller = TunerController(LoaderPlan(4, 2), 2)
    drift, most = 0.0, 0
    for _ in range(2400):
        drift = 0.9 * drift + random.normal(0, 0.1)
        step = 1e-3 * np.exp(drift) * random.normal(1, 0.02)
        wait = step * random.normal(0.1, 0.01)
        steps = int(1 / step)
        window = LoaderWindow(
            steps,
            steps * step,
            steps * wait,
            0.3,
            1e-4 * steps,
            1000,
            steps,
            loader_queue_seconds=0.0,
        )
        controller.observe(window)
        most = max(most, controller.plan.loaders)
    assert most <= 16
    assert controller.plan.loaders <= 8
