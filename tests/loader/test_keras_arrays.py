"""Arrays get an order that other processes can draw again, with all that Keras knew of them."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import adapted

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.order.pipeline_form import (
    recognise,
    with_order_of_epoch,
    with_repeatable_order,
)

SAMPLES, BATCH = 23, 5
X, Y = np.arange(46, dtype="float32").reshape(SAMPLES, 2), np.arange(SAMPLES)


def labels(dataset):
    return [batch[1].numpy().tolist() for batch in dataset]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("samples", [20, 23, 3])
def test_batches_equal_keras(shuffle, samples):
    given = adapted(X[:samples], Y[:samples], batch_size=BATCH, shuffle=shuffle)
    made = with_repeatable_order(given)
    batches = list(made)
    assert [len(y) for _, y in batches] == [len(y) for _, y in given]
    assert int(made.cardinality()) == len(batches)
    for x, y in batches:
        np.testing.assert_array_equal(x, X[np.array(y)])
    assert sorted(itertools.chain(*labels(made))) == list(range(samples))
    assert recognise(made).mode == "element"


def test_orders_differ_between_epochs_and_agree_between_processes():
    def build(seed):
        keras.utils.set_random_seed(seed)
        keras.random.normal([3])  # what one process has drawn and another has not
        return with_repeatable_order(adapted(X, Y, batch_size=BATCH, shuffle=True))

    first, second, other = build(1), build(1), build(2)
    orders = [labels(first) for _ in range(3)]
    assert orders == [labels(second) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert labels(other) != orders[0]


@pytest.mark.parametrize(
    "options",
    [
        {"x": {"a": X, "b": X[:, :1]}, "y": Y, "sample_weight": np.ones(SAMPLES)},
        {"x": [X, X[:, :1]], "y": {"c": Y}},
        {"x": X, "y": Y, "class_weight": dict.fromkeys(range(SAMPLES), 2.0)},
        {"x": X},
    ],
)
def test_elements_keep_their_structure(options):
    given = adapted(**options, batch_size=BATCH)
    made = with_repeatable_order(given)
    assert made is not given
    for got, want in zip(made, given, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, got, want)


@pytest.mark.quick("dense")
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_orders_differ_between_epochs_also_under_a_seed(kind):
    def build(seed):
        keras.utils.set_random_seed(1)
        x = X if kind == "dense" else tf.sparse.from_dense(X)
        given = adapted(x, Y, batch_size=BATCH, shuffle=True)
        assert labels(given) == labels(given)  # Keras's own
        return with_order_of_epoch(given, seed)

    first, second, of_next_fit = build(0), build(0), build(1)
    orders = [labels(first) for _ in range(3)]
    assert orders == [labels(second) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert labels(of_next_fit) not in orders
    for order in orders:
        assert sorted(itertools.chain(*order)) == list(range(SAMPLES))
    for x, y in first:
        dense = x if kind == "dense" else tf.sparse.to_dense(x)
        np.testing.assert_array_equal(dense, X[np.array(y)])
    assert recognise(first).mode == ("element" if kind == "dense" else "slice")


def test_anything_else_stays_as_it_is():
    for given in (
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).prefetch(2),
        adapted(tf.sparse.from_dense(X), Y, batch_size=BATCH),
        tf.data.Dataset.range(5).map(lambda i: i + 1),
    ):
        assert with_repeatable_order(given) is given
    for given in (
        adapted(X, Y, batch_size=BATCH, shuffle=False),
        adapted(X, Y, batch_size=BATCH, shuffle="batch"),
        tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(5).batch(BATCH),
    ):
        assert with_order_of_epoch(given, 0) is given


def test_a_shuffle_that_is_not_known_is_not_taken_for_none(monkeypatch):
    given = adapted(X, Y, batch_size=BATCH, shuffle=True)
    known = adapter._closed_over
    monkeypatch.setattr(
        adapter,
        "_closed_over",
        lambda function, name: None if name == "shuffle" else known(function, name),
    )
    assert with_repeatable_order(given) is given
    assert recognise(given).gathers_indices  # of which async workers are refused
