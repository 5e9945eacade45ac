"""Trains a small network on real data with workers of different speed, in virtual time.

No processes and no clock: which worker does what when is a list of events. Three seeds train at
once, as three slices of one vector, since rules work element by element.
"""

import dataclasses
import heapq
import itertools

import numpy as np
import sklearn.datasets
import sklearn.model_selection
from rule_checks import Center, Worker

SEEDS, HIDDEN, BATCH = 3, 32, 32
SHAPES = ((64, HIDDEN), (1, HIDDEN), (HIDDEN, 10), (1, 10))
SIZES = [rows * columns for rows, columns in SHAPES]
STEP_SECONDS = (1.0, 1.0, 2.0, 4.0)  # of each worker, in virtual time
EXCHANGE_SECONDS = 1.5
WORKERS = len(STEP_SECONDS)

DIGITS = sklearn.datasets.load_digits()
TRAIN_X, TEST_X, TRAIN_Y, TEST_Y = sklearn.model_selection.train_test_split(
    (DIGITS.data / 16).astype("float32"), DIGITS.target, test_size=360, random_state=0
)


def initial_weights():
    """Glorot-uniform kernels and zero biases of every seed, one vector."""
    rows = []
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        for shape in SHAPES:
            limit = np.sqrt(6 / sum(shape)) if shape[0] > 1 else 0.0
            rows.append(random.uniform(-limit, limit, shape).ravel())
    return np.concatenate(rows).astype("float32")


def forward(vector, x):
    parts = np.split(vector.reshape(SEEDS, -1), np.cumsum(SIZES)[:-1], axis=1)
    parts = [part.reshape(SEEDS, *shape) for part, shape in zip(parts, SHAPES, strict=True)]
    hidden = np.maximum(x @ parts[0] + parts[1], 0)
    return parts, hidden, hidden @ parts[2] + parts[3]


def gradient(vector, places):
    """Of the mean cross-entropy of each seed."""
    x, labels = TRAIN_X[places], np.eye(10)[TRAIN_Y[places]]
    parts, hidden, logits = forward(vector, x)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    last = (chances - labels) / BATCH
    first = (last @ parts[2].swapaxes(1, 2)) * (hidden > 0)
    found = [x.swapaxes(1, 2) @ first, first.sum(1), hidden.swapaxes(1, 2) @ last, last.sum(1)]
    joined = np.concatenate([part.reshape(SEEDS, -1) for part in found], axis=1)
    return np.float32(joined.ravel())


def accuracy(vector):
    return float((forward(vector, TEST_X)[2].argmax(-1) == TEST_Y).mean())


def batches():
    """The next batch of the epoch, whoever asks; every seed has its own order."""
    orders = [np.random.default_rng(100 + seed) for seed in range(SEEDS)]
    left = np.empty((SEEDS, 0), int)
    while True:
        if left.shape[1] < BATCH:
            epoch = [random.permutation(len(TRAIN_X)) for random in orders]
            left = np.concatenate([left, epoch], axis=1)
        yield left[:, :BATCH]
        left = left[:, BATCH:]


def train_one_device(steps, rate, momentum=0.0):
    vector, velocity = initial_weights(), np.float32(0)
    for places in itertools.islice(batches(), steps):
        velocity = momentum * velocity - rate * gradient(vector, places)
        vector = vector + velocity
    return accuracy(vector)


class SimulatedWorker(Worker):
    velocity = np.float32(0)
    message, version, steps = None, 0, 0


@dataclasses.dataclass
class Simulation:
    """An asynchronous rule, and workers that take so many local steps together.

    `periods` are the steps of every worker between two exchanges. Gradients are sent without a rate
    and a momentum.
    """

    rule: object
    steps: int
    rate: float = 0.1
    momentum: float = 0.0
    periods: tuple = (4, 4, 2, 1)
    largest_staleness: int = 0
    waits: int = 0

    def run(self):
        start = initial_weights()
        half = len(start) // 2
        self.center = Center(self.rule, start, (half, len(start) - half))
        self.workers = [SimulatedWorker(self.rule, start) for _ in STEP_SECONDS]
        self.batches, self.ties, self.events = batches(), itertools.count(), []
        for i, seconds in enumerate(STEP_SECONDS):
            self._at(seconds, self._step, i)
        done = 0
        while done < self.steps:
            time, _, action, arguments = heapq.heappop(self.events)
            done += action == self._step
            action(time, *arguments)
        return accuracy(self.center.values)

    def _at(self, time, action, *arguments):
        heapq.heappush(self.events, (time, next(self.ties), action, arguments))

    def _step(self, time, i):
        worker, sends_gradient = self.workers[i], self.rule.uses_gradients
        worker.steps += 1
        at = worker.seen if sends_gradient else worker.weights
        found = gradient(at, next(self.batches))
        if sends_gradient:
            worker.weights = worker.weights - found / np.float32(self.periods[i])
        else:
            worker.velocity = self.momentum * worker.velocity - self.rate * found
            worker.weights = worker.weights + worker.velocity
        if worker.steps >= self.periods[i] and worker.message is None:
            worker.message, worker.steps = worker.send(), 0
            self._push(time, i)
            if sends_gradient:
                return  # the next step needs the answer
        self._at(time + STEP_SECONDS[i], self._step, i)

    def _push(self, time, i):
        worker, samples = self.workers[i], BATCH * self.periods[i]
        answer = self.center.push(i, samples, worker.version, worker.message)
        if answer is None:
            self.waits += 1
            self._at(time + 0.5, self._push, i)
            return
        staleness = self.center.version - 1 - worker.version
        self.largest_staleness = max(self.largest_staleness, staleness)
        self._at(time + EXCHANGE_SECONDS, self._receive, i, answer, self.center.version)

    def _receive(self, time, i, answer, version):
        worker = self.workers[i]
        worker.answer, worker.version, worker.message = answer, version, None
        worker.receive()
        if self.rule.uses_gradients:
            self._at(time + STEP_SECONDS[i], self._step, i)
