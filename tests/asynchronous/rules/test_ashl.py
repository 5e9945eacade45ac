"""ASHL: shares of the data, two stages, a bounded lead in the second."""

import numpy as np
import pytest
from rule_checks import SIZE, Center, ChangeEquations, follow, start_vector
from service_doubles import ASYNCHRONOUS

from keras_het.asynchronous.rules import ASHL, Signal, get

GOOD = {**ASYNCHRONOUS["ashl"], "largest_lead": 2}
SHARES = GOOD["data_shares"]
MEASURED = {"loss_threshold": 0.5}


class ASHLEquations(ChangeEquations):
    def update(self, i, change, samples, staleness):
        self.c = self.c + SHARES[i] * change
        return self.c


class MeasuredEquations(ChangeEquations):
    """Shares by the samples of the latest pushes: 1/(8n) of the sums is forgotten with each."""

    def __init__(self, start):
        super().__init__(start)
        self.samples = np.zeros(3)

    def share(self, i, samples):
        self.samples *= 1 - 1 / 24
        self.samples[i] += samples
        known = self.samples > 0
        filled = np.where(known, self.samples, self.samples[known].mean())
        return self.samples[i] / filled.sum()

    def update(self, i, change, samples, staleness):
        self.c = self.c + self.share(i, samples) * change
        return self.c


def test_equations_of_measured_shares():
    rule = ASHL(loss_threshold=0.5, num_workers=3)
    follow(rule, MeasuredEquations(start_vector()), start_vector())


def test_who_has_left_has_no_share():
    rule, equations = ASHL(loss_threshold=0.5, num_workers=3), MeasuredEquations(np.zeros(SIZE))
    center = Center(rule, np.zeros(SIZE))

    def moved_by(worker, samples):
        before = center.values
        center.push(worker, samples, center.version, np.ones(SIZE))
        return (center.values - before).mean()

    for i in (0, 1, 2):
        assert moved_by(i, 8 * (i + 1)) == pytest.approx(equations.share(i, 8 * (i + 1)), 1e-4)
    center.signal(2, Signal.LEAVE)
    equations.share(0, 8)
    expected = equations.samples[0] / equations.samples[:2].sum()
    assert moved_by(0, 8) == pytest.approx(expected, rel=1e-4)
    assert moved_by(2, 24) == pytest.approx(equations.share(2, 24), rel=1e-4)  # it is back


def test_before_anything_is_measured():
    rule = ASHL(**MEASURED, num_workers=3, preset_ratio=0.1)
    assert [rule.local_steps(1, stage) for stage in (0, 1)] == [8, 2]
    assert rule.is_measured and rule.compression_ratio(0) == 1.0
    assert ASHL(**MEASURED, num_workers=3, preset_ratio=1.0).compression_ratio(0) is None
    assert not ASHL(**GOOD).is_measured
    assert rule.is_stage_over(0.5) and not rule.is_stage_over(0.51)
    # the number of workers is that of the cluster unless shares say it
    assert get({"class_name": "ashl", "config": MEASURED}, num_workers=4).num_workers == 4
    assert get({"class_name": "ashl", "config": GOOD}, num_workers=4).num_workers == 3


@pytest.mark.parametrize("second_stage", [False, True])
def test_equations(second_stage, monkeypatch):
    rule, start = ASHL(**{**GOOD, "largest_lead": 100}), start_vector()
    if second_stage:
        slots, _ = rule.signal(rule.create_slots(start), 0, Signal.LOSS_REACHED)
        monkeypatch.setattr(rule, "create_slots", lambda center: slots)
    center = follow(rule, ASHLEquations(start), start)
    assert center.slots[0]["pushes"].sum() == (center.version if second_stage else 0)


def test_second_stage_bounds_the_lead_as_algorithm_3():
    center, random = Center(ASHL(**GOOD), start_vector()), np.random.default_rng(0)
    assert center.signal(0, Signal.NOTHING) == 0
    assert all(center.are_taken(*[0] * 10))  # nobody waits in the first stage
    assert center.signal(0, Signal.LOSS_REACHED) == 1
    steps, waits = [0, 0, 0], 0
    for _ in range(60):
        i = int(random.choice(3, p=[0.7, 0.2, 0.1]))
        allowed = steps[i] + 1 - min(steps) <= 2  # step_i - min(step) <= s after step_i++
        assert center.are_taken(i) == [allowed]
        steps[i] += allowed
        waits += not allowed
    assert waits > 5
    expected = start_vector() + 5 + np.dot(steps, SHARES)
    np.testing.assert_allclose(center.values, expected, rtol=1e-4)


def test_a_worker_that_was_given_up_goes_on_beside_the_slowest():
    center = Center(ASHL(**GOOD), start_vector())
    center.signal(0, Signal.LOSS_REACHED)
    assert center.are_taken(0, 1, 2, 0, 0, 0) == [True] * 5 + [False]  # two ahead of the others
    center.signal(1, Signal.LEAVE)
    assert all(center.are_taken(2, 2, 0))
    assert all(center.are_taken(1))  # it is back, at the pushes of the slowest
    assert center.slots[0]["pushes"].tolist() == [4, 4, 3]


def test_a_refused_push_counts():
    center = Center(ASHL(**{**GOOD, "largest_lead": 1}), start_vector())
    center.signal(0, Signal.LOSS_REACHED)
    assert center.are_taken(0, 1, 0) == [True, True, False]
    center.refuse(2)
    assert all(center.are_taken(0, 1))
