"""Every asynchronous rule trains to the accuracy of one device, with workers of different speed."""

import functools

import keras
import pytest
from simulated_cluster import (
    WORKERS,
    Simulation,
    accuracy,
    initial_weights,
    train_one_device,
)

from keras_het.asynchronous.rules import (
    RULES,
    AsyncEASGD,
    AsyncMEASGD,
    AsyncSGD,
    DelayCompensated,
    DelayedNesterov,
    Delta,
    HogwildEASGD,
    RoundRobinEASGD,
    UpdateRule,
)

STEPS = 1440  # 32 epochs, of all workers together as of one device
OFTEN = {"periods": (2, 2, 1, 1)}
MOMENTUM = {"rate": 0.15, "momentum": 0.9}
SELDOM = {"rate": 0.1, "periods": (16, 16, 8, 4)}
# What makes the rule, and how its workers train.
CASES = {
    "async_sgd": (lambda: AsyncSGD(0.1, reference_batch_size=32, warmup_pushes=100), {}),
    "async_sgd adam": (lambda: AsyncSGD(optimizer=keras.optimizers.Adam(0.005)), {}),
    "delay_compensated": (lambda: DelayCompensated(0.2, 2.0, WORKERS, decay=0.95), OFTEN),
    "delayed_nesterov": (lambda: DelayedNesterov(WORKERS, 4), SELDOM),
    "delta": (Delta, {"rate": 0.2}),
    "round_robin_easgd": (lambda: RoundRobinEASGD(WORKERS), {"rate": 0.6}),
    "async_easgd": (lambda: AsyncEASGD(num_workers=WORKERS), {"rate": 0.6}),
    "async_measgd": (lambda: AsyncMEASGD(num_workers=WORKERS), MOMENTUM),
    "hogwild_easgd": (lambda: HogwildEASGD(num_workers=WORKERS), {"rate": 0.8}),
}


@functools.cache
def accuracy_of_one_device():
    return max(train_one_device(STEPS, 0.1, 0.9), train_one_device(STEPS, 0.5))


def assert_as_good_as_one_device(reached):
    assert accuracy(initial_weights()) < 0.2
    assert accuracy_of_one_device() > 0.965
    assert reached >= accuracy_of_one_device() - 0.01


def test_every_asynchronous_rule_is_trained():
    trained = {case.split()[0] for case in CASES} | {"elastic_averaging"}
    assert trained == {name for name, kind in RULES.items() if issubclass(kind, UpdateRule)}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_accuracy(logical_devices, case):
    make, settings = CASES[case]
    simulation = Simulation(make(), STEPS, **settings)
    reached = simulation.run()
    assert simulation.largest_staleness >= WORKERS - 1
    assert (simulation.waits > 0) == simulation.rule.may_wait
    assert_as_good_as_one_device(reached)
