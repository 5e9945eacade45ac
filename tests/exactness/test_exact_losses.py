"""Losses: every reduction, weights, masks, regularisation."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    IS_QUICK,
    Trial,
    arrays,
    assert_equivalent,
    batches,
    dense_model,
    whole_and_in_parts,
)

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", None)
sgd = functools.partial(keras.optimizers.SGD, 0.02, momentum=0.5)


def weighted_batches(samples=22, size=8):
    x, y = arrays(samples)
    weight = np.random.default_rng(1).uniform(0.1, 3.0, samples).astype("float32")
    weight[3] = 0.0
    return tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(size)


def sequences(weights=None, samples=22, steps=6):
    """Sequences of words with padding; targets per time step. Lengths differ from row to row."""
    random = np.random.default_rng(2)
    words = random.integers(1, 9, (samples, steps))
    lengths = random.integers(1, steps + 1, samples)
    words[np.arange(steps) >= lengths[:, None]] = 0
    targets = random.normal(size=(samples, steps, 2)).astype("float32")
    columns = [words.astype("int32"), targets]
    if weights == "per sample":
        columns.append(random.uniform(0.1, 3.0, (samples, 1)).astype("float32"))
    if weights == "per time step":
        columns.append(random.uniform(0.1, 3.0, (samples, steps)).astype("float32"))
    return tf.data.Dataset.from_tensor_slices(tuple(columns)).batch(8)


def masked_model(reduction, mask_zero=True, metric=True):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(9, 3, mask_zero=mask_zero),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    metrics = {"metrics": ["mae"], "weighted_metrics": ["mse"]} if metric else {}
    model.compile(sgd(), loss, **metrics)
    return model


@pytest.mark.full
@whole_and_in_parts
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction(reduction, replicas):
    build = functools.partial(
        dense_model, keras.losses.MeanSquaredError(reduction=reduction), sgd, metrics=["mae"]
    )
    assert_equivalent(Trial(build), strategy=replicas())


@pytest.mark.quick("None-whole")
@whole_and_in_parts
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_with_sample_weights(reduction, replicas):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    build = functools.partial(dense_model, loss, sgd, weighted_metrics=["mae"])
    assert_equivalent(Trial(build, weighted_batches), strategy=replicas())


@pytest.mark.quick("per time step-mean_with_sample_weight-whole")
@whole_and_in_parts
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", [None, "per sample", "per time step"])
def test_every_reduction_with_masks(reduction, weights, replicas):
    build = functools.partial(masked_model, reduction)
    assert_equivalent(Trial(build, functools.partial(sequences, weights)), strategy=replicas())


@pytest.mark.full
@pytest.mark.parametrize("weights", ["per sample", "per time step"])
def test_per_time_step_losses_without_masks(weights):
    build = functools.partial(masked_model, "mean_with_sample_weight", mask_zero=False)
    assert_equivalent(Trial(build, functools.partial(sequences, weights)))


def classes(samples=22):
    random = np.random.default_rng(3)
    x = random.normal(size=(samples, 5)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, random.integers(0, 3, samples))).batch(8)


def classifier(loss="sparse_categorical_crossentropy", **options):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])
    options.setdefault("metrics", ["accuracy"])
    model.compile(sgd(), loss, **options)
    return model


DISTRIBUTE = {
    "plain": lambda strategy, data: data,
    "distributed": lambda strategy, data: strategy.distribute(data),
}


@pytest.mark.quick("sum_over_batch_size-plain-whole")
@whole_and_in_parts
@pytest.mark.parametrize("distribute", DISTRIBUTE)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_class_weight(reduction, distribute, replicas):
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    build = functools.partial(classifier, loss, weighted_metrics=["accuracy"])
    # Keras maps the dataset that it is given
    plain = Trial(
        build,
        classes,
        options={"class_weight": {0: 5.0, 1: 0.5, 2: 1.0}},
        distribute=DISTRIBUTE[distribute],
    )
    assert_equivalent(plain, strategy=replicas())


@pytest.mark.skipif(
    not hasattr(keras.losses, "SparseCategoricalFocalCrossentropy"), reason="needs Keras 3.16"
)
def test_loss_that_reduces_on_its_own():
    loss = keras.losses.SparseCategoricalFocalCrossentropy(reduction="sum")
    assert_equivalent(Trial(functools.partial(classifier, loss), classes))


@pytest.mark.quick("sum-whole")
@whole_and_in_parts
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_regularization_losses(reduction, replicas):
    def layers():
        return [
            keras.layers.Dense(
                4,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(0.3),
                bias_regularizer=keras.regularizers.L1(0.1),
            )
        ]

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    trial = Trial(functools.partial(dense_model, loss, sgd, layers))
    assert_equivalent(trial, strategy=replicas())


class MeanPenalty(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.5 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class ConstantPenalty(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.sum(keras.ops.square(self.scale)))
        return inputs * self.scale


class PenaltyOfSamples(keras.layers.Layer):
    """One value a sample, as CTC layers add it."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(inputs), axis=1))
        return inputs


class PenaltyOfValues(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.square(inputs))
        return inputs


class PenaltyOfWeights(ConstantPenalty):
    """As many values as weights, whatever the batch."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.square(self.scale))
        return inputs * self.scale


@pytest.mark.quick("PenaltyOfSamples-whole")
@whole_and_in_parts
@pytest.mark.parametrize(
    "penalty",
    [MeanPenalty, ConstantPenalty, PenaltyOfSamples, PenaltyOfValues, PenaltyOfWeights],
)
def test_add_loss(penalty, replicas):
    layers = [lambda: keras.layers.Dense(4), penalty]
    build = functools.partial(dense_model, "mse", sgd, lambda: [make() for make in layers])
    assert_equivalent(Trial(build), strategy=replicas())


@pytest.mark.full
def test_add_loss_without_another_loss():
    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), MeanPenalty()])
        model.compile(sgd())
        return model

    assert_equivalent(Trial(build))


@pytest.mark.full
def test_every_kind_of_share_with_inference():
    build = functools.partial(dense_model, metrics=["mae"])
    trial = Trial(build, evaluate=True, predict=True, infer_always=not IS_QUICK)
    assert_equivalent(trial, ALL_SHARES)


def test_fewer_samples_than_replicas():
    assert_equivalent(Trial(dense_model, functools.partial(batches, 5, size=2)), ALL_SHARES)
