"""Local training of a small network by hand, in float64 numpy, worker by worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_het.planning import apportion

EPSILON = 1e-3  # of Keras's BatchNormalization

Weights = list[np.ndarray]


@dataclasses.dataclass
class Worker:
    """One worker's network: [moving mean and variance,] kernel, bias, kernel, bias."""

    weights: Weights
    velocity: Weights
    moving: Weights
    samples: int = 0

    def step(self, x: np.ndarray, y: np.ndarray, rate: float, momentum: float) -> float:
        """One step of gradient descent with momentum; the loss before it."""
        if len(x) == 0:
            return 0.0
        if self.moving:
            mean, variance = x.mean(0), x.var(0)
            self.moving = [
                0.8 * old + 0.2 * new
                for old, new in zip(self.moving, (mean, variance), strict=True)
            ]
            x = (x - mean) / np.sqrt(variance + EPSILON)
        kernel_1, bias_1, kernel_2, bias_2 = self.weights
        hidden = np.tanh(x @ kernel_1 + bias_1)
        error = hidden @ kernel_2 + bias_2 - y
        output = 2 * error / len(x)
        inner = (output @ kernel_2.T) * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ output, output.sum(0)]
        for index, gradient in enumerate(gradients):
            self.velocity[index] = momentum * self.velocity[index] - rate * gradient
            self.weights[index] = self.weights[index] + self.velocity[index]
        self.samples += len(x)
        return float((error**2).mean())


def outer_step(config: dict[str, Any], workers: Weights, state: dict[str, Any], counts: Any) -> Any:
    """The rule on one fragment: weights of all workers after it; `state` is changed."""
    center = state["center"]
    if config["class_name"] == "sync_easgd":
        alpha = config["config"].get("alpha", 0.9 / len(workers))
        after = [own - alpha * (own - center) for own in workers]
        state["center"] = center + alpha * sum(own - center for own in workers)
        return after
    defaults = {"diloco": 0.7, "streaming_diloco": 0.4}[config["class_name"]]
    rate = config["config"].get("learning_rate", defaults)
    momentum = config["config"].get("momentum", 0.9)
    gradient = sum(n * (center - own) for n, own in zip(counts, workers, strict=True))
    gradient = gradient / sum(counts)
    state["velocity"] = momentum * state.get("velocity", 0.0) + gradient
    state["center"] = center - rate * (gradient + momentum * state["velocity"])
    return [state["center"]] * len(workers)


def merge(config: dict[str, Any], now: Any, sent: Any, combined: Any) -> Any:
    if config["class_name"] == "streaming_diloco":
        mixing = config["config"].get("mixing", 0.5)
        return mixing * now + (1 - mixing) * combined
    return now + (combined - sent)


@dataclasses.dataclass
class Simulation:
    """Workers that train as `options` of `program_local_training.py` say."""

    options: dict[str, Any]
    start: Weights
    x: np.ndarray
    y: np.ndarray
    batch: int
    worker_shares: tuple[int, ...]

    def run(self, epochs: int) -> None:
        rule = self.options["rule"]
        config = rule["config"]
        moving, weights = self.start[:-4], self.start[-4:]
        self.workers = [
            Worker(list(weights), [np.zeros_like(w) for w in weights], list(moving))
            for _ in self.worker_shares
        ]
        count = min(config.get("num_fragments", 4), 4) if "streaming" in rule["class_name"] else 1
        self.groups = [range(p, 4, count) for p in range(count)]
        self.states = [{"center": self._flat(weights, group)} for group in self.groups]
        self.moving_mean = list(moving)
        self.samples = [[0] * len(self.workers) for _ in self.groups]
        in_flight: dict[int, Any] = {}
        self.history: list[tuple[list[Weights], list[Any]]] = []
        self.losses: list[float] = []
        self.epochs: list[tuple[list[Any], Weights]] = []
        period, overlap = config.get("period", 1), config.get("overlap", 0)
        step = 0
        for _ in range(epochs):
            total = 0.0
            for first in range(0, len(self.x), self.batch):
                step += 1
                total += self._local_steps(first)
                for p in [p for p, (due, _) in in_flight.items() if due <= step]:
                    self._merge(p, in_flight.pop(p)[1])
                for p, group in enumerate(self.groups):
                    if (step - p * period // count) % period == 0 and step > 0:
                        sent = self._exchange(p, group)
                        if overlap:
                            in_flight[p] = (step + overlap, sent)
                        else:
                            self._go_on_from(p, sent)
                weights_now = [[*w.moving, *w.weights] for w in self.workers]
                self.history.append((weights_now, [s["center"] for s in self.states]))
            if step % period:
                for p in sorted(in_flight):
                    self._merge(p, in_flight.pop(p)[1])
                for p, group in enumerate(self.groups):
                    if sum(self.samples[p]):
                        self._go_on_from(p, self._exchange(p, group))
            self.losses.append(total / len(self.x))
            self.epochs.append(([s["center"] for s in self.states], list(self.moving_mean)))
        for p in sorted(in_flight):
            self._merge(p, in_flight.pop(p)[1])
        for p, group in enumerate(self.groups):
            if sum(self.samples[p]):
                self._exchange(p, group)
        self.final = [s["center"] for s in self.states]

    def _go_on_from(self, p: int, sent: Any) -> None:
        if self.options["rule"]["class_name"] == "streaming_diloco":
            self._merge(p, sent)
        else:
            self._take(p, sent[1], sent[3])

    def _local_steps(self, first: int) -> float:
        x, y = self.x[first : first + self.batch], self.y[first : first + self.batch]
        total, start = 0.0, 0
        shares = apportion(len(x), self.worker_shares)
        for index, (worker, share) in enumerate(zip(self.workers, shares, strict=True)):
            part = slice(start, start + share)
            rate, momentum = self.options.get("rate", 0.1), self.options.get("momentum", 0.0)
            total += share * worker.step(x[part], y[part], rate, momentum)
            start += share
            for counts in self.samples:
                counts[index] += share
        return total

    def _exchange(self, p: int, group: Any) -> Any:
        counts, self.samples[p] = self.samples[p], [0] * len(self.workers)
        sent = [self._flat(worker.weights, group) for worker in self.workers]
        combined = outer_step(self.options["rule"], sent, self.states[p], counts)
        sent_moving = [list(worker.moving) for worker in self.workers]
        if p == 0 and self.moving_mean:
            self.moving_mean = [
                np.average(values, axis=0, weights=counts)
                for values in zip(*sent_moving, strict=True)
            ]
        return sent, combined, sent_moving, list(self.moving_mean)

    def _merge(self, p: int, exchange: Any) -> None:
        sent, combined, sent_moving, mean = exchange
        rule = self.options["rule"]
        now = [self._flat(worker.weights, self.groups[p]) for worker in self.workers]
        merged = [merge(rule, *values) for values in zip(now, sent, combined, strict=True)]
        self._put(p, merged)
        if p == 0:
            for worker, before in zip(self.workers, sent_moving, strict=True):
                pairs = zip(worker.moving, mean, before, strict=True)
                worker.moving = [own + (new - old) for own, new, old in pairs]

    def _take(self, p: int, combined: Any, mean: Weights) -> None:
        self._put(p, combined)
        if p == 0:
            for worker in self.workers:
                worker.moving = list(mean)

    def _put(self, p: int, vectors: Any) -> None:
        for worker, vector in zip(self.workers, vectors, strict=True):
            place = 0
            for variable in self.groups[p]:
                old = worker.weights[variable]
                part = vector[place : place + old.size]
                worker.weights[variable] = np.asarray(part).reshape(old.shape)
                place += old.size

    @staticmethod
    def _flat(weights: Weights, group: Any) -> np.ndarray:
        return np.concatenate([weights[variable].ravel() for variable in group])
