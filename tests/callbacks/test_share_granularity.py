"""BatchBalancer whose shares are multiples, and which counts what new shares cost."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BatchBalancer, batch_balancer
from keras_het.planning import BalancePlan, BalancePolicy
from keras_het.strategy.measure import compute_times

BATCH = 60


@pytest.fixture(autouse=True)
def emulated(monkeypatch, logical_devices):
    devices = [
        {"speed": speed, "fixed_seconds": 0.0, "seconds_per_sample": 1.5e-3 / speed}
        for speed in (4, 2, 1)
    ]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    monkeypatch.setattr(compute_times, "MOST_CALLS", 1)
    return monkeypatch


def train(balancer, batch=BATCH, steps=12):
    keras.utils.set_random_seed(3)
    strategy = HeterogeneousStrategy(DEVICES[:3])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([2]), tf.ones([1])))
    model.fit(data.repeat(steps * batch).batch(batch), verbose=0, callbacks=[balancer])
    return np.array([row["shares"] for row in balancer.measurements])


@pytest.mark.quick("8-60")
@pytest.mark.parametrize(("size", "batch"), [(1, 60), (8, 60), (8, 56), (16, 100)])
def test_shares_are_multiples_but_one(size, batch):
    shares = train(BatchBalancer(granularity=size), batch)
    assert shares.shape == (12, 3) and (shares.sum(axis=1) == batch).all()
    assert (np.sort(shares % size, axis=1) == [0, 0, batch % size]).all()
    assert shares[-1, 0] > shares[-1, 2] > 0  # of the fastest and the slowest device


def test_auto_is_1_but_on_gpus(emulated):
    balancer = BatchBalancer("even")
    assert (train(balancer, 100, steps=2) == [34, 33, 33]).all()
    emulated.setattr(batch_balancer, "gpu_name", lambda device: "GPU:0")
    balancer = BatchBalancer("static", weights=[4, 2, 1])
    assert (train(balancer, 113, steps=2) == [65, 32, 16]).all()
    assert (train(BatchBalancer("even", granularity=1), 100, steps=2) == [34, 33, 33]).all()


@pytest.mark.parametrize(
    ("others", "expected"),
    [([[0, 1], [2, 1]], (2, True)), ([[1, 1], [0, 0]], (1, False))],
    ids=["GPUs", "a CPU among them"],
)
def test_all_workers_have_the_same_granularity(emulated, others, expected):
    gathered = []
    extended = SimpleNamespace(
        worker_devices=["/GPU:0"],
        gather_over_workers=lambda facts: gathered.append(facts) or np.array(others),
    )
    strategy = SimpleNamespace(num_workers=2, extended=extended)
    emulated.setattr(batch_balancer, "num_unsettled_steps", lambda model, devices: 1)
    assert batch_balancer._gathered_facts(strategy, None) == expected
    assert [facts.tolist() for facts in gathered] == [[[1, 1]]]


class TellsSeconds(BalancePolicy):
    """A policy of a user that takes note of what new shares cost."""

    name = "tells seconds"
    shares = (20, 20, 20)

    def __init__(self):
        self.told = []

    def observe(self, step, shares, seconds):
        pass

    def propose(self, step):
        return BalancePlan(step, self.name, self.shares, "even") if step < 0 else None

    def set_upper(self, replica, samples):
        pass

    def set_global_batch_size(self, samples):
        pass

    def observe_new_share_seconds(self, seconds):
        self.told.append(seconds)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_policies_know_what_new_shares_cost(emulated, on_gpus):
    policy = TellsSeconds()
    if on_gpus:  # a user's policy has no granularity
        emulated.setattr(batch_balancer, "gpu_name", lambda device: "GPU:0")
    emulated.setattr(batch_balancer, "num_unsettled_steps", lambda model, devices: 1)
    balancer = BatchBalancer(policy)
    balancer._steps.new_shares._extra.append(3.0)
    train(balancer, steps=4)
    assert policy.told and set(policy.told) == {3.0}
