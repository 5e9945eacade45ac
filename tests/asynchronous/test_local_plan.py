"""Local steps and compression of a worker, from what all of them measured."""

import numpy as np
import pytest

from keras_het.asynchronous.exchange.pace import LocalStepTuner, Pace
from keras_het.asynchronous.rules import ASHL
from keras_het.planning import plan_local_steps

STEPS = Pace(samples_per_second=80.0, batch_samples=8, exchange_seconds=0.0)


class Clock:
    """Seconds that pass when the test says so."""

    now = 5.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def rule(**settings):
    return ASHL(loss_threshold=0.5, num_workers=3, preset_ratio=0.1, **settings)


def test_the_time_of_a_full_push_is_that_without_the_pull():
    clock = Clock()
    plan = LocalStepTuner(rule(), 0, clock)
    plan.took_at_once(50.0)  # traced
    assert plan.pace(STEPS) is None and plan.steps(0) is None
    plan.pull(lambda: clock.wait(0.2))
    for seconds in (1.0, 1.2, 1.4):
        plan.took_at_once(seconds)
    assert plan.pace(STEPS) == pytest.approx(Pace(80.0, 8, 1.2, 0.2))


def test_a_compressed_push_says_what_a_full_one_would_take():
    clock = Clock()
    plan = LocalStepTuner(rule(), 1, clock)
    plan.pull(lambda: clock.wait(0.2))
    paces = [Pace(80, 8, 1.0, 0.2), Pace(20, 8, 3.0, 1.0), Pace(0, 0, 0)]
    plan.choose(paces, [1.0] * 3, 10.0)
    ratio = plan.next_ratio(0)
    assert 0.1 <= ratio < 1
    plan.took_at_once(50.0)
    for _ in range(3):
        plan.took_at_once(0.2 + 2.0 * ratio)
    assert plan.pace(STEPS).exchange_seconds == pytest.approx(2.2)


@pytest.mark.parametrize("client", [0, 1, 2])
def test_every_worker_has_its_place_in_the_same_plan(client):
    clock = Clock()
    plan = LocalStepTuner(rule(), client, clock)
    paces = np.array([Pace(80, 8, 1.0, 0.2), Pace(40, 16, 2.8, 1.0), Pace(10, 8, 4.0, 1.0)])
    plan.choose(paces, [1.0] * 3, 10.0)
    times = (paces[:, 1] / paces[:, 0], paces[:, 2] - paces[:, 3], paces[:, 3])
    for stage, preset in enumerate((8, 2)):
        expected = plan_local_steps(*times, preset, 0.1)
        assert plan.steps(stage) == expected.steps[client]
        assert plan.next_ratio(stage) == expected.compression_ratios[client]
    assert plan.steps(0) == (94, 19, 8)[client]


def test_who_is_silent_or_said_nothing_does_not_count():
    plan = LocalStepTuner(rule(), 1, Clock())
    paces = [Pace(1.0, 8, 1.0, 0.2), Pace(40, 8, 3.0, 1.0), Pace(0, 0, 0)]
    plan.choose(paces, [11.0, 99.0, 1.0], 10.0)
    assert [plan.steps(0), plan.steps(1), plan.next_ratio(0)] == pytest.approx([8, 2, 0.1])
