"""`predict` returns what one device does, or says which output cannot be joined, and why."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import arrays, needs_no_xla, three_replicas

from keras_het.strategy.cluster import agreement

SHARES = ((1, 1, 1), (4, 2, 1), (3, 0, 5))


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch):
    """Workers give each other two seconds to hear of an error in the graph."""
    monkeypatch.setattr(agreement, "_SECONDS_TO_PASS_ON", 0.0)


class Model(keras.Model):
    """Returns a function of a batch and of a weight that has no row for each sample."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.prototypes = self.add_weight(shape=(4, 3), name="prototypes")

    def call(self, x):
        return self.function(x, self.prototypes)


def predicted(function, shares, run_eagerly=False, rows=16):
    strategy = three_replicas()
    strategy.set_share_weights(shares)
    with strategy.scope():
        model = Model(function)
    model.compile(run_eagerly=run_eagerly)
    return model.predict(arrays(rows)[0], batch_size=8, verbose=0)


def similarities(x):
    return tf.matmul(x, x, transpose_b=True)


# What the error says was received: by shapes, or else by the rows of a batch.
REFUSED = {
    "matrix": (lambda x, _: similarities(x), r"output of shape \[2, 2\] for 2 .* \[3, 3\] for 3"),
    "nested": (
        lambda x, _: {"one": x, "two": [{"three": (x, similarities(x))}]},
        r"output\['two'\]\[0\]\['three'\]\[1\] of shape \[2, 2\]",
    ),
    "wider": (lambda x, _: (x, tf.tile(similarities(x), [1, 2])), r"output\[1\] of shape \[2, 4\]"),
    "transposed": (lambda x, _: (x, tf.transpose(x)), r"output\[1\] of shape \[5, 2\]"),
    "prototypes": (lambda x, w: {"rows": x, "all": w}, r"output\['all'\] of shape \[4, 3\] for 2"),
    "scalar": (lambda x, _: {"rows": x, "mean": tf.reduce_mean(x)}, r"output\['mean'\] of shape"),
    "number": (lambda x, _: (x, 0.5), r"output\[1\] of shape \[\]"),
    "tiled": (lambda x, _: tf.tile(x, [2, 1]), r"output (with 16 rows for 8|of shape \[4, 5\])"),
    "some": (lambda x, _: tf.boolean_mask(x, x[:, 0] > 0), r"output with . rows for 8 samples"),
    "ragged": (
        lambda x, _: tf.RaggedTensor.from_tensor(similarities(x)),
        r"output of shape \[2, 2\] for 2",
    ),
    "one ragged row": (
        lambda x, _: tf.RaggedTensor.from_row_lengths(x[:, 0], [tf.shape(x)[0]]),
        r"output of shape \[1, 2\] for 2",
    ),
    "sparse": (lambda x, _: tf.sparse.from_dense(similarities(x)), r"output of shape \[2, 2\]"),
    "unknown": (
        lambda x, _: tf.numpy_function(lambda v: np.tile(v, (2, 1)), [x], tf.float32),
        r"output with 16 rows for 8 samples",
    ),
}


@pytest.mark.quick("shares0-False-nested", "shares2-False-tiled", "shares0-True-matrix")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("shares", SHARES)
def test_an_output_that_cannot_be_joined_is_named(shares, run_eagerly, name):
    function, received = REFUSED[name]
    with pytest.raises(ValueError, match=f"Received: {received}.* Return what belongs") as error:
        predicted(function, shares, run_eagerly)
    assert "\n" not in str(error.value), "TensorFlow's pages surround the sentence"


JOINED = {
    "ragged": lambda x, _: tf.RaggedTensor.from_row_lengths(
        x[:, 0], tf.ones_like(x[:, 0], tf.int64)
    ),
    "sparse": lambda x, _: {"sparse": tf.sparse.from_dense(x)},
    "wide": lambda x, _: (x[:, : tf.cast(tf.reduce_max(x) * 0, tf.int32) + 3], x[:, 0]),
    "unknown rank": lambda x, _: tf.numpy_function(lambda v: 2 * v, [x], tf.float32),
    "text": lambda x, _: tf.strings.as_string(x),
}


def dense(value):
    value = value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
    return np.array(tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value)


@needs_no_xla
@pytest.mark.quick("shares2-False-unknown rank")
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("shares", SHARES)
def test_rows_of_samples_come_in_order(shares, run_eagerly, name):
    outputs = predicted(JOINED[name], shares, run_eagerly, rows=17)
    expected = Model(JOINED[name]).predict(arrays(17)[0], batch_size=8, verbose=0)
    flat = [keras.tree.flatten(each) for each in (outputs, expected)]
    for ours, one_device in zip(*flat, strict=True):
        np.testing.assert_array_equal(dense(ours), dense(one_device))
