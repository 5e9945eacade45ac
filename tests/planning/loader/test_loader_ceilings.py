"""The loader controller keeps to its bounds: memory for batches, and a part of the host."""

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from loader_plants import BLOCKING_IO, BURSTY, COMPUTING, PERFECT, START, STEPS, Plant, drive

from keras_het.planning.loader import LoaderPlan, LoaderWindow, TunerController

BATCH_BYTES = 1_000


def plant_of(work, batch_bytes=BATCH_BYTES, **options):
    return Plant(lambda _: work, batch_bytes=batch_bytes, **options)


@pytest.mark.parametrize(
    ("work", "batches", "at_end"),
    [
        # as many loaders as there is memory for
        pytest.param(BLOCKING_IO, 8, LoaderPlan(6, 2), id="loaders"),
        # and no longer a buffer than there is memory for
        pytest.param(BURSTY, 6, None, id="prefetch"),
    ],
)
def test_batches_stay_below_the_ceiling_and_would_not_without(work, batches, at_end):
    ceiling = batches * BATCH_BYTES
    bounded, free = plant_of(work), plant_of(work)
    controller = TunerController(START, 2.0, max_memory=ceiling)
    outcome = drive(bounded, controller, 4 * STEPS)
    drive(free, TunerController(START, 2.0), 4 * STEPS)
    assert bounded.peak_bytes <= ceiling < free.peak_bytes
    assert outcome.plans, "it grows as far as it may"
    if at_end is not None:
        assert controller.plan == at_end


@examples(40)
@given(
    work=st.sampled_from([BLOCKING_IO, BURSTY, COMPUTING, PERFECT]),
    batches=st.integers(4, 40),
    noise=st.floats(0.0, 0.2),
)
def test_no_pipeline_exceeds_any_ceiling(work, batches, noise):
    plant = plant_of(work, noise=noise)
    drive(plant, TunerController(START, 2.0, max_memory=batches * BATCH_BYTES), STEPS)
    assert plant.peak_bytes <= batches * BATCH_BYTES


def test_a_first_plan_beyond_the_ceiling_is_left_at_the_first_window():
    plant = plant_of(PERFECT)
    controller = TunerController(LoaderPlan(16, 8), 2.0, max_memory=8 * BATCH_BYTES)
    while controller.plan == LoaderPlan(16, 8) and plant.step < STEPS:
        drive(plant, controller, 40)
    assert controller.plan == LoaderPlan(4, 4)
    assert "at most 8000 bytes of batches" in controller.plan.reason
    plant.peak_bytes = 0
    drive(plant, controller, STEPS)
    assert plant.peak_bytes <= 8 * BATCH_BYTES


def test_batches_that_become_larger_take_places_from_others():
    plant = plant_of(BLOCKING_IO)
    controller = TunerController(START, 2.0, max_memory=24 * BATCH_BYTES)
    drive(plant, controller, STEPS)
    assert controller.plan.loaders > 6
    plant.batch_bytes = 4 * BATCH_BYTES
    drive(plant, controller, STEPS)
    plant.peak_bytes = 0
    drive(plant, controller, STEPS)
    assert plant.peak_bytes <= 24 * BATCH_BYTES


def test_a_batch_larger_than_the_ceiling_leaves_one_loader_and_one_place():
    controller = TunerController(START, 2.0, max_memory=BATCH_BYTES)
    window = LoaderWindow(10, 0.4, 0.3, idle_cpus=1.9, loader_cpu_seconds=0.01, batch_bytes=5_000)
    assert controller.observe(window) == LoaderPlan(1, 1)
    assert controller.observe(window) is None


def test_without_a_known_size_there_is_no_ceiling():
    controller = TunerController(LoaderPlan(16, 8), 2.0, max_memory=1)
    drive(plant_of(BLOCKING_IO, batch_bytes=0), controller, 40)
    assert controller.plan.loaders >= 16


def test_loaders_go_when_another_job_starts_and_come_back_when_it_ends():
    """Its part of eight CPUs is four as long as the other job needs the rest."""
    plant, controller = plant_of(COMPUTING, cpus=8.0), TunerController(START, 8.0)
    drive(plant, controller, STEPS)
    assert controller.plan.loaders > 4
    plant.neighbour_cpus = 4.0
    controller.set_cpus(4.0)
    outcome = drive(plant, controller, 4 * STEPS)
    assert controller.plan.loaders <= 4
    assert any("CPUs are busy" in plan.reason for _, plan in outcome.plans)
    plant.neighbour_cpus = 0.0
    controller.set_cpus(8.0)
    drive(plant, controller, 4 * STEPS)
    assert controller.plan.loaders > 4


def test_a_part_is_never_more_than_the_host():
    controller = TunerController(LoaderPlan(16, 2), 2.0)
    controller.set_cpus(64.0)
    drive(plant_of(COMPUTING), controller, STEPS)
    assert controller.plan.loaders <= 2


@pytest.mark.parametrize(("queue_seconds", "moves"), [(0.5, False), (98.0, True)])
def test_loaders_that_wait_for_io_are_not_taken_from_busy_cpus(queue_seconds, moves):
    """Of 100 in one second: those that read are as many as it takes to use two CPUs."""
    controller = TunerController(LoaderPlan(100, 2), 2.0, max_loaders=100)
    plan = controller.observe(LoaderWindow(160, 1.0, 0.4, 0.05, 1.9, 0, 160, queue_seconds))
    assert (plan is not None and "CPUs are busy" in plan.reason) == moves


def test_a_part_that_was_refused_is_not_in_effect():
    controller = TunerController(LoaderPlan(24, 2), 8.0)
    controller.set_reading_loaders(4)
    controller.refused(controller.observe(LoaderWindow(20, 2.0, 1.8, 8.0, 0.01)))
    assert controller.plan == controller.confirmed_plan == LoaderPlan(24, 2)
