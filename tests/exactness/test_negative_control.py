"""The comparison can fail: without the exact step the same training gives other numbers."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Trial, arrays, assert_equivalent, dense_model, needs_no_xla

from keras_het import HeterogeneousStrategy
from keras_het.strategy.exact.means import Means

SHARES = [(4, 2, 1)]
sgd = functools.partial(keras.optimizers.SGD, 0.1)


@needs_no_xla
def test_equal_weights_of_unequal_shares_are_off_by_far_more_than_the_tolerance(monkeypatch):
    # What tf.distribute.MirroredStrategy does: Keras divides by the number of replicas
    monkeypatch.setattr(HeterogeneousStrategy, "_needs_exact_step", lambda *_: False)
    trial = Trial(functools.partial(dense_model, "mse", sgd), evaluate=False, predict=False)
    with pytest.raises(AssertionError, match="shares"):
        assert_equivalent(trial, SHARES, rtol=1e-2, atol=1e-3)


@pytest.mark.full
def test_a_weight_that_is_slightly_wrong_is_noticed():
    class Biased(keras.losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            replica = tf.distribute.get_replica_context()  # None while Keras builds the model
            number = replica and tf.get_static_value(replica.replica_id_in_sync_group)
            is_wrong = tf.distribute.has_strategy() and number == 0
            return super().call(y_true, y_pred) * (1.001 if is_wrong else 1.0)

    with pytest.raises(AssertionError, match="shares"):
        assert_equivalent(Trial(functools.partial(dense_model, Biased, sgd)), SHARES)


@pytest.mark.full
def test_a_missing_factor_of_masked_losses_is_noticed(monkeypatch):
    monkeypatch.setattr(Means, "_divisor_factor", lambda *_: 1.0)

    def build():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return dense_model(loss, sgd)

    def data():
        x, y = arrays()
        weight = np.linspace(0.1, 3.0, len(x)).astype("float32")
        return tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(8)

    with pytest.raises(AssertionError, match="shares"):
        assert_equivalent(Trial(build, data), SHARES)


def test_training_that_changes_nothing_is_noticed():
    build = functools.partial(dense_model, "mse", lambda: keras.optimizers.SGD(0.0))
    with pytest.raises(AssertionError, match="changed nothing"):
        assert_equivalent(Trial(build), SHARES)
