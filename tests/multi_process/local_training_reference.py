"""Local training of a small network by hand, in float64 numpy, worker by worker."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from keras_het.planning import apportion

EPSILON = 1e-3  # of Keras's BatchNormalization
SHAPES = ((5, 4), (4,), (4, 1), (1,))  # kernel, bias, kernel, bias
ENDS = np.cumsum([math.prod(shape) for shape in SHAPES])

Vector = np.ndarray


def flat(arrays: list[np.ndarray]) -> Vector:
    return np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])


def cut(weights: Vector) -> list[np.ndarray]:
    parts = np.split(weights, ENDS[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def variables(weights: Vector, moving: Vector) -> list[np.ndarray]:
    """The model's: moving mean and variance, if there are any, come first."""
    return [*(np.split(moving, 2) if len(moving) else ()), *cut(weights)]


def loss_of(values: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """The loss of a model with these variables, in inference."""
    *moving, kernel_1, bias_1, kernel_2, bias_2 = values
    if moving:
        mean, variance = moving
        x = (x - mean) / np.sqrt(variance + EPSILON)
    hidden = np.tanh(x @ kernel_1 + bias_1)
    return float(((hidden @ kernel_2 + bias_2 - y) ** 2).mean())


@dataclasses.dataclass
class Worker:
    weights: Vector
    velocity: Vector
    moving: Vector

    def step(self, x: np.ndarray, y: np.ndarray, rate: float, momentum: float) -> float:
        """One step of gradient descent with momentum; the loss before it."""
        if len(x) == 0:
            return 0.0
        if len(self.moving):
            mean, variance = x.mean(0), x.var(0)
            self.moving = 0.8 * self.moving + 0.2 * np.append(mean, variance)
            x = (x - mean) / np.sqrt(variance + EPSILON)
        kernel_1, bias_1, kernel_2, bias_2 = cut(self.weights)
        hidden = np.tanh(x @ kernel_1 + bias_1)
        error = hidden @ kernel_2 + bias_2 - y
        output = 2 * error / len(x)
        inner = (output @ kernel_2.T) * (1 - hidden**2)
        gradient = flat([x.T @ inner, inner.sum(0), hidden.T @ output, output.sum(0)])
        self.velocity = momentum * self.velocity - rate * gradient
        self.weights = self.weights + self.velocity
        return float((error**2).mean())


@dataclasses.dataclass
class Simulation:
    """Workers that train as `options` of `program_local_training.py` say."""

    options: dict[str, Any]
    start: list[np.ndarray]
    x: np.ndarray
    y: np.ndarray
    batch: int
    worker_shares: tuple[int, ...]

    def run(self, epochs: int) -> None:
        config = self.options["rule"]["config"]
        moving, weights = flat(self.start[:-4]), flat(self.start[-4:])
        self.workers = [Worker(weights, 0 * weights, moving) for _ in self.worker_shares]
        self.center, self.velocity = weights, 0 * weights
        self.samples = np.zeros(len(self.workers))
        self.due: float = 0.0
        self.in_flight: Any = None
        self.moving_mean = moving
        self.history: list[tuple[list[list[np.ndarray]], list[Vector]]] = []
        self.losses: list[float] = []
        self.epochs: list[list[np.ndarray]] = []
        period, overlap = config.get("period", 1), config.get("overlap", 0)
        step = 0
        for _ in range(epochs):
            total = 0.0
            for first in range(0, len(self.x), self.batch):
                step += 1
                total += self._local_steps(first)
                self._merge_until(step)
                if step % period == 0:
                    self._exchange(step + overlap)
                self._merge_until(step)  # without an overlap
                weights_now = [variables(w.weights, w.moving) for w in self.workers]
                self.history.append((weights_now, [self.center]))
            if step % period:
                self._exchange_the_rest()
            self.losses.append(total / len(self.x))
            self.epochs.append(self._center())
        self._exchange_the_rest()
        self.final = self._center()

    def _local_steps(self, first: int) -> float:
        x, y = self.x[first : first + self.batch], self.y[first : first + self.batch]
        total, start = 0.0, 0
        shares = apportion(len(x), self.worker_shares)
        for worker, share in zip(self.workers, shares, strict=True):
            part = slice(start, start + share)
            rate, momentum = self.options.get("rate", 0.1), self.options.get("momentum", 0.0)
            total += share * worker.step(x[part], y[part], rate, momentum)
            start += share
        self.samples = self.samples + shares
        return total

    def _exchange(self, due: float) -> None:
        sent = [worker.weights for worker in self.workers]
        moving = [worker.moving for worker in self.workers]
        self.moving_mean = np.average(moving, axis=0, weights=self.samples)
        self.due, self.in_flight = due, (sent, self._combined(sent), moving)
        self.samples = 0 * self.samples

    def _combined(self, sent: list[Vector]) -> list[Vector]:
        """The rule: weights of all workers after it; the center is changed."""
        rule, center = self.options["rule"], self.center
        config = rule["config"]
        if rule["class_name"] == "sync_easgd":
            alpha = config.get("alpha", 0.9 / len(sent))
            self.center = center + alpha * sum(own - center for own in sent)
            return [own - alpha * (own - center) for own in sent]
        rate, momentum = config.get("learning_rate", 0.7), config.get("momentum", 0.9)
        gradient = np.average([center - own for own in sent], axis=0, weights=self.samples)
        self.velocity = momentum * self.velocity + gradient
        self.center = center - rate * (gradient + momentum * self.velocity)
        return [self.center] * len(sent)

    def _merge_until(self, step: float) -> None:
        if self.in_flight is None or self.due > step:
            return
        exchanged, self.in_flight = self.in_flight, None
        for worker, sent, combined, moving in zip(self.workers, *exchanged, strict=True):
            worker.weights = worker.weights + (combined - sent)
            worker.moving = worker.moving + (self.moving_mean - moving)

    def _exchange_the_rest(self) -> None:
        self._merge_until(math.inf)
        if self.samples.any():
            self._exchange(math.inf)
        self._merge_until(math.inf)

    def _center(self) -> list[np.ndarray]:
        return variables(self.center, self.moving_mean)
