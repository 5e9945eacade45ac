"""A task with noisy gradients: labels are drawn from a teacher that is seldom certain.

About half of the labels are not the teacher's best guess, so the gradient of one sample says little
and many samples are needed, in few or in many steps. Accuracy is agreement with the best guess on
inputs not used for training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_het.planning.noise_scale import SmoothedNoiseScale, noise_scale_estimate

NUM_INPUTS, HIDDEN, NUM_CLASSES = 64, 1024, 10
TEMPERATURE = 0.5
NUM_TEST = 2000
TARGET = 0.8


class NoisyTask:
    """Inputs and drawn labels; the same for every seed of the training.

    Args:
        num_samples: samples to train with.
    """

    def __init__(self, num_samples: int) -> None:
        random = np.random.default_rng(0)
        teacher = random.standard_normal((NUM_INPUTS, NUM_CLASSES)) / np.sqrt(NUM_INPUTS)
        inputs = random.standard_normal((num_samples + NUM_TEST, NUM_INPUTS))
        scores = inputs @ teacher
        chances = _softmax(scores / TEMPERATURE)
        drawn = (chances.cumsum(axis=1) < random.random((len(inputs), 1))).sum(axis=1)
        best = scores.argmax(axis=1)
        self.inputs = inputs[:num_samples].astype(np.float32)
        self.labels = drawn[:num_samples].clip(0, NUM_CLASSES - 1).astype(np.int64)
        self._test = inputs[num_samples:].astype(np.float32), best[num_samples:]

    def batches(self, size: int) -> Any:
        """Return shuffled batches, the same on every worker."""
        import tensorflow as tf

        samples = tf.data.Dataset.from_tensor_slices((self.inputs, self.labels))
        return samples.shuffle(len(self.labels), seed=0).batch(size, drop_remainder=True)

    def accuracy(self, weights: list[Any]) -> float:
        """Return the fraction of test inputs for which two dense layers agree with the teacher."""
        inputs, best = self._test
        _, scores = _forward(weights, inputs)
        return float((scores.argmax(axis=1) == best).mean())

    def noise_scale(self, batch: int, steps: int = 100, rate: float = 0.1) -> float:
        """Return the gradient noise scale in samples, after some SGD steps on one device.

        Args:
            batch: samples of a step, a divisor of all.
            steps: number of steps.
            rate: learning rate.
        """
        random = np.random.default_rng(1)
        weights = _first_weights(random)
        for _ in range(steps):
            chosen = random.integers(0, len(self.labels), batch)
            gradient = _gradient(weights, self.inputs[chosen], self.labels[chosen])
            weights = [w - rate * g for w, g in zip(weights, gradient, strict=True)]
        parts = np.split(np.arange(len(self.labels)), len(self.labels) // batch)
        gradients = [_gradient(weights, self.inputs[p], self.labels[p]) for p in parts]
        mean = [np.mean(part, axis=0) for part in zip(*gradients, strict=True)]
        squares = [_square(gradient) for gradient in gradients]
        return noise_scale_estimate([batch] * len(parts), squares, _square(mean)).noise_scale

    def noise_scale_of_workers(
        self, shares: list[int], first: int, steps: int, sgd: tuple[float, float], seed: int
    ) -> float:
        """Return the gradient noise scale in samples, as workers with equal weights see it.

        Args:
            shares: samples of every worker in a step.
            first: steps before those that count.
            steps: number of steps that count.
            sgd: learning rate and momentum.
            seed: seed of the initial weights and of the order of the samples.
        """
        random, ends = np.random.default_rng(seed), np.cumsum(shares)
        weights, average = _first_weights(random), SmoothedNoiseScale()
        moved = [np.zeros_like(w) for w in weights]
        order = random.permutation(len(self.labels))
        for step in range(first + steps):
            parts = np.split(order[step * ends[-1] : (step + 1) * ends[-1]], ends[:-1])
            own = [_gradient(weights, self.inputs[p], self.labels[p]) for p in parts]
            mean = [np.average(g, axis=0, weights=shares) for g in zip(*own, strict=True)]
            if step >= first:
                squares = [_square(gradient) for gradient in own]
                average.add(noise_scale_estimate(shares, squares, _square(mean)))
            moved = [sgd[1] * m - sgd[0] * g for m, g in zip(moved, mean, strict=True)]
            weights = [w + m for w, m in zip(weights, moved, strict=True)]
        return np.inf if average.value is None else average.value.noise_scale


def _first_weights(random: np.random.Generator) -> list[Any]:
    shapes = [(NUM_INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, NUM_CLASSES), (NUM_CLASSES,)]
    limits = [np.sqrt(6 / sum(shape)) if len(shape) > 1 else 0.0 for shape in shapes]
    return [random.uniform(-x, x, s) for x, s in zip(limits, shapes, strict=True)]


def _forward(weights: list[Any], inputs: Any) -> tuple[Any, Any]:
    hidden = np.maximum(inputs @ weights[0] + weights[1], 0)
    return hidden, hidden @ weights[2] + weights[3]


def _gradient(weights: list[Any], inputs: Any, labels: Any) -> list[Any]:
    hidden, scores = _forward(weights, inputs)
    errors = _softmax(scores)
    errors[np.arange(len(labels)), labels] -= 1
    errors /= len(labels)
    back = (errors @ weights[2].T) * (hidden > 0)
    return [inputs.T @ back, back.sum(axis=0), hidden.T @ errors, errors.sum(axis=0)]


def _square(gradient: list[Any]) -> float:
    return float(sum((part**2).sum() for part in gradient))


def _softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
