"""ASHL: shares of the data, two stages, a bounded lead in the second."""

import numpy as np
import pytest
import tensorflow as tf
from rule_checks import (
    PARTITIONS,
    SIZE,
    Center,
    ChangeEquations,
    clients_and_status,
    connect,
    follow,
    start_service,
    start_vector,
)

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.rules import ASHL, Signal, get

SHARES = (0.5, 0.3, 0.2)
GOOD = {
    "data_shares": SHARES,
    "steps": (8, 5, 3),
    "second_steps": (3, 2, 1),
    "loss_threshold": 0.5,
    "largest_lead": 2,
}


class ASHLEquations(ChangeEquations):
    def update(self, i, change, samples, staleness):
        self.c = self.c + SHARES[i] * change
        return self.c


class MeasuredEquations(ChangeEquations):
    """Shares by the samples of the latest pushes: 1/(8n) of the sums is forgotten with each."""

    def __init__(self, start, workers=3):
        super().__init__(start)
        self.samples = np.zeros(workers)

    def share(self, i, samples):
        self.samples *= 1 - 1 / (8 * len(self.samples))
        self.samples[i] += samples
        known = self.samples > 0
        filled = np.where(known, self.samples, self.samples[known].mean())
        return self.samples[i] / filled.sum()

    def update(self, i, change, samples, staleness):
        self.c = self.c + self.share(i, samples) * change
        return self.c


def test_equations_of_measured_shares(logical_devices):
    start = start_vector()
    rule = ASHL(loss_threshold=0.5, num_workers=3)
    follow(rule, MeasuredEquations(start), start)


def test_who_has_left_has_no_share(logical_devices):
    rule, equations = ASHL(loss_threshold=0.5, num_workers=3), MeasuredEquations(np.zeros(SIZE), 3)
    service = start_service(rule, num_clients=3)
    clients = [connect(service, i) for i in range(3)]
    zeros = [tf.zeros([size]) for size in PARTITIONS.sizes]
    ones = [tf.ones([size]) for size in PARTITIONS.sizes]

    def moved_by(number, samples):
        before = service.center()[0].numpy().mean()
        answer = clients[number].push(ones, tf.zeros([3], tf.int64), samples, zeros)
        assert not answer.statuses.numpy().any()
        return service.center()[0].numpy().mean() - before

    for i in (0, 1, 2):
        assert moved_by(i, 8.0 * (i + 1)) == pytest.approx(equations.share(i, 8 * (i + 1)), 1e-4)
    clients[2].signal(Signal.LEAVE)
    equations.share(0, 8)
    expected = equations.samples[0] / equations.samples[:2].sum()
    assert moved_by(0, 8.0) == pytest.approx(expected, rel=1e-4)
    equations.share(2, 24)  # it is back
    expected = equations.samples[2] / equations.samples.sum()
    assert moved_by(2, 24.0) == pytest.approx(expected, rel=1e-4)
    service.close()


def test_before_anything_is_measured():
    rule = ASHL(loss_threshold=0.5, num_workers=3, preset_ratio=0.1)
    assert [rule.local_steps(1, stage) for stage in (0, 1)] == [8, 2]
    assert rule.is_measured and rule.compression_ratio(0) == 1.0
    assert ASHL(loss_threshold=0.5, num_workers=3, preset_ratio=1.0).compression_ratio(0) is None
    assert not ASHL(**GOOD).is_measured


@pytest.mark.parametrize("second_stage", [False, True])
def test_equations(logical_devices, second_stage, monkeypatch):
    rule, start = ASHL(**{**GOOD, "largest_lead": 100}), start_vector()
    if second_stage:
        create = rule.create_slots

        def create_in_second_stage(center):
            slots = create(center)
            slots["second_stage"].assign(1.0)
            return slots

        monkeypatch.setattr(rule, "create_slots", create_in_second_stage)
    center, _ = follow(rule, ASHLEquations(start), start)
    pushes = center.slots[0]["pushes"].numpy()
    assert pushes.sum() == (center.version if second_stage else 0)


def test_nobody_waits_in_the_first_stage(logical_devices):
    center = Center(ASHL(**GOOD), start_vector())
    for _ in range(10):
        assert center.push(0, 1, center.version, np.ones(SIZE)) is not None
    np.testing.assert_allclose(center.values, start_vector() + 5, rtol=1e-5)


def test_second_stage_bounds_the_lead_as_algorithm_3(logical_devices):
    rule, random = ASHL(**GOOD), np.random.default_rng(0)
    center = Center(rule, start_vector())
    for slots in center.slots:
        slots["second_stage"].assign(1.0)
    steps, waits = [0, 0, 0], 0
    for _ in range(60):
        i = int(random.choice(3, p=[0.7, 0.2, 0.1]))
        allowed = steps[i] + 1 - min(steps) <= 2  # step_i - min(step) <= s after step_i++
        answer = center.push(i, 1, center.version, np.ones(SIZE))
        assert (answer is not None) == allowed
        steps[i] += allowed
        waits += not allowed
    assert waits > 5
    expected = start_vector() + np.dot(steps, SHARES)
    np.testing.assert_allclose(center.values, expected, rtol=1e-4)


def test_the_second_stage_begins_at_the_threshold():
    rule = ASHL(**{**GOOD, "loss_threshold": 0.7})
    assert rule.is_second_stage(0.7)
    assert not rule.is_second_stage(0.71)


def test_the_number_of_workers_is_that_of_the_cluster_unless_shares_say_it():
    measured = get({"class_name": "ashl", "config": {"loss_threshold": 0.5}}, num_workers=4)
    assert measured.num_workers == 4 and measured.is_measured
    assert get({"class_name": "ashl", "config": GOOD}, num_workers=4).num_workers == 3


@pytest.mark.full
def test_a_worker_that_was_given_up_goes_on_beside_the_slowest(logical_devices):
    rule = ASHL(**GOOD)
    service = start_service(rule, num_clients=3)
    for slots in service.slots():
        slots["second_stage"].assign(1.0)
    clients, status = clients_and_status(service)
    for client in (0, 1, 2, 0):
        assert status(client) == Status.OK
    assert status(0) == Status.OK and status(0) == Status.WAIT  # two ahead of the others
    clients[0].signal(Signal.LEAVE, 1)
    assert [status(2), status(2), status(0)] == [Status.OK] * 3
    assert status(1) == Status.OK  # it is back, at the pushes of the slowest
    assert service.slots()[0]["pushes"].numpy().tolist() == [4, 4, 3]
    service.close()


@pytest.mark.full
def test_nobody_waits_for_a_worker_whose_pushes_are_refused(logical_devices):
    service = start_service(ASHL(**{**GOOD, "largest_lead": 1}), num_clients=3)
    connect(service, 0).signal(Signal.LOSS_REACHED)
    bad = [tf.fill([size], np.inf) for size in PARTITIONS.sizes]
    _, status = clients_and_status(service)
    for _ in range(2):
        assert [status(0), status(1), status(0)] == [Status.OK, Status.OK, Status.WAIT]
        assert status(2, bad) == Status.NOT_FINITE
    assert [status(0), status(1)] == [Status.OK, Status.OK]
