"""Memory that is counted: shares stay within it, or are cut, before it runs out."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from interruption import Interruption

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BackupAndRestore, BatchBalancer, batch_balancer
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.strategy.measure import compute_times, memory_use
from keras_het.strategy.measure.memory_use import NOT_YET, UNKNOWN, Memory, MemoryUse

RESIDENT, FIXED, EACH, LIMIT = 1000, 100, 100, 5000
FITS = 35  # (0.9 * 5000 - 1000) / 100
NAMES = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(3))


class CountingDevice:
    """A device with little memory, which counts the bytes of what it computes."""

    def __init__(self, limit=LIMIT):
        self.limit, self.largest, self.peak = limit, 0, RESIDENT

    def compute(self, samples):
        self.largest = max(self.largest, samples)
        self.peak = max(self.peak, RESIDENT + FIXED + EACH * samples)
        if self.peak > self.limit:
            raise MemoryError("OOM when allocating tensor")


@pytest.fixture
def counting(monkeypatch):
    """Replica 0 counts bytes, and has memory for less than its speed deserves."""
    devices = {NAMES[0]: CountingDevice()}

    def memory_of(name):
        device = devices.get(name)
        return None if device is None else Memory(RESIDENT, device.peak, device.limit)

    monkeypatch.setattr(memory_use, "memory_of", memory_of)
    return devices


@keras.saving.register_keras_serializable()
class Counted(keras.layers.Layer):
    """Lets the device of replica 0 count the rows that it gets."""

    device = None

    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        if context is None or self.device is None:
            return inputs

        def count(rows, replica):
            if replica == 0:
                self.device.compute(len(rows))
            return rows

        place = [inputs, context.replica_id_in_sync_group]
        return tf.ensure_shape(tf.numpy_function(count, place, tf.float32), inputs.shape)


def train(strategy, callbacks, counted=None, epochs=4):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = Counted()
        layer.device = counted
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((60 * 6, size)).astype("float32") for size in (3, 2))
    model.fit(x, y, batch_size=60, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def one_device(**options):
    with pytest.MonkeyPatch.context() as real:
        real.delenv("KERAS_HET_EMULATED_DEVICES")
        return train(HeterogeneousStrategy(DEVICES[:1]), [], **options)


@pytest.fixture
def emulated(monkeypatch, logical_devices):
    times = [(8, 0.0005), (1, 0.004), (1, 0.004)]
    monkeypatch.setenv(
        "KERAS_HET_EMULATED_DEVICES",
        json.dumps(
            [
                {"speed": speed, "fixed_seconds": 0.001, "seconds_per_sample": seconds}
                for speed, seconds in times
            ]
        ),
    )
    monkeypatch.setattr(compute_times, "MOST_CALLS", 1)


@pytest.mark.full
@pytest.mark.parametrize("memory", [None, Memory(RESIDENT, 0, LIMIT)], ids=["none", "no peak"])
def test_without_counts_the_fast_device_gets_more_than_it_holds(emulated, monkeypatch, memory):
    monkeypatch.setattr(memory_use, "memory_of", lambda name: memory)
    balancer = BatchBalancer()
    train(HeterogeneousStrategy(DEVICES[:3]), [balancer])
    assert max(row["shares"][0] for row in balancer.measurements) > (LIMIT - RESIDENT) // EACH
    assert memory or "memory" not in balancer.summary()


@pytest.mark.full
def test_shares_grow_up_to_what_fits(emulated, counting):
    balancer, (device,) = BatchBalancer(), counting.values()
    model = train(HeterogeneousStrategy(DEVICES[:3]), [balancer], device, epochs=2)
    shares = [row["shares"][0] for row in balancer.measurements]
    assert shares[0] == 20
    assert 20 < shares[-1] <= FITS
    assert device.peak <= 0.9 * LIMIT + FIXED
    assert f"memory: {balancer._fitting[0]} on 0." in balancer.summary()
    alone = one_device(epochs=2)
    for own, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_larger_share_is_cut_before_memory_runs_out(emulated, counting):
    balancer, (device,) = BatchBalancer(), counting.values()
    strategy = HeterogeneousStrategy(DEVICES[:3], micro_batch_size="auto")
    model = train(strategy, [balancer], device)
    shares = [row["shares"][0] for row in balancer.measurements]
    assert shares[-1] > (LIMIT - RESIDENT) // EACH  # whole, this would run out of memory
    assert device.largest <= FITS
    assert balancer._policy.models[0].micro_batch_size == balancer._fitting[0]
    assert_predicts_in_parts(model, device)
    alone = one_device()
    for own, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def assert_predicts_in_parts(model, device):
    """Shares of many more samples than fit; the others' memory is unknown, and theirs are whole."""
    x = np.random.default_rng(1).standard_normal((240, 3)).astype("float32")
    device.largest = 0
    predicted = model.predict(x, batch_size=240, verbose=0)
    assert 20 < device.largest <= FITS
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(predicted, x @ kernel + bias, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_nothing_is_cut_as_long_as_memory_is_unknown(counting):
    (device,) = counting.values()
    device.limit = 10**9
    strategy = HeterogeneousStrategy(DEVICES[:3], micro_batch_size="auto")
    model = train(strategy, [], device, epochs=1)
    model.predict(np.zeros((240, 3), "float32"), batch_size=240, verbose=0)
    assert device.largest == 80


@pytest.mark.full
def test_a_training_that_continues_cuts_from_its_first_step(
    emulated, counting, monkeypatch, tmp_path
):
    monkeypatch.setattr(batch_balancer, "product_names", lambda local: ("x", "y", "z"))
    for is_first in (True, False):
        counting[NAMES[0]] = device = CountingDevice()
        balancer = BatchBalancer()
        backup = BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)
        strategy = HeterogeneousStrategy(DEVICES[:3], micro_batch_size="auto")
        callbacks = [balancer, backup, Interruption(18 if is_first else -1)]
        try:
            train(strategy, callbacks, device)
            assert not is_first
        except InterruptedError:
            pass
        shares = [row["shares"][0] for row in balancer.measurements]
        assert device.largest <= FITS
        assert shares[-1] > (LIMIT - RESIDENT) // EACH
    assert shares[0] > (LIMIT - RESIDENT) // EACH


@pytest.mark.full
def test_a_bound_that_was_given_stays(emulated, counting):
    balancer, (device,) = BatchBalancer(max_share={0: 30}), counting.values()
    device.limit = 10**6
    train(HeterogeneousStrategy(DEVICES[:3]), [balancer], device)
    assert max(row["shares"][0] for row in balancer.measurements) == 30


@pytest.mark.full
def test_a_larger_batch_is_no_reason_to_fail(emulated, counting):
    balancer = BatchBalancer()
    strategy = HeterogeneousStrategy(DEVICES[:3])
    for name in NAMES:
        counting[name] = CountingDevice(limit=LIMIT)
    model = train(strategy, [balancer], counting[NAMES[0]], epochs=2)
    x, y = np.zeros((480, 3), "float32"), np.zeros((480, 2), "float32")
    counting[NAMES[0]].limit = 10**9
    model.fit(x, y, batch_size=240, verbose=0, callbacks=[balancer])
    assert sum(balancer.measurements[-1]["shares"]) == 240


LAYOUT = ReplicaLayout((1, 2, 1), 1)


@pytest.fixture
def use(counting):
    for name in NAMES[:2]:
        counting[name] = CountingDevice()
    return lambda cuts=False: MemoryUse(LAYOUT, NAMES[:2], cuts)


def compute(counting, use, *shares):
    for name, share in zip(NAMES[:2], shares, strict=True):
        if share:
            counting[name].compute(share)
    return use.note(np.array([99, *shares, 99]))


def test_what_fits_is_known_for_own_replicas_only(counting, use):
    known = use()
    assert known.fitting.tolist() == [UNKNOWN, NOT_YET, NOT_YET, UNKNOWN]
    assert compute(counting, known, 10, 0)  # 110 bytes a sample at first
    assert known.fitting.tolist() == [UNKNOWN, 31, NOT_YET, UNKNOWN]
    assert not compute(counting, known, 10, 0)
    assert compute(counting, known, 20, 3)  # 105, and 133 on the other
    assert known.fitting.tolist() == [UNKNOWN, 33, 26, UNKNOWN]
    assert not compute(counting, known, 5, 1)  # a small last batch, whose peak is older


def test_what_was_computed_fits(counting, use):
    known = use()
    compute(counting, known, 36, 1)
    assert known.fitting[1] == 36


def test_a_peak_that_somebody_resets_says_nothing(counting, use):
    known = use()
    compute(counting, known, 10, 0)
    counting[NAMES[0]].peak = RESIDENT
    assert not known.note(np.array([99, 10, 0, 99]))


def test_a_device_that_counts_no_peak_is_not_held(counting, use):
    known = use()
    counting[NAMES[0]].peak = 0
    assert known.note(np.array([99, 10, 0, 99]))
    assert known.fitting.tolist() == [UNKNOWN, UNKNOWN, NOT_YET, UNKNOWN]


def test_parts_say_nothing_more(counting, use):
    known = use(cuts=True)
    compute(counting, known, 10, 0)
    assert not known.note(np.array([99, 40, 0, 99]))  # in two parts
    assert known.fitting[1] == 31


def test_a_training_that_continues_cuts_as_before(use):
    known = use(cuts=True)
    for replica, samples in enumerate([7, 8, 9]):
        known.start_from(replica, samples)
    assert known.fitting.tolist() == [UNKNOWN, 8, 9, UNKNOWN]


def test_a_cpu_counts_nothing():
    assert memory_use.memory_of(NAMES[0]) is None
