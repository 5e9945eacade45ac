"""Optimizers whose update a pipeline has to make as one device does, and a small model for them."""

import keras
import numpy as np
from pipeline_training import ROWS

L, optimizers = keras.layers, keras.optimizers


def scaled():
    """For float32, a scale that is too large at first: steps are skipped until it is not."""
    inner = optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1, gradient_accumulation_steps=2)
    return optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127, dynamic_growth_steps=3)


def decaying():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "decay": decaying,
    "accumulation": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.05, weight_decay=0.01
    ),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.02),
    "clipvalue": lambda: optimizers.RMSprop(0.01, clipvalue=0.01),
    "constant scale": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0, global_clipnorm=0.05),
    "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "adafactor": lambda: optimizers.Adafactor(0.01),
}
EMBEDDED = ("accumulation", "clipnorm", "adafactor")


def perceptron(optimizer, embeds=False):
    """Frozen layers, layers of equal names in nested models, and a last stage without weights.

    With weight decay also regularizers of weights and of outputs.

    Args:
        optimizer: one of `OPTIMIZERS`, or None for `scaled`.
        embeds: whether the first layer is an embedding.
    """
    inputs = keras.Input([4], dtype="int32" if embeds else None)
    regularized = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    regularized = regularized if optimizer == "decay" else {}
    x = L.Flatten()(L.Embedding(5, 3)(inputs)) if embeds else L.Dense(5)(inputs)
    for _ in range(2):
        layers = [keras.Input([x.shape[-1]]), L.Dense(5, "tanh", name="same", **regularized)]
        inner = keras.Sequential(layers)
        x = inner(x)
    x = L.BatchNormalization(trainable=False)(L.Dense(5, "tanh", trainable=False)(x))
    x = L.Activation("sigmoid")(L.Dense(3, kernel_constraint="unit_norm")(x))
    model = keras.Model(inputs, x)
    made = scaled() if optimizer is None else OPTIMIZERS[optimizer]()
    model.compile(made, "mse", metrics=["mae"], jit_compile=False)
    return model


def normalizing():
    """Moving averages and random generators in several stages."""
    inputs = keras.Input([4])
    x = L.Dropout(0.3)(L.BatchNormalization(momentum=0.8)(L.Dense(5)(inputs)))
    x = L.GaussianNoise(0.1)(L.BatchNormalization(momentum=0.8)(L.Dense(5)(x)))
    model = keras.Model(inputs, L.Dense(3)(L.Dropout(0.3)(x)))
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


def rows(embeds=False):
    random = np.random.default_rng(0)
    x = random.integers(0, 5, (ROWS, 4)) if embeds else random.normal(size=(ROWS, 4))
    return x, 50 * random.normal(size=(ROWS, 3)), None
