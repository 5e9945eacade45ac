"""Random models, optimizers, losses, shares and batches against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Trial, assert_equivalent

SEEDS = range(12)
# A gradient near zero divided by its own root: Adam and its kin turn a rounding error of 1e-7 into
# a larger one of the weight.
RTOL, ATOL = 1e-3, 2e-5
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


class Plan:
    """What one seed draws."""

    def __init__(self, seed):
        self.random = random = np.random.default_rng(1000 + seed)
        self.seed = seed
        self.size = int(random.integers(2, 12))
        self.samples = int(self.size * random.integers(1, 4) + random.integers(0, self.size))
        self.features = int(random.integers(2, 6))
        self.outputs = int(random.integers(1, 4))
        self.widths = [int(width) for width in random.integers(2, 6, random.integers(0, 3))]
        self.activation = str(random.choice(["tanh", "sigmoid", "softplus", "linear"]))
        self.regularized = bool(random.random() < 0.4)
        self.synchronized = bool(random.random() < 0.3)
        self.weighted = bool(random.random() < 0.5)
        self.loss = str(random.choice(["MeanSquaredError", "Huber", "LogCosh"]))
        self.reduction = str(random.choice(REDUCTIONS))
        self.optimizer = str(random.choice(["SGD", "Adam", "RMSprop", "AdamW"]))
        clip = random.choice(["", "clipnorm", "clipvalue", "global_clipnorm"])
        self.options = {str(clip): 0.1} if clip else {}
        if random.random() < 0.3:
            self.options["gradient_accumulation_steps"] = 2
        if random.random() < 0.3:
            self.options |= {"use_ema": True, "ema_momentum": 0.7}
        self.steps_per_execution = int(random.choice([1, 1, 2]))
        self.shares = [self.draw_shares() for _ in range(3)]

    def draw_shares(self):
        """Weights of any size; one or two replicas may have none."""
        weights = self.random.uniform(0, 10, 3) * (self.random.random(3) > 0.25)
        if not weights.any():
            weights[self.random.integers(3)] = 1
        return tuple(float(weight) for weight in weights)

    def data(self):
        random = np.random.default_rng(self.seed)
        columns = [
            random.normal(size=(self.samples, self.features)).astype("float32"),
            random.normal(size=(self.samples, self.outputs)).astype("float32") + 0.5,
        ]
        if self.weighted:
            columns.append(random.uniform(0.2, 2, self.samples).astype("float32"))
        return tf.data.Dataset.from_tensor_slices(tuple(columns)).batch(self.size)

    def build(self):
        model = keras.Sequential([keras.Input((self.features,))])
        regularizer = keras.regularizers.L2(0.05) if self.regularized else None
        # Normalisation takes a bias out again: its gradient is rounding noise, which Adam would
        # divide by itself.
        bias = not (self.synchronized and self.activation == "linear")
        for width in self.widths:
            model.add(
                keras.layers.Dense(
                    width, self.activation, use_bias=bias, kernel_regularizer=regularizer
                )
            )
        if self.synchronized:
            # a large epsilon: with two rows of a batch the variance may be nearly zero
            model.add(keras.layers.BatchNormalization(synchronized=True, epsilon=0.1))
        model.add(keras.layers.Dense(self.outputs))
        model.compile(
            getattr(keras.optimizers, self.optimizer)(0.01, **self.options),
            getattr(keras.losses, self.loss)(reduction=self.reduction),
            metrics=["mae"],
            weighted_metrics=["mse"],
            steps_per_execution=self.steps_per_execution,
        )
        return model


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_random_model(seed):
    plan = Plan(seed)
    trial = Trial(plan.build, plan.data)
    assert_equivalent(trial, plan.shares, rtol=RTOL, atol=ATOL)


def test_the_draws_cover_every_choice():
    plans = [Plan(seed) for seed in SEEDS]
    assert {plan.optimizer for plan in plans} == {"SGD", "Adam", "RMSprop", "AdamW"}
    assert {plan.reduction for plan in plans} == set(REDUCTIONS)
    assert {plan.weighted for plan in plans} == {True, False}
    assert {plan.synchronized for plan in plans} == {True, False}
    assert any(0.0 in shares for plan in plans for shares in plan.shares)
    assert any(plan.samples % plan.size for plan in plans)
