"""What gradients of low rank leave out is sent in later steps; arguments; what is kept."""

import gc
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy
from keras_het.strategy.exact.power_sgd import PowerSGD, approximated


class Alone:
    """Stands for the sums of a step of one replica."""

    def __call__(self, values):
        return values

    def within_worker(self, tensors):
        return list(tensors)


def steps(power_sgd, gradients, keeps_error=True):
    """The sums of some steps, and the error after the last one."""
    model, variable = keras.Sequential(), tf.Variable(0.0)
    spec = types.SimpleNamespace(local_position=0, replica_id=0)
    found = []
    for gradient in gradients:
        gradient = tf.constant(gradient)
        kept = power_sgd.kept(model, variable, gradient)
        approximation = approximated([gradient], [kept], [None], spec, Alone())
        approximation.keep([])
        if not keeps_error:
            kept.error.assign(tf.zeros_like(kept.error))
        found.append(approximation.sums[0].numpy())
    return np.array(found), kept.error.numpy()


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 2, 9)])
def test_nothing_is_lost(shape):
    gradients = normal(5, *shape)
    found, error = steps(PowerSGD(2, "CPU:0"), gradients)
    left = gradients.sum(0) - found.sum(0)
    np.testing.assert_allclose(error.reshape(shape), left, atol=1e-13)
    assert np.linalg.matrix_rank(found[-1].reshape(-1, shape[-1])) == 2


def test_a_constant_gradient_arrives_in_the_end():
    gradient = normal(12, 9)
    gradients = [gradient] * 60
    found, _ = steps(PowerSGD(1, "CPU:0"), gradients)
    without, _ = steps(PowerSGD(1, "CPU:0"), gradients, keeps_error=False)
    largest = np.abs(gradient).max()
    assert np.abs(found.mean(0) - gradient).max() < 0.2 * largest
    assert np.abs(without.mean(0) - gradient).max() > 0.5 * largest


def test_full_rank_is_exact():
    gradients = normal(3, 5, 8)
    found, error = steps(PowerSGD(5, "CPU:0"), gradients)
    np.testing.assert_allclose(found, gradients, atol=1e-13)
    np.testing.assert_allclose(error, 0, atol=1e-13)


def test_gradients_of_zeros_hide_no_later_ones():
    """Not even one that has nothing but zeros in its first rows."""
    later = np.zeros([8, 9])
    later[4:] = normal(4, 9)
    found, error = steps(PowerSGD(4, "CPU:0"), [np.zeros([8, 9]), later])
    np.testing.assert_allclose(found[-1], later, atol=1e-13)
    np.testing.assert_allclose(error, 0, atol=1e-13)


def test_all_workers_take_the_columns_of_the_chief():
    """Those of another device may differ in their last bits; here they differ altogether."""
    chiefs, _ = np.linalg.qr(normal(8, 2))
    own = []

    class Second(Alone):
        def __call__(self, values):
            if isinstance(values, list):
                return values
            own.extend([*values[0], *values[1]])
            return [tf.constant(chiefs)], values[1]

    model, variable, gradient = keras.Sequential(), tf.Variable(0.0), tf.constant(normal(8, 9))
    kept = PowerSGD(2, "CPU:0").kept(model, variable, gradient)
    spec = types.SimpleNamespace(local_position=0, replica_id=1)
    approximation = approximated([gradient], [kept], [None], spec, Second())
    approximation.keep([])
    np.testing.assert_array_equal(own[0], np.zeros([8, 2]))
    expected = chiefs @ own[1].numpy().T
    np.testing.assert_allclose(approximation.sums[0], expected, atol=1e-13)
    np.testing.assert_allclose(kept.error, gradient - expected, atol=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
def test_what_is_not_finite_leaves_what_was_kept(value):
    power_sgd = PowerSGD(2, "CPU:0")
    first, second, overflowed = *normal(2, 8, 9), normal(8, 9)
    overflowed[:5] = value
    found, error = steps(power_sgd, [first, overflowed, second])
    expected, expected_error = steps(PowerSGD(2, "CPU:0"), [first, second])
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[::2], expected)
    np.testing.assert_array_equal(error, expected_error)


def test_what_another_gradient_overflows_is_kept_too():
    model, variable = keras.Sequential(), tf.Variable(0.0)
    gradient, power_sgd = tf.constant(normal(8, 9)), PowerSGD(2, "CPU:0")
    kept = power_sgd.kept(model, variable, gradient)
    spec = types.SimpleNamespace(local_position=0, replica_id=0)
    before = [kept.basis.numpy(), kept.error.numpy()]
    other = tf.IndexedSlices(tf.constant([[1.0, np.inf]]), tf.constant([0]))
    for others in ([tf.constant([1.0, np.inf])], [other]):
        approximated([gradient], [kept], [None], spec, Alone()).keep(others)
        for one, value in zip((kept.basis, kept.error), before, strict=True):
            np.testing.assert_array_equal(one.numpy(), value)
    approximated([gradient], [kept], [None], spec, Alone()).keep([tf.constant([1]), tf.zeros([2])])
    assert np.abs(kept.error.numpy()).max() > 0


def test_the_size_of_gradients_does_not_matter():
    gradients = normal(4, 8, 9).astype("float32")
    found, _ = steps(PowerSGD(2, "CPU:0"), gradients)
    for scale in (2.0**100, 2.0**-100):
        other, _ = steps(PowerSGD(2, "CPU:0"), gradients * np.float32(scale))
        np.testing.assert_allclose(other / scale, found, rtol=1e-3, atol=1e-5)


def test_what_travels_whole():
    power_sgd = PowerSGD(4, "CPU:0")
    assert power_sgd.pays(tf.zeros([64, 64])) and power_sgd.pays(tf.zeros([3, 3, 16, 64]))
    assert not power_sgd.pays(tf.zeros([24, 24]))  # 3 * 24 columns of 4 are half of it
    for other in (
        tf.zeros([4096]),
        tf.zeros([4096, 1]),
        tf.zeros([64, 64], tf.int32),
        tf.zeros([64, 64], tf.bfloat16),
        tf.zeros([0, 64]),
        tf.IndexedSlices(tf.zeros([2, 64]), tf.constant([0, 1]), tf.constant([64, 64])),
    ):
        assert not power_sgd.pays(other)


def test_what_is_kept_is_the_models_and_ends_with_it():
    power_sgd, gradient = PowerSGD(1, "CPU:0"), tf.zeros([8, 9])
    layer = keras.layers.Dense(9)
    models = [keras.Sequential([keras.Input((8,)), layer]) for _ in range(2)]
    one, other = (power_sgd.kept(model, layer.kernel, gradient) for model in models)
    assert one.error is not other.error
    assert power_sgd.kept(models[0], layer.kernel, gradient) is one
    assert len(models[0].variables) == 2 and len(power_sgd._kept) == 2
    del layer
    models.clear()
    gc.collect()
    assert not len(power_sgd._kept)


@pytest.mark.parametrize("rank", [0, 1.5, "4", True])
def test_ranks_that_are_none(rank):
    with pytest.raises(ValueError, match="powersgd_rank must be a whole number of at least 1"):
        HeterogeneousStrategy(DEVICES[:1], powersgd_rank=rank)


def test_what_does_not_go_with_a_rank():
    with pytest.raises(ValueError, match=r"'bfloat16' with powersgd_rank=4\. Leave one"):
        HeterogeneousStrategy(DEVICES[:1], communication_dtype="bfloat16", powersgd_rank=4)
    with pytest.raises(ValueError, match=r"powersgd_rank=4 with gradient_reduction=\"summation\""):
        HeterogeneousStrategy(DEVICES[:1], gradient_reduction="summation", powersgd_rank=4)


def test_one_process_sends_everything():
    assert HeterogeneousStrategy(DEVICES[:2], powersgd_rank=4).extended.power_sgd is None
