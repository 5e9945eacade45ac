"""Optimizers: clipping, decay, averages, accumulation, loss scales, schedules, constraints."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    Trial,
    arrays,
    assert_equivalent,
    dense_model,
    whole_and_in_parts,
)

O = keras.optimizers  # noqa: E741 - short for the table below

OPTIMIZERS = {
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adafactor": lambda: O.Adafactor(0.1),
    "Adagrad": lambda: O.Adagrad(0.1),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.1, amsgrad=True),
    "Ftrl": lambda: O.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda: O.Lion(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "RMSprop": lambda: O.RMSprop(0.01, centered=True, momentum=0.5),
}
SETTINGS = {
    "clipnorm": lambda: O.SGD(0.1, clipnorm=0.05),
    "clipvalue": lambda: O.SGD(0.1, clipvalue=0.03),
    "global_clipnorm": lambda: O.SGD(0.1, global_clipnorm=0.1),
    "weight_decay": lambda: O.SGD(0.1, weight_decay=0.2),
    "use_ema": lambda: O.Adam(0.05, use_ema=True, ema_momentum=0.8),
    "ema_overwrite_frequency": lambda: O.Adam(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    ),
    "gradient_accumulation_steps": lambda: O.Adam(
        0.05, gradient_accumulation_steps=2, global_clipnorm=0.5
    ),
    "LossScaleOptimizer": lambda: O.LossScaleOptimizer(
        O.Adam(0.05, global_clipnorm=0.5), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
    "LossScaleOptimizer with accumulation": lambda: O.LossScaleOptimizer(
        O.SGD(0.05, gradient_accumulation_steps=2, clipnorm=0.5), initial_scale=2.0**10
    ),
    "schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


class Wrapper(O.Optimizer):
    """Hands all updates over to another optimizer."""

    def __init__(self, inner=None):
        super().__init__(0.0)
        self.inner = inner or O.SGD(0.05)

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    @property
    def variables(self):
        return [*super().variables, *self.inner.variables]

    def apply(self, grads, targets=None):
        self.inner.apply(grads, targets)


class ScalingWrapper(Wrapper):
    def scale_loss(self, loss):
        return self.inner.scale_loss(super().scale_loss(loss))


class OldStyleWrapper(Wrapper):
    """As optimizers of Keras 2 did, it overrides apply_gradients."""

    apply = O.Optimizer.apply

    def apply_gradients(self, grads_and_vars, name=None):
        return self.inner.apply_gradients(grads_and_vars)


class TwoGroups(O.SGD):
    """Two updates a step."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads[:2], trainable_variables[:2])
        super().apply(grads[2:], trainable_variables[2:])


class SlowWeights(O.SGD):
    """Looks at the gradient before the update, and at weights and iterations after it."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / (1 + tf.norm(g)) for g in grads], trainable_variables)
        rate = 1 / tf.cast(self.iterations + 2, tf.float32)
        for variable in trainable_variables:
            variable.assign(variable - rate * tf.tanh(variable))


OWN_OPTIMIZERS = {
    "Wrapper": Wrapper,
    "Wrapper of a LossScaleOptimizer": lambda: Wrapper(
        O.LossScaleOptimizer(O.SGD(0.05), initial_scale=1.0)
    ),
    "ScalingWrapper": ScalingWrapper,
    "OldStyleWrapper": OldStyleWrapper,
    "TwoGroups": lambda: TwoGroups(0.05),
    "SlowWeights": lambda: SlowWeights(0.05),
    "SlowWeights in a LossScaleOptimizer": lambda: O.LossScaleOptimizer(
        SlowWeights(0.05), initial_scale=2.0**10
    ),
}


@pytest.mark.quick("ScalingWrapper")
@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_optimizer_of_ones_own(name):
    build = functools.partial(dense_model, "mse", OWN_OPTIMIZERS[name])
    assert_equivalent(Trial(build, evaluate=False, predict=False))


@pytest.mark.full
@pytest.mark.skipif(not hasattr(O, "MultiOptimizer"), reason="Keras has none yet")
def test_optimizers_for_parts_of_the_model():
    def optimizer():
        first, second = O.SGD(0.05), O.Adam(0.05)
        return O.MultiOptimizer(lambda variable: first if variable.shape[0] == 5 else second)

    build = functools.partial(dense_model, "mse", optimizer)
    assert_equivalent(Trial(build, evaluate=False, predict=False), ALL_SHARES)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    build = functools.partial(dense_model, "mse", OPTIMIZERS[name])
    assert_equivalent(Trial(build, evaluate=False, predict=False))


@pytest.mark.full
@whole_and_in_parts
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name, replicas):
    build = functools.partial(dense_model, "mse", SETTINGS[name])
    trial = Trial(build, evaluate=False, predict=False)
    assert_equivalent(trial, ALL_SHARES, strategy=replicas())


def test_loss_scale_goes_down_when_one_replica_overflows():
    # Only the last sample overflows; one device would leave out the whole step too.
    def data():
        x, y = arrays(8)
        x[7] = 1e18
        return (
            tf.data.Dataset.from_tensor_slices((x, y))
            .concatenate(tf.data.Dataset.from_tensor_slices(arrays(8, seed=1)))
            .batch(8)
        )

    def build():
        def optimizer():
            return O.LossScaleOptimizer(O.SGD(0.1), initial_scale=2.0**15)

        return dense_model("mse", optimizer, lambda: [keras.layers.Dense(4)])

    def fit(model, callbacks):
        return model.fit(data_of(model), epochs=1, verbose=0, callbacks=callbacks)

    def data_of(model):
        return data()

    outcome = assert_equivalent(Trial(build, data, fit, evaluate=False, predict=False))
    scales = [float(value) for value in outcome.optimizer if value.dtype == "float32"]
    assert 2.0**14 in scales, "no overflow happened"


@pytest.mark.full
def test_maxnorm_constraint():
    def layers():
        return [
            keras.layers.Dense(
                4,
                kernel_constraint=keras.constraints.MaxNorm(0.5),
                bias_constraint=keras.constraints.NonNeg(),
            )
        ]

    build = functools.partial(dense_model, "mse", None, layers)
    assert_equivalent(Trial(build, evaluate=False, predict=False))


@pytest.mark.full
def test_frozen_layers():
    def layers():
        frozen = keras.layers.Dense(4, activation="tanh")
        frozen.trainable = False
        return [frozen, keras.layers.Dense(3)]

    assert_equivalent(Trial(functools.partial(dense_model, "mse", None, layers)))


@pytest.mark.quick("clip1-whole")
@whole_and_in_parts
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.1}])
def test_embeddings(clip, replicas):
    # the gradient of an embedding is tf.IndexedSlices
    def build():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(7, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(O.Adam(0.05, **clip), "mse")
        return model

    def data():
        x, y = arrays(features=3)
        return tf.data.Dataset.from_tensor_slices(((x * 10).astype("int32") % 7, y)).batch(8)

    trial = Trial(build, data, evaluate=False, predict=False)
    assert_equivalent(trial, strategy=replicas())


@pytest.mark.full
@whole_and_in_parts
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy, replicas):
    # Half precision keeps 11 bits (bfloat16: 8), and each replica rounds its own share's sums: one
    # rounding is 5e-4 (4e-3) of the value, and six steps add some of them.
    rtol, atol = {"mixed_float16": (2e-2, 4e-3), "mixed_bfloat16": (1e-1, 3e-2)}[policy]

    def build():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            # At Keras's first loss scale, 2 ** 15, this model is at the edge of float16's range,
            # where the order of a sum decides whether a step is skipped.
            return dense_model("mse", lambda: O.LossScaleOptimizer(O.SGD(0.1), initial_scale=256))
        finally:
            keras.config.set_dtype_policy(before)

    assert_equivalent(Trial(build), ALL_SHARES, rtol, atol, replicas())


def test_double_precision():
    def build():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            return dense_model()
        finally:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy("float32")

    def data():
        x, y = arrays()
        arrays_of_doubles = (x.astype("float64"), y.astype("float64"))
        return tf.data.Dataset.from_tensor_slices(arrays_of_doubles).batch(8)

    def fit(model, callbacks):
        model.fit(data(), epochs=2, verbose=0)
        # metrics and their logs are of single precision
        callbacks[0].logs = [{"batch": 0, "step": np.array(model.optimizer.iterations)}]

    # a weight w_i of single precision would show at 1e-8
    trial = Trial(build, data, fit=fit, evaluate=False, predict=False)
    assert_equivalent(trial, rtol=1e-12, atol=1e-13)
