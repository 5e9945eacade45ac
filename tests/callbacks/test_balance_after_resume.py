"""BatchBalancer in a training that continues from a backup, on these devices or on others."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from interruption import Interruption

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BackupAndRestore, BatchBalancer, batch_balancer
from keras_het.fit.backup_folder import BackupFolder
from keras_het.planning import min_max_shares_linear
from keras_het.planning.time_model import known_from_json
from keras_het.strategy.measure import compute_times

BATCH, STEPS = 24, 12
SPEEDS = (4, 2, 1, 1)


@pytest.fixture(autouse=True)
def emulated(monkeypatch, logical_devices):
    monkeypatch.setattr(compute_times, "MOST_CALLS", 1)
    return monkeypatch


def train(emulated, folder, places, interrupted_after=None, products="xyzz", policy="min_max"):
    """Train on some of the devices; return the balancer."""
    devices = [
        {"speed": SPEEDS[place], "fixed_seconds": 0.0, "seconds_per_sample": 1e-3 / SPEEDS[place]}
        for place in places
    ]
    emulated.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    named = tuple(products[place] for place in places)
    emulated.setattr(batch_balancer, "product_names", lambda local: named)
    keras.utils.set_random_seed(3)
    strategy = HeterogeneousStrategy([DEVICES[place] for place in places])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    balancer = BatchBalancer(policy)
    backup = BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
    # the backup is restored after the balancer has begun
    callbacks = [balancer, backup, Interruption(interrupted_after or -1)]
    data = tf.data.Dataset.from_tensors((tf.ones([2]), tf.ones([1])))
    data = data.repeat(STEPS * BATCH).batch(BATCH)
    try:
        model.fit(data, verbose=0, callbacks=callbacks)
        assert not interrupted_after
    except InterruptedError:
        pass
    assert strategy.extended.training_state.export_times is None
    return balancer


def known_in(folder):
    backups = BackupFolder(folder, num_kept=1)
    backups.find()
    return known_from_json(str(backups.state()["device_times"]))


@pytest.fixture
def folder(emulated, tmp_path):
    """The backup of a training on the first three devices."""
    balancer = train(emulated, tmp_path, (0, 1, 2), interrupted_after=STEPS - 3)
    known = known_in(tmp_path).values()
    assert tuple(each.share for each in known) == balancer.plans[-1].shares
    assert len(balancer.plans) > 1
    return tmp_path


@pytest.mark.quick("another order")
@pytest.mark.parametrize("places", [(0, 1, 2), (2, 0, 1)], ids=["same", "another order"])
def test_on_the_same_devices_the_first_plan_is_the_last_one(emulated, folder, places):
    before = [each.share for each in known_in(folder).values()]
    first = train(emulated, folder, places).plans[0]
    assert first.shares == tuple(before[place] for place in places)
    assert first.reason == "known device times"


@pytest.mark.full
@pytest.mark.parametrize(
    ("places", "products", "alike"),
    [((0, 2), "xyzz", [0, 2]), ((0, 1, 2, 3), "xyzz", [0, 1, 2, 2]), ((3, 0), "xyzx", [0, 0])],
    ids=["one less", "one more", "another"],
)
def test_on_other_devices_the_first_plan_follows_from_known_times(
    emulated, folder, places, products, alike
):
    known = [each.times for each in known_in(folder).values()]
    balancer = train(emulated, folder, places, products=products)
    times = [known[place] for place in alike]
    expected = min_max_shares_linear(
        [each.fixed_seconds for each in times],
        [each.seconds_per_sample for each in times],
        BATCH,
        np.zeros(len(times), int),
        np.full(len(times), BATCH),
    )
    assert balancer.plans[0].shares == tuple(expected)
    assert balancer.measurements[0]["shares"] == list(expected)  # from the first step on
    assert len(known_in(folder)) == len({0, 1, 2, *places})  # one that is gone may come back


@pytest.mark.full
def test_a_device_of_an_unknown_product_has_an_even_share_at_first(emulated, folder):
    balancer = train(emulated, folder, (0, 1, 2, 3), products="xyzu")
    assert balancer.plans[0].shares[3] == BATCH // 4
    assert balancer.plans[0].shares[0] > BATCH // 4


@pytest.mark.full
def test_a_backup_of_a_training_without_a_balancer_that_measures(emulated, tmp_path):
    train(emulated, tmp_path, (0, 1), interrupted_after=4, policy="even")
    assert known_in(tmp_path) == {}
    assert train(emulated, tmp_path, (0, 1)).plans[0].reason == "even split"
