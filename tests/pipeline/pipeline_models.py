"""Models that a pipeline has to cut, and data for them."""

import keras
import numpy as np
from pipeline_training import ROWS

L = keras.layers
MODELS = {}


def generator():
    return np.random.default_rng(0)


def images():
    random = generator()
    x = random.normal(size=(ROWS, 6, 6, 3))
    return x, random.integers(0, 4, ROWS), random.uniform(0.5, 2, ROWS)


def tokens():
    random = generator()
    x = random.integers(0, 9, (ROWS, 5)).astype("int32")
    return x, random.integers(0, 4, ROWS), random.uniform(0.5, 2, ROWS)


class Penalty(L.Layer):
    """Gives `add_loss` a mean over samples, and one value per sample."""

    def call(self, inputs):
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(inputs)))
        axes = tuple(range(1, len(inputs.shape)))
        self.add_loss(1e-4 * keras.ops.mean(keras.ops.abs(inputs), axis=axes))
        return inputs


def compiled(model, **options):
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(1e-2, 5, 0.9),
        global_clipnorm=0.05,
        weight_decay=1e-3,
        use_ema=True,
    )
    settings = {
        "optimizer": optimizer,
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "weighted_metrics": ["accuracy"],
        "jit_compile": False,
        **options,
    }
    model.compile(**settings)
    return model


def convnet():
    """A skip over all cuts, a nested model, regularizers of both kinds, added losses."""
    inputs = keras.Input([6, 6, 3])
    a = L.Conv2D(4, 3, padding="same", activation="relu", kernel_regularizer="l2")(inputs)
    b = L.Conv2D(4, 3, padding="same", activation="relu")(a)
    inner = keras.Sequential(
        [keras.Input([6, 6, 4]), L.Conv2D(4, 1, activation="tanh"), L.LayerNormalization()]
    )
    penalty = Penalty()
    d = penalty(L.add([a, inner(b)]))
    e = penalty(L.Conv2D(4, 3, padding="same", activity_regularizer="l2")(d))
    pooled = L.GlobalAveragePooling2D()(L.concatenate([e, a, inputs]))
    return compiled(keras.Model(inputs, L.Dense(4, activation="softmax")(pooled)))


def masked():
    """Integers and masks cross cuts; the embedding's gradient is sparse."""
    inputs = keras.Input([5], dtype="int32")
    x = L.Embedding(9, 6, mask_zero=True)(inputs)
    x = L.Dense(6, activation="tanh")(x)
    x = L.LSTM(6, use_cudnn=False)(x)  # tensorflow#60192: masked ones are corrupted on GPUs
    return compiled(keras.Model(inputs, L.Dense(4, activation="softmax")(x)))


def masked_outputs():
    """The divisor of the loss is the number of tokens in the whole batch."""
    inputs = keras.Input([5], dtype="int32")
    x = L.Embedding(9, 6, mask_zero=True)(inputs)
    x = L.LSTM(6, return_sequences=True, use_cudnn=False)(x)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)
    return compiled(
        keras.Model(inputs, L.Dense(4, activation="softmax")(x)), optimizer=optimizer, metrics=[]
    )


def token_labels():
    x = tokens()[0]
    return x, generator().integers(0, 4, (ROWS, 5)), None


def several():
    """Two inputs, three outputs of different depth and loss, one of them without a loss."""
    left, right = keras.Input([4], name="left"), keras.Input([3], name="right")
    early = L.Dense(2, name="early")(left)
    hidden = L.Dense(5, activation="tanh")(L.concatenate([left, right]))
    again = L.Dense(5, activation="tanh", name="twice")
    late = L.Dense(1, name="late")(again(again(hidden)) * 2.0 + hidden)
    outputs = {"early": early, "late": late, "hidden": L.Identity(name="hidden")(hidden)}
    return compiled(
        keras.Model([left, right], outputs),
        loss={"early": "mse", "late": keras.losses.Huber()},
        loss_weights={"early": 0.3, "late": 2.0},
        metrics={"late": ["mae", keras.metrics.RootMeanSquaredError()]},
        weighted_metrics=None,
    )


def several_data():
    random = generator()
    x = {"left": random.normal(size=(ROWS, 4)), "right": random.normal(size=(ROWS, 3))}
    shapes = {"early": (ROWS, 2), "late": (ROWS, 1), "hidden": (ROWS, 5)}
    return x, {name: random.normal(size=shape) for name, shape in shapes.items()}, None


def own_loss():
    """A loss of the user's that compares the samples of a batch with each other."""

    def spread(y, predictions):
        return keras.ops.var(predictions) + keras.ops.mean(
            keras.ops.square(predictions[:, 0] - keras.ops.cast(y, predictions.dtype))
        )

    return compiled(
        keras.Sequential([keras.Input([4]), L.Dense(4, activation="relu"), L.Dense(4), L.Dense(1)]),
        loss=spread,
        metrics=["mae"],
        weighted_metrics=None,
    )


def vectors():
    return generator().normal(size=(ROWS, 4)), generator().normal(size=ROWS), None


MODELS.update(
    convnet=(convnet, images),
    masked=(masked, tokens),
    masked_outputs=(masked_outputs, token_labels),
    several=(several, several_data),
    own_loss=(own_loss, vectors),
)
