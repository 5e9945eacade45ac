"""Twenty-four samples of a sum of three features, and a model of one layer that learns it."""

import keras
import numpy as np
import tensorflow as tf

SAMPLES, BATCH = 24, 4
NUM_BATCHES = SAMPLES // BATCH


def arrays():
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, 3)).astype("float32")
    return x, x @ np.ones((3, 1), np.float32)


def data():
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


def make_model(strategy, make_optimizer=keras.optimizers.SGD, **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(0.1), "mse", **compiled)
    return model


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])
