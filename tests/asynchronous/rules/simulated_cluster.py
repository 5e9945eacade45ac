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
import tensorflow as tf
from rule_checks import Center, Group

from keras_het.asynchronous.rules import Signal

SEEDS, HIDDEN, BATCH = 3, 32, 32
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
PER_SEED = sum(int(np.prod(shape)) for shape in SHAPES)
STEP_SECONDS = (1.0, 1.0, 2.0, 4.0)  # of each worker, in virtual time
EXCHANGE_SECONDS = 1.5
WORKERS = len(STEP_SECONDS)


def _load():
    digits = sklearn.datasets.load_digits()
    data = sklearn.model_selection.train_test_split(
        (digits.data / 16).astype("float32"), digits.target, test_size=360, random_state=0
    )
    return [np.asarray(part) for part in data]


TRAIN_X, TEST_X, TRAIN_Y, TEST_Y = _load()


def initial_weights():
    """Glorot-uniform kernels and zero biases of every seed, one vector."""
    rows = []
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        for shape in SHAPES:
            limit = np.sqrt(6 / sum(shape)) if len(shape) == 2 else 0.0
            rows.append(random.uniform(-limit, limit, shape).ravel())
    return np.concatenate(rows).astype("float32")


def positions(variable):
    """Where a variable lies in the vector, in all seeds."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    first = sum(sizes[:variable])
    own = np.arange(first, first + sizes[variable])
    return np.concatenate([own + seed * PER_SEED for seed in range(SEEDS)])


def _logits(vector, x):
    rows = tf.split(tf.reshape(vector, [SEEDS, PER_SEED]), [np.prod(s) for s in SHAPES], axis=1)
    kernel_1, bias_1, kernel_2, bias_2 = (
        tf.reshape(row, [SEEDS, *(shape if len(shape) == 2 else (1, *shape))])
        for row, shape in zip(rows, SHAPES, strict=True)
    )
    return tf.matmul(tf.nn.relu(tf.matmul(x, kernel_1) + bias_1), kernel_2) + bias_2


@tf.function
def _gradient(vector, places):
    x, y = tf.gather(tf.constant(TRAIN_X), places), tf.gather(tf.constant(TRAIN_Y), places)
    with tf.GradientTape() as tape:
        tape.watch(vector)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, _logits(vector, x))
        loss = tf.reduce_sum(tf.reduce_mean(losses, axis=1))  # each seed has its own mean
    return tape.gradient(loss, vector), loss / SEEDS


@tf.function
def _step(vector, velocity, places, rate, momentum):
    gradient, loss = _gradient(vector, places)
    velocity = momentum * velocity - rate * gradient
    return vector + velocity, velocity, loss


def accuracy(vector):
    x = tf.constant(np.broadcast_to(TEST_X, (SEEDS, *TEST_X.shape)))
    predicted = tf.argmax(_logits(tf.constant(vector, tf.float32), x), axis=-1).numpy()
    return float((predicted == TEST_Y).mean())


class Batches:
    """The next batch of the epoch, whoever asks; every seed has its own order."""

    def __init__(self):
        self._orders = [np.random.default_rng(100 + seed) for seed in range(SEEDS)]
        self._left = np.empty((SEEDS, 0), int)

    def next(self):
        if self._left.shape[1] < BATCH:
            fresh = [random.permutation(len(TRAIN_X)) for random in self._orders]
            self._left = np.concatenate([self._left, fresh], axis=1)
        places, self._left = self._left[:, :BATCH], self._left[:, BATCH:]
        return tf.constant(places)


def train_one_device(steps, rate, momentum=0.0):
    batches, vector = Batches(), tf.constant(initial_weights())
    velocity, rate, momentum = (
        tf.zeros_like(vector),
        tf.constant(float(rate)),
        tf.constant(float(momentum)),
    )
    for _ in range(steps):
        vector, velocity, _ = _step(vector, velocity, batches.next(), rate, momentum)
    return accuracy(vector)


@dataclasses.dataclass
class Worker:
    weights: np.ndarray
    seen: np.ndarray
    velocity: np.ndarray
    version: int = 0
    steps: int = 0
    message: np.ndarray | None = None
    sent: np.ndarray | None = None
    residual: object = np.float32(0)
    losses: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Simulation:
    """An asynchronous rule and its workers.

    Args:
        rule: the rule.
        steps: local steps of all workers together.
        rate: of the workers' gradient descent; not used where gradients are sent.
        momentum: of the workers.
        periods: steps between two exchanges of every worker.
        compress: what a message becomes, and what is left of it; None for no compression.
    """

    rule: object
    steps: int
    rate: float = 0.1
    momentum: float = 0.0
    periods: tuple = (4, 4, 2, 1)
    compress: object = None
    largest_staleness: int = 0
    waits: int = 0
    stage: int = 0

    def run(self):
        start = initial_weights()
        half = len(start) // 2
        self.center = Center(self.rule, start, (half, len(start) - half))
        self.workers = [Worker(start, start, np.zeros_like(start)) for _ in STEP_SECONDS]
        self.batches, self.ties = Batches(), itertools.count()
        self.events: list = []
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

    def _period(self, i):
        return self.rule.local_steps(i, self.stage) or self.periods[i]

    def _step(self, time, i):
        worker, batch = self.workers[i], self.batches.next()
        worker.steps += 1
        if self.rule.uses_gradients:
            gradient, _ = _gradient(worker.seen, batch)
            worker.weights = worker.weights - gradient.numpy() / np.float32(self._period(i))
        else:
            settings = np.float32(self.rate), np.float32(self.momentum)
            results = _step(worker.weights, worker.velocity, batch, *settings)
            worker.weights, worker.velocity, loss = (own.numpy() for own in results)
            self._see_loss(i, loss)
        if worker.steps >= self._period(i) and worker.message is None:
            self._send(time, i)
            if self.rule.uses_gradients:
                return  # the next step needs the answer
        self._at(time + STEP_SECONDS[i], self._step, i)

    def _see_loss(self, i, loss):
        worker = self.workers[i]
        worker.losses = [*worker.losses[-9:], float(loss)]
        if not self.stage and self.rule.is_stage_over(np.mean(worker.losses)):
            self.stage = self.center.signal(i, Signal.LOSS_REACHED)

    def _send(self, time, i):
        worker = self.workers[i]
        worker.message = self.rule.message(worker.weights, worker.seen)
        if self.compress is not None:
            worker.message, worker.residual = self.compress(i, worker.message + worker.residual)
        worker.weights = worker.sent = self.rule.after_sending(worker.weights, worker.seen)
        worker.steps = 0
        self._push(time, i)

    def _push(self, time, i):
        worker = self.workers[i]
        samples = BATCH * self._period(i)
        answer = self.center.push(i, samples, worker.version, worker.message)
        if answer is None:
            self.waits += 1
            self._at(time + 0.5, self._push, i)
            return
        self.largest_staleness = max(
            self.largest_staleness, self.center.version - 1 - worker.version
        )
        self._at(time + EXCHANGE_SECONDS, self._receive, i, answer, self.center.version)

    def _receive(self, time, i, answer, version):
        worker = self.workers[i]
        worker.weights = self.rule.receive(worker.weights, worker.sent, answer)
        worker.seen, worker.version, worker.message = answer, version, None
        if self.rule.uses_gradients:
            self._at(time + STEP_SECONDS[i], self._step, i)


def train_synchronously(rule, steps, rate=0.1, momentum=0.0):
    """Accuracy of the center of a synchronous rule; slow workers take fewer steps per period."""
    vector = tf.constant(initial_weights())
    batches, weights = Batches(), [vector] * WORKERS
    velocities = [tf.zeros_like(vector)] * WORKERS
    fragments = rule.fragments([int(np.prod(shape)) for shape in SHAPES])
    places = [np.concatenate([positions(v) for v in fragment]) for fragment in fragments]
    groups = [Group(rule, [tf.gather(vector, own)] * WORKERS) for own in places]
    samples = np.zeros((len(fragments), WORKERS), np.float32)
    in_flight: dict = {}
    done = time = 0
    rate, momentum = tf.constant(float(rate)), tf.constant(float(momentum))
    while done < steps:
        time += 1
        for i, seconds in enumerate(STEP_SECONDS):
            if time % int(seconds) == 0:
                weights[i], velocities[i], _ = _step(
                    weights[i], velocities[i], batches.next(), rate, momentum
                )
                samples[:, i] += BATCH
                done += 1
        for p, group in enumerate(groups):
            if rule.is_due(time, p, len(groups)):
                sent = group.weights = [tf.gather(x, places[p]) for x in weights]
                group.exchange(samples[p].copy())
                samples[p] = 0
                in_flight[p] = (time + rule.overlap, sent)
            if p in in_flight and in_flight[p][0] == time:
                _, sent = in_flight.pop(p)
                for i, combined in enumerate(group.weights):
                    now = tf.gather(weights[i], places[p])
                    received = rule.receive(now, sent[i], combined)
                    weights[i] = tf.tensor_scatter_nd_update(
                        weights[i], places[p][:, None], received
                    )
    center = np.empty(len(vector), "float32")
    for own, group in zip(places, groups, strict=True):
        group.assert_states_are_identical()
        center[own] = group.states[0]["center"]
    return accuracy(center)
