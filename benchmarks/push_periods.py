"""Simulated time to a target accuracy for periods that hide an exchange, or only half of it.

    python benchmarks/push_periods.py [--json FILE] [--quick]

No processes and no measured time: the "slow_link" cluster of benchmarks/hybrid.py in virtual time,
with its task, batches, momentum and learning rate (and half of that), and the rule "delta" scaled
by a worker's part of the global batch. A sync group exchanges in memory after every second step of
53 ms; four async workers take half a batch in 96 ms and exchange over links on which a push and its
answer take a multiple of that. They compute meanwhile; a worker that is ready to push waits for the
answer in flight. Rows: `exchange` in steps of an async worker, and the period as planned when an
exchange is to be hidden whole ("hidden"), by half ("half", as `plan_pushes` does) or, of three
parts, by one ("third"). `num_reached` of the seeds reached 80 %, after `time_to_target` seconds, a
median.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _noisy_task import TARGET, NoisyTask, _first_weights, _gradient

BATCH, MOMENTUM, RATE, SAMPLES = 48, 0.9, 0.01, 14_400
GROUP_SECONDS, ASYNC_SECONDS, BUSY_SECONDS = 0.053, 0.096, 0.008
NUM_ASYNC, GROUP_PERIOD, STEPS_BETWEEN_LOOKS = 4, 2, 4
PARTS = {"hidden": 1.0, "half": 0.5, "third": 1 / 3}
EXCHANGES = (1.02, 1.25, 2.0, 4.0, 6.0, 10.0)


@dataclasses.dataclass
class Task:
    """The sync group, or an async worker."""

    weights: np.ndarray
    seconds: float
    batch: int
    period: int
    steps: int = 0
    samples: list[int] = dataclasses.field(default_factory=list)
    answer_at: float | None = None
    answer: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.seen = self.sent = self.weights
        self.velocity = np.zeros_like(self.weights)

    def train(self, task: NoisyTask, shapes: Sequence[tuple[int, ...]], rate: float) -> None:
        """Take a step of gradient descent with momentum."""
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = [
            part.reshape(shape)
            for part, shape in zip(np.split(self.weights, cuts), shapes, strict=True)
        ]
        chosen, self.samples = self.samples[: self.batch], self.samples[self.batch :]
        gradient = flat(_gradient(parts, task.inputs[chosen], task.labels[chosen]))
        self.velocity = MOMENTUM * self.velocity - rate * gradient
        self.weights = self.weights + self.velocity
        self.steps += 1

    def receive(self) -> None:
        """Continue from the answer with what was trained since the push."""
        self.seen = self.answer
        self.weights = self.answer + (self.weights - self.sent)
        self.answer_at = self.answer = None


def flat(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Return all weights as one float32 vector."""
    return np.concatenate([each.ravel() for each in weights]).astype(np.float32)


def simulate(
    task: NoisyTask, exchange: float, period: int, rate: float, seed: int, num_async: int
) -> tuple[float | None, float]:
    """Return the seconds to the target, None without, and the accuracy after one epoch."""
    random = np.random.default_rng(seed)
    first = _first_weights(random)
    shapes, center = [each.shape for each in first], flat(first)
    order = random.permutation(SAMPLES).tolist()
    tasks = [Task(center, GROUP_SECONDS, BATCH, GROUP_PERIOD)]
    tasks += [Task(center, ASYNC_SECONDS, BATCH // 2, period) for _ in range(num_async)]
    travel = exchange * ASYNC_SECONDS / 2
    events = [(each.seconds, number, "step") for number, each in enumerate(tasks)]
    heapq.heapify(events)
    seen, num_steps = [], 0

    def accuracy(vector: np.ndarray) -> float:
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = zip(np.split(vector, cuts), shapes, strict=True)
        return task.accuracy([part.reshape(shape) for part, shape in parts])

    while order or all(each.samples for each in tasks):
        now, number, event = heapq.heappop(events)
        own = tasks[number]
        if event == "arrives":
            center = center + (own.sent - own.seen) * own.batch / BATCH
            own.answer = center
        elif event == "step":
            if len(own.samples) < own.batch:
                own.samples, order = [*own.samples, *order[:BATCH]], order[BATCH:]
            own.train(task, shapes, rate)
            is_due = own.steps >= own.period
            if number == 0:
                num_steps += 1
                if is_due:
                    center = center + (own.weights - own.seen)
                    own.weights = own.seen = center
                    own.steps, now = 0, now + BUSY_SECONDS
                if num_steps % STEPS_BETWEEN_LOOKS == 0:
                    seen.append((now, center))
            elif is_due:
                heapq.heappush(events, (max(now, own.answer_at or 0.0), number, "push"))
                continue
            elif own.answer_at is not None and own.answer_at <= now:
                own.receive()
            heapq.heappush(events, (now + own.seconds, number, "step"))
        else:
            if own.answer_at is not None:
                own.receive()
            own.sent, own.steps = own.weights, 0
            now += BUSY_SECONDS
            own.answer_at = now + 2 * travel
            heapq.heappush(events, (now + travel, number, "arrives"))
            heapq.heappush(events, (now + own.seconds, number, "step"))
    reached = [when for when, weights in seen if accuracy(weights) >= TARGET]
    return (reached[0] if reached else None), accuracy(center)


def row_of(
    task: NoisyTask, case: str, exchange: float, period: int, rate: float, seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the medians of all seeds."""
    num_async = 0 if case == "alone" else NUM_ASYNC
    found = [simulate(task, exchange, period, rate, seed, num_async) for seed in seeds]
    times = [math.inf if seconds is None else seconds for seconds, _ in found]
    middle = statistics.median(times)
    return {
        "case": case,
        "exchange": exchange,
        "period": period,
        "rate": rate,
        "num_reached": sum(math.isfinite(each) for each in times),
        "time_to_target": round(middle, 2) if math.isfinite(middle) else None,
        "fastest": round(min(times), 2) if math.isfinite(min(times)) else None,
        "lowest_accuracy": round(min(last for _, last in found), 4),
        "highest_accuracy": round(max(last for _, last in found), 4),
        "num_runs": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one exchange, one seed")
    options = parser.parse_args()
    from _report import environment, print_table, write_report

    exchanges, rates, seeds = (EXCHANGES, (RATE, RATE / 2), range(3))
    if options.quick:
        exchanges, rates, seeds = (2.0,), (RATE,), range(1)
    task = NoisyTask(SAMPLES)
    rows = [row_of(task, "alone", 0.0, 1, rate, seeds) for rate in rates]
    for rate in rates:
        for exchange in exchanges:
            periods = {case: math.ceil(exchange * part) for case, part in PARTS.items()}
            rows += [
                row_of(task, case, exchange, period, rate, seeds)
                for case, period in periods.items()
            ]
    print_table(rows)
    write_report("push_periods", rows, options.json, environment())


if __name__ == "__main__":
    main()
