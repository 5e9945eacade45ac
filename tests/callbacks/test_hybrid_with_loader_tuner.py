"""LoaderTuner in a sync group with async workers: it measures, changes nothing, and says why."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loader_training import STEPS, Patient, build, done, moving

from keras_het.callbacks import HybridAggregation
from keras_het.loader import Knobs, pipeline

KNOBS = Knobs(2, 2, 2)
EPOCHS = 2


def trained(strategy, data, callbacks):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model.get_weights()


@pytest.mark.full
@pytest.mark.parametrize("is_builder", [True, False], ids=["builder", "data set"])
@pytest.mark.parametrize("tuner_is_first", [True, False], ids=["tuner first", "hybrid first"])
def test_a_hybrid_training_is_observed_only(strategy, is_builder, tuner_is_first):
    def data():
        tf.random.set_seed(5)
        return pipeline(build, KNOBS) if is_builder else build(KNOBS)

    expected = trained(strategy, data(), [HybridAggregation("delta", period=2)])
    tuner = moving()
    both = [tuner, HybridAggregation("delta", period=2)]
    callbacks = [*both[:: 1 if tuner_is_first else -1], Patient(tuner)]
    found = trained(strategy, data(), callbacks)
    assert tuner.meter.steps == EPOCHS * STEPS
    assert "async workers" in tuner.observes_only
    assert not done(tuner)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
