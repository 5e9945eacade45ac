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
class Fragment:
    """What is exchanged at once: places of the weights, center, samples, and what travels."""

    places: np.ndarray
    center: Vector
    samples: np.ndarray
    velocity: Any = 0.0
    due: float | None = None
    exchange: Any = None


def outer_step(rule: dict[str, Any], workers: list[Vector], fragment: Fragment) -> list[Vector]:
    """The rule on one fragment: weights of all workers after it; the center is changed."""
    center, config = fragment.center, rule["config"]
    if rule["class_name"] == "sync_easgd":
        alpha = config.get("alpha", 0.9 / len(workers))
        fragment.center = center + alpha * sum(own - center for own in workers)
        return [own - alpha * (own - center) for own in workers]
    default = {"diloco": 0.7, "streaming_diloco": 0.4}[rule["class_name"]]
    rate, momentum = config.get("learning_rate", default), config.get("momentum", 0.9)
    gradient = np.average([center - own for own in workers], axis=0, weights=fragment.samples)
    fragment.velocity = momentum * fragment.velocity + gradient
    fragment.center = center - rate * (gradient + momentum * fragment.velocity)
    return [fragment.center] * len(workers)


def merge(rule: dict[str, Any], now: Vector, sent: Vector, combined: Vector) -> Vector:
    if rule["class_name"] == "streaming_diloco":
        mixing = rule["config"].get("mixing", 0.5)
        return mixing * now + (1 - mixing) * combined
    return now + (combined - sent)


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
        rule = self.options["rule"]
        config = rule["config"]
        moving, weights = flat(self.start[:-4]), flat(self.start[-4:])
        self.workers = [Worker(weights, 0 * weights, moving) for _ in self.worker_shares]
        count = min(config.get("num_fragments", 4), 4) if "streaming" in rule["class_name"] else 1
        places = np.split(np.arange(len(weights)), ENDS[:-1])
        self.fragments = []
        for p in range(count):
            own = np.concatenate(places[p::count])
            self.fragments.append(Fragment(own, weights[own], np.zeros(len(self.workers))))
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
                for p, fragment in enumerate(self.fragments):
                    if (step - p * period // count) % period == 0:
                        self._exchange(fragment, step + overlap)
                self._merge_until(step)  # without an overlap
                weights_now = [variables(w.weights, w.moving) for w in self.workers]
                self.history.append((weights_now, [f.center for f in self.fragments]))
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
        for fragment in self.fragments:
            fragment.samples = fragment.samples + shares
        return total

    def _exchange(self, fragment: Fragment, due: float) -> None:
        sent = [worker.weights[fragment.places] for worker in self.workers]
        moving = [worker.moving for worker in self.workers]
        if fragment is self.fragments[0]:
            self.moving_mean = np.average(moving, axis=0, weights=fragment.samples)
        combined = outer_step(self.options["rule"], sent, fragment)
        fragment.samples = 0 * fragment.samples
        fragment.due, fragment.exchange = due, (sent, combined, moving, self.moving_mean)

    def _merge_until(self, step: float) -> None:
        for fragment in self.fragments:
            if fragment.due is None or fragment.due > step:
                continue
            fragment.due, (*exchanged, mean) = None, fragment.exchange
            for worker, sent, combined, moving in zip(self.workers, *exchanged, strict=True):
                now, worker.weights = worker.weights[fragment.places], worker.weights.copy()
                worker.weights[fragment.places] = merge(self.options["rule"], now, sent, combined)
                if fragment is self.fragments[0]:
                    worker.moving = worker.moving + (mean - moving)

    def _exchange_the_rest(self) -> None:
        self._merge_until(math.inf)
        for fragment in self.fragments:
            if fragment.samples.any():
                self._exchange(fragment, math.inf)
        self._merge_until(math.inf)

    def _center(self) -> list[np.ndarray]:
        center = np.zeros(ENDS[-1])
        for fragment in self.fragments:
            center[fragment.places] = fragment.center
        return variables(center, self.moving_mean)
