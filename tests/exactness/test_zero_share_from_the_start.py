"""A replica without samples in the first batch, when Keras builds what it has not built yet."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ONLY_WHOLE_BATCHES,
    Trial,
    arrays,
    assert_equivalent,
    masked_words,
    three_replicas,
)

layers = keras.layers
SAMPLES = 22


def compiled(model, loss="mse", **options):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss, **options)
    return model


def sliced(*parts, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices(parts).batch(8, drop_remainder)


def rows(*shape):
    return np.random.default_rng(1).normal(size=(SAMPLES, *shape)).astype("float32")


def classes():
    return np.random.default_rng(2).integers(0, 3, SAMPLES)


def dense(units=4, **options):
    return layers.Dense(units, kernel_regularizer="l2", **options)


def built():
    return compiled(keras.Sequential([keras.Input((5,)), dense(), layers.Dense(1)]))


def lazy(**options):
    model = keras.Sequential([dense(activity_regularizer="l2"), layers.Dense(1)])
    return compiled(model, metrics=["mae"], **options)


def normalized():
    normalization = layers.BatchNormalization(synchronized=True, epsilon=0.1)
    return compiled(keras.Sequential([dense(), normalization, layers.Dense(1)]))


def recurrent():
    embedding = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2")
    lstm = layers.Bidirectional(layers.LSTM(3, recurrent_regularizer="l2"))
    return compiled(keras.Sequential([embedding, lstm, layers.Dense(1)]))


def convolutional():
    convolution = layers.Conv2D(4, 3, kernel_regularizer="l2")
    return compiled(
        keras.Sequential([convolution, layers.GlobalAveragePooling2D(), layers.Dense(1)])
    )


def attention():
    inputs = keras.Input((6, 4))
    hidden = layers.MultiHeadAttention(2, 3, kernel_regularizer="l2")(inputs, inputs)
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))))


class Dictionaries(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.value = dense(), layers.Dense(1)
        self.kind = layers.Dense(3, "softmax")

    def call(self, inputs, training=False):
        hidden = self.hidden(inputs["one"]) + self.hidden(inputs["two"])
        return {"value": self.value(hidden), "kind": self.kind(hidden)}


def dictionaries():
    losses = {"value": "mse", "kind": "sparse_categorical_crossentropy"}
    return compiled(Dictionaries(), losses, metrics={"value": ["mae"], "kind": ["accuracy"]})


class Lazily(keras.metrics.Metric):
    """Makes its variables when it sees the first outputs."""

    total = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.total is None:
            self.total = self.add_weight((y_pred.shape[-1],), "zeros", name="total")
        self.total.assign_add(keras.ops.sum(y_pred, axis=0))

    def result(self):
        return 0.0 if self.total is None else self.total[0] - self.total[-1]


def lazy_metrics():
    area = keras.metrics.AUC(multi_label=True, name="area")
    metrics = ["accuracy", keras.metrics.F1Score(), area, Lazily(name="lazily")]
    model = keras.Sequential([dense(3, activation="softmax")])
    return compiled(model, "categorical_crossentropy", metrics=metrics)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y)) + sum(self.losses)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def own_step():
    return compiled(OwnStep([dense(), layers.Dense(1)]))


MODELS = {
    "built": (built, lambda: sliced(*arrays())),
    "lazy": (lazy, lambda: sliced(*arrays())),
    "eager": (lambda: lazy(run_eagerly=True), lambda: sliced(*arrays())),
    "two_steps": (lambda: lazy(steps_per_execution=2), lambda: sliced(*arrays())),
    "weighted": (lazy, lambda: sliced(*arrays(), np.abs(rows()))),
    "normalized": (normalized, lambda: sliced(*arrays())),
    "recurrent": (recurrent, masked_words),
    "convolutional": (convolutional, lambda: sliced(rows(8, 8, 3), rows(1))),
    "attention": (attention, lambda: sliced(rows(6, 4), rows(1))),
    "dictionaries": (
        dictionaries,
        lambda: sliced(
            {"one": rows(5), "two": -rows(5)},
            {"value": rows(1), "kind": classes()},
            drop_remainder=ONLY_WHOLE_BATCHES,
        ),
    ),
    "lazy_metrics": (
        lazy_metrics,
        lambda: sliced(rows(5), np.eye(3, dtype="float32")[classes()]),
    ),
    "own_step": (own_step, lambda: sliced(*arrays())),
}
FIRST = {
    "fit": lambda model, data: None,
    "evaluate": lambda model, data: model.evaluate(data, verbose=0),
    "predict": lambda model, data: model.predict(data.map(lambda x, *_: (x,)), verbose=0),
    "train_on_batch": lambda model, data: model.train_on_batch(
        *tf.nest.map_structure(np.array, next(iter(data)))
    ),
}


def assert_starts_equally(name, first, shares):
    build, data = MODELS[name]

    def fit(model, callbacks):
        FIRST[first](model, data())
        return model.fit(data(), epochs=1, verbose=0, callbacks=callbacks)

    three_replicas().set_share_weights(shares)
    trial = Trial(build, data, fit=fit, predict=False)
    if name == "own_step":  # its own has no metric of its own, and Keras's the loss of both
        trial.evaluate = False
    assert_equivalent(trial, [shares], rtol=1e-3, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_first_replica_has_no_samples(name):
    assert_starts_equally(name, "fit", (0, 0, 1))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_first(seed):
    random = np.random.default_rng(seed)
    name, first = random.choice(list(MODELS)), list(FIRST)[seed % len(FIRST)]
    with_samples = random.permutation([1, 0, random.integers(2)])
    assert_starts_equally(str(name), first, tuple(int(share) for share in with_samples))


def test_all_replicas_infer_from_the_whole_batch():
    # from one row, `accuracy` of outputs of shape [rows] would be taken for a binary one
    strategy = three_replicas()
    strategy.set_share_weights((1, 0, 7))
    batch = next(iter(strategy.distribute(sliced(rows(5), classes()))))
    spec = strategy.reduce("MEAN", batch, axis=None)
    assert [tuple(leaf.shape) for leaf in spec] == [(8, 5), (8,)]
    assert [leaf.dtype for leaf in spec] == [tf.float32, tf.int64]
