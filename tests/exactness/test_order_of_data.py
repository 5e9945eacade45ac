"""Each epoch has the batches that one device sees, in the order in which one device sees them.

Models do not learn; the loss of a step tells which samples its batch had. Iterators of these data
share what they draw from: a queue of batches, a shuffle that reshuffles, a generator. A strategy
that makes one iterator more, looks at an element or reads too far ahead changes later epochs.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy

BATCH = 8
CODES = np.random.RandomState(0).rand(10_000).astype("float32")
WEIGHTS = {0: 1.0, 1: 2.0}


class Seen(keras.callbacks.Callback):
    """The mean code of each batch, epoch by epoch, validations apart."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.validations = []
        self._sum = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self._begin(self.epochs)

    def on_train_batch_end(self, batch, logs=None):
        self._note(self.epochs[-1], logs)

    def on_test_begin(self, logs=None):
        self._begin(self.validations)

    def on_test_batch_end(self, batch, logs=None):
        self._note(self.validations[-1], logs)

    def _begin(self, kept):
        kept.append([])
        self._sum = 0.0

    def _note(self, kept, logs):
        total = float(logs["loss"]) * (len(kept) + 1)
        kept.append(total - self._sum)
        self._sum = total


def seen(train, strategy):
    keras.utils.set_random_seed(7)

    def build():
        zeros = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((2,)), zeros])
        model.compile(keras.optimizers.SGD(0.0), "mae")
        return model

    if strategy is None:
        model = build()
    else:
        with strategy.scope():
            model = build()
    callback = Seen()
    train(model, callback)
    return callback.epochs, callback.validations


def assert_same_order(train):
    """Compares what one device sees with what two unequal replicas see."""
    strategy = HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[3, 1])
    expected, actual = seen(train, None), seen(train, strategy)
    for of_one_device, of_replicas in zip(expected, actual, strict=True):
        assert [len(epoch) for epoch in of_replicas] == [len(epoch) for epoch in of_one_device]
        # float32 sums in another order; means of batches differ by more
        np.testing.assert_allclose(
            [*itertools.chain(*of_replicas)], [*itertools.chain(*of_one_device)], atol=5e-5
        )
    assert np.ptp([*itertools.chain(*expected[0])]) > 0.01


def samples(ids):
    return np.ones((len(ids), 2), "float32"), CODES[np.asarray(ids)][:, None]


class Sequence(keras.utils.PyDataset):
    """Batches of five, or of infinitely many, that change when an epoch ends (or begins)."""

    def __init__(self, length=5, first=0, reshuffles="end", **options):
        super().__init__(**options)
        self.ids = np.arange(first, first + 5 * BATCH)
        self._length, self._reshuffles = length, reshuffles
        self._random = np.random.RandomState(3)

    @property
    def num_batches(self):
        return self._length

    def __getitem__(self, index):
        start = BATCH * (index % 5)
        return samples(self.ids[start : start + BATCH])

    def on_epoch_begin(self):
        if "begin" in self._reshuffles:
            self._random.shuffle(self.ids)

    def on_epoch_end(self):
        if "end" in self._reshuffles:
            self._random.shuffle(self.ids)


SEQUENCES = {
    "in_this_thread": {"workers": 0},
    "one_thread": {"workers": 1},
    "two_threads": {"workers": 2},
    "four_threads": {"workers": 4},
    "short_queue": {"workers": 2, "max_queue_size": 1},
    "one_process": {"workers": 1, "use_multiprocessing": True},
    "two_processes": {"workers": 2, "use_multiprocessing": True},
}


FITS = {
    "shuffled": ({}, {"epochs": 2}),
    "class_weights": ({}, {"epochs": 2, "class_weight": WEIGHTS}),
    "infinite": (
        {"length": None, "reshuffles": ""},
        {"epochs": 4, "steps_per_epoch": 3, "validation_steps": 2, "validation_freq": 2},
    ),
    "shorter": ({"reshuffles": ""}, {"epochs": 4, "steps_per_epoch": 2, "shuffle": False}),
    "longer": ({"reshuffles": ""}, {"epochs": 4, "steps_per_epoch": 7, "shuffle": False}),
    "begin": ({"reshuffles": "begin end"}, {"epochs": 3}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("fit", FITS)
def test_sequences(fit, kind):
    # Between such epochs Keras waits only 0.1 s for what its thread still puts in a queue.
    if fit in ("shorter", "longer") and kind == "short_queue":
        return
    if fit == "begin" and kind not in ("in_this_thread", "one_thread"):  # Keras's threads race it
        return
    about, options = FITS[fit]
    options = {"verbose": 0, **options}

    def train(model, seen):
        data = Sequence(**about, **SEQUENCES[kind])
        if fit in ("shuffled", "infinite", "begin"):
            options["validation_data"] = Sequence(first=100, **about, **SEQUENCES[kind])
        for _ in range(2 if fit == "shuffled" else 1):
            model.fit(data, callbacks=[seen], **options)
        if fit == "shuffled":
            model.evaluate(data, verbose=0, callbacks=[seen])

    assert_same_order(train)


def test_a_sequence_builds_a_model_that_is_not_built():
    strategy = HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[0, 1])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, kernel_regularizer="l2")])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mae", weighted_metrics=["mse"])
    model.fit(Sequence(workers=2), epochs=1, verbose=0)
    assert model.layers[0].kernel.shape == (2, 3)


def drawn_batches(number=5):
    """Draws from NumPy's generator: each look at it shows."""
    for _ in itertools.count() if number is None else range(number):
        yield samples(np.random.randint(0, 1000, BATCH))


def on_demand(dataset):
    """Without the prefetch that tf.data's autotuner puts at the end, as far as it likes."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def from_generator(number=5):
    signature = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
    return on_demand(
        tf.data.Dataset.from_generator(lambda: drawn_batches(number), output_signature=signature)
    )


GENERATORS = {
    "given": (lambda: drawn_batches(None), {"steps_per_epoch": 3}),
    "given_finite": (lambda: drawn_batches(), {}),
    "from_generator": (from_generator, {}),
    "from_infinite_generator": (lambda: from_generator(None), {"steps_per_epoch": 3}),
    "batched": (lambda: from_generator().unbatch().batch(4), {}),
    "mapped": (lambda: from_generator().unbatch().map(lambda x, y: (x, 2 * y)).batch(4), {}),
}


@pytest.mark.quick("from_generator")
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_started_once_an_epoch(kind):
    make, options = GENERATORS[kind]

    def train(model, seen):
        model.fit(make(), epochs=3, verbose=0, callbacks=[seen], **options)

    assert_same_order(train)


@pytest.mark.full
@pytest.mark.parametrize("reads", ["validates_between", "trains_again"])
def test_fits_that_share_one_generator(reads):
    def train(model, seen):
        endless, signature = (
            drawn_batches(None),
            (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])),
        )
        options = {"steps_per_epoch": 3, "verbose": 0, "callbacks": [seen]}
        data = tf.data.Dataset.from_generator(lambda: endless, output_signature=signature)
        data = on_demand(data)
        if reads == "validates_between":
            options.update(validation_data=data, validation_steps=2)
        for _ in range(2):
            model.fit(data, epochs=2, **options)

    assert_same_order(train)


def shuffled(number=40, **options):
    samples_of_all = tf.data.Dataset.from_tensor_slices(samples(np.arange(number)))
    return on_demand(samples_of_all).shuffle(number, **{"seed": 1, **options})


def fits_in_a_row(make, **options):
    def train(model, seen):
        data = make()
        steps = {"steps": 2} if "steps_per_epoch" in options else {}
        for _ in range(2):
            model.fit(data, epochs=2, verbose=0, callbacks=[seen], **options)
            model.evaluate(data, verbose=0, callbacks=[seen], **steps)

    return train


def with_validation(make, **options):
    def train(model, seen):
        data = {"x": make(), "validation_data": make()}
        model.fit(**data, epochs=5, verbose=0, callbacks=[seen], **options)

    return train


def one_shuffle(parts):
    """Trains on one part of a shuffled dataset, validates on another, then trains on a third."""

    def train(model, seen):
        first, validation, second = parts(shuffled(64))
        options = {"validation_data": validation, "verbose": 0, "callbacks": [seen]}
        model.fit(first, epochs=3, **options)
        model.fit(second, epochs=2, **options)

    return train


INFINITE = {"steps_per_epoch": 3}
DATA_SETS = {
    "fits": fits_in_a_row(lambda: shuffled().batch(BATCH)),
    "class_weights": fits_in_a_row(lambda: shuffled().batch(BATCH), class_weight=WEIGHTS),
    "class_weights_infinite": fits_in_a_row(
        lambda: shuffled().repeat().batch(BATCH), class_weight=WEIGHTS, **INFINITE
    ),
    "global_seed": fits_in_a_row(lambda: shuffled(seed=None).batch(BATCH), class_weight=WEIGHTS),
    "shuffled_once": fits_in_a_row(
        lambda: shuffled(reshuffle_each_iteration=False).batch(BATCH), class_weight=WEIGHTS
    ),
    "infinite": fits_in_a_row(lambda: shuffled().repeat().batch(BATCH), **INFINITE),
    "repeated": fits_in_a_row(lambda: shuffled().repeat(2).batch(BATCH)),
    "mapped": fits_in_a_row(lambda: shuffled().map(lambda x, y: (x, 2 * y)).batch(BATCH)),
    "shuffled_twice": fits_in_a_row(lambda: shuffled().shuffle(5, seed=2).batch(BATCH)),
    "whole_batches": fits_in_a_row(lambda: shuffled().batch(BATCH).shuffle(3, seed=1)),
    "filtered": fits_in_a_row(
        lambda: shuffled().filter(lambda x, y: True).batch(BATCH), class_weight=WEIGHTS
    ),
    "filtered_infinite": fits_in_a_row(
        lambda: shuffled().filter(lambda x, y: True).repeat().batch(BATCH), **INFINITE
    ),
    "random_values": fits_in_a_row(
        lambda: (
            on_demand(tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True))
            .map(lambda value: (tf.ones([2]), tf.cast(value % 1000, tf.float32)[None] / 1000))
            .take(5 * BATCH)
            .batch(BATCH)
        )
    ),
    "validation": with_validation(lambda: shuffled().batch(BATCH), validation_freq=2),
    "infinite_validation": with_validation(
        lambda: shuffled().repeat().batch(BATCH), validation_freq=2, validation_steps=2, **INFINITE
    ),
    "steps_of_validation": with_validation(lambda: shuffled().batch(BATCH), validation_steps=2),
    "parts_of_samples": one_shuffle(
        lambda data: [
            data.skip(24).batch(BATCH),
            data.take(24).batch(BATCH),
            data.batch(2 * BATCH),
        ]
    ),
    "parts_of_batches": one_shuffle(
        lambda data: [
            data.batch(BATCH).skip(3),
            data.batch(BATCH).take(3),
            data.map(lambda x, y: (x, 2 * y)).batch(BATCH),
        ]
    ),
    "other_kinds": one_shuffle(
        lambda data: [data.padded_batch(BATCH), data.batch(BATCH), data.padded_batch(BATCH)]
    ),
}


@pytest.mark.quick("infinite_validation")
@pytest.mark.parametrize("kind", DATA_SETS)
def test_shuffled_datasets(kind):
    assert_same_order(DATA_SETS[kind])
