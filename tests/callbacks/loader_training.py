"""Trainings with LoaderTuner, controllers of the tests, and what they recorded."""

import itertools
import threading

import keras
import numpy as np
import tensorflow as tf

import keras_het
from keras_het.callbacks import LoaderTuner
from keras_het.planning.loader import LoaderPlan, WindowSize

ROWS, BATCH = 60, 4
STEPS = ROWS // BATCH


class EveryStep:
    """A controller that wants another plan after every step."""

    name = "every step"

    def __init__(self, plan, cpus):
        self.plan = plan
        self.plans = itertools.cycle(
            [LoaderPlan(n, p) for n, p in ((5, 3), (1, 1), (3, 4), (2, 2))]
        )
        self.refusals = []
        self.next_window = WindowSize(0, 1, 0.0)

    def observe(self, window):
        self.plan = next(self.plans)
        return self.plan

    def refused(self, plan):
        self.refusals.append(plan)

    def set_cpus(self, cpus):
        pass

    def set_reading_loaders(self, loaders):
        pass


class Eager(EveryStep):
    """Keeps its plan, and measures after every step."""

    def observe(self, window):
        return None


def shuffled(number, knobs, seed=7):
    numbers = tf.data.Dataset.range(number).shuffle(20, seed=seed)
    return numbers.map(
        lambda row: (tf.fill([3], tf.cast(row, tf.float32) / ROWS), tf.cast(row, tf.float32)),
        num_parallel_calls=knobs.num_parallel_calls,
    )


def build(knobs):
    return shuffled(ROWS, knobs).batch(BATCH).prefetch(knobs.prefetch)


def long(knobs):
    return shuffled(4 * ROWS - 1, knobs).batch(BATCH).prefetch(knobs.prefetch)


def noting_load(calls):
    def note(row):
        calls.append(int(row))
        return row

    def load(row):
        row = tf.ensure_shape(tf.numpy_function(note, [row], tf.int64), [])
        return tf.fill([3], tf.cast(row, tf.float32)), tf.cast(row, tf.float32)

    return load


class Recording(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen = []

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        def note(labels):
            self.seen.append(labels.tolist())
            return np.float32(0.0)

        with tf.control_dependencies([tf.numpy_function(note, [data[1]], tf.float32)]):
            return super().train_step(data)


class Patient(keras.callbacks.Callback):
    """Lets no step begin while a pipeline is being built, so that short trainings move too."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner = tuner

    def on_train_batch_end(self, batch, logs=None):
        session = self.tuner._session
        if session is not None and session.change is not None:
            session.change[0].wait(60)


def train(dataset, callbacks, epochs=3, **options):
    keras.utils.set_random_seed(3)
    if not isinstance(dataset, tf.data.Dataset):
        dataset = dataset()
    model = Recording()
    callbacks = [*callbacks, *(Patient(one) for one in callbacks if isinstance(one, LoaderTuner))]
    fit = {
        key: options.pop(key) for key in ("steps_per_epoch", "validation_data") if key in options
    }
    model.compile("sgd", "mse", **options)
    model.fit(dataset, epochs=epochs, verbose=0, callbacks=callbacks, **fit)
    return model


def moving():
    return LoaderTuner(EveryStep, cooperate_with_other_jobs=False)


def done(tuner):
    return [move for move in tuner.moves if move.refused is None]


def slow(seconds, size=12):
    """Rows from emulated storage that takes a while for each."""
    storage = threading.Event()

    def wait(row):
        storage.wait(seconds)
        return row

    def load(row):
        row = tf.ensure_shape(tf.numpy_function(wait, [row], tf.int64), [])
        return tf.fill([3], tf.cast(row, tf.float32)), tf.zeros([1])

    return tf.data.Dataset.range(size).map(load).batch(2)


def numbered(size):
    """A builder of so many rows of three equal features."""

    def build(knobs):
        rows = tf.data.Dataset.range(size).map(
            lambda row: (tf.fill([3], tf.cast(row, tf.float32) / size), tf.zeros([1])),
            num_parallel_calls=knobs.num_parallel_calls,
        )
        return rows.batch(4).prefetch(knobs.prefetch)

    return build


def dense():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def train_under_strategy(devices, dataset, callbacks, shares=(3, 1), epochs=3, **options):
    keras.utils.set_random_seed(5)
    strategy = keras_het.HeterogeneousStrategy(list(devices[:2]), share_weights=list(shares))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", **options)
    patient = [Patient(one) for one in callbacks if isinstance(one, LoaderTuner)]
    history = model.fit(dataset, epochs=epochs, verbose=0, callbacks=[*callbacks, *patient]).history
    return [*model.get_weights(), np.array(history["loss"])]


def train_either(devices, dataset, callbacks, epochs=3):
    """Under the strategy of these devices, or without one if there are none."""
    if devices:
        return train_under_strategy(devices, dataset, callbacks, epochs=epochs)
    return train(dataset, callbacks, epochs=epochs).get_weights()


def long_slices(knobs):
    ends = {"padded_shapes": ([None], [])}
    return long(knobs).unbatch().padded_batch(BATCH, **ends).prefetch(knobs.prefetch)
