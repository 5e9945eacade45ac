"""Follows a rule on both sides, push by push, beside the equations in float64 numpy."""

import abc
import dataclasses
import threading
import types

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.rules import PushMeta

SIZES = (6, 6, 6)  # the parts of the center
SIZE = sum(SIZES)


def frozen(array):
    """A copy that nobody can write into."""
    array = np.array(array)
    array.setflags(write=False)
    return array


class Center:
    """Parts of a center with a rule, without a service; that the rule is pure is checked."""

    def __init__(self, rule, start, sizes=SIZES):
        self.rule, self.sizes, self.version = rule, sizes, 0
        self.parts = [part.copy() for part in self.cut(start)]
        self.slots = [rule.create_slots(frozen(part)) for part in self.parts]

    def cut(self, vector):
        return np.split(np.float32(vector), np.cumsum(self.sizes)[:-1])

    def push(self, worker, samples, seen_version, message):
        """The answer, or None if the worker must wait."""
        if self.rule.may_wait:
            self._change_slots("note_presence", worker)
            turns = [self.rule.is_turn(slots, worker) for slots in self.slots]
            assert turns in ([True] * len(turns), [False] * len(turns))
            if not turns[0]:
                return None
        meta = PushMeta(worker, float(samples), self.version - seen_version, self.version)
        changes = enumerate(self.cut(message))
        answers = [self._push_part(index, frozen(change), meta) for index, change in changes]
        self.version += 1
        return np.concatenate(answers)

    def _push_part(self, index, change, meta):
        center, slots = self.parts[index], _frozen_slots(self.slots[index])
        given = frozen(center) if self.rule.is_atomic else center
        update = self.rule.update(given, slots, change, meta)
        for vector in (update.center, update.answer):
            assert vector.dtype == np.float32 and vector.shape == change.shape
        assert self.rule.is_atomic or update.center is center
        assert _described(update.slots) == _described(slots)
        self.parts[index], self.slots[index] = update.center, update.slots
        return update.answer

    def signal(self, worker, signal):
        """The stage of training."""
        results = [self.rule.signal(_frozen_slots(own), worker, signal) for own in self.slots]
        self.slots, stages = (list(column) for column in zip(*results, strict=True))
        assert len(set(stages)) == 1
        return stages[0]

    def refuse(self, worker):
        """What the service does with a push that it refuses in its turn."""
        assert all(self.rule.is_turn(slots, worker) for slots in self.slots)
        self._change_slots("pass_turn", worker)

    def _change_slots(self, method, worker):
        change = getattr(self.rule, method)
        self.slots = [change(_frozen_slots(slots), worker) for slots in self.slots]

    @property
    def values(self):
        return np.concatenate(self.parts)


def _frozen_slots(slots):
    return types.MappingProxyType({name: frozen(array) for name, array in slots.items()})


def _described(slots):
    return {name: (array.dtype, array.shape) for name, array in slots.items()}


def run_in_threads(work, number):
    """Calls work(0), ..., work(number - 1) at the same time."""
    errors = []

    def guarded(index):
        try:
            work(index)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not errors


@dataclasses.dataclass
class Follower:
    """A worker: its weights twice, as the rule makes them and as the equations say."""

    weights: np.ndarray
    seen: np.ndarray
    version: int = 0
    sent: np.ndarray | None = None
    answer: np.ndarray | None = None
    expected: np.ndarray | None = None  # float64 weights
    expected_seen: np.ndarray | None = None
    expected_sent: np.ndarray | None = None
    expected_answer: np.ndarray | None = None


class Equations(abc.ABC):
    """What a paper says of one push; the worker's side is that of gradient rules."""

    def __init__(self, start):
        self.c = np.float64(start)
        self.version = 0

    @abc.abstractmethod
    def update(self, i, change, samples, staleness):
        """What the center becomes, and the answer."""

    def message(self, x, seen):
        return seen - x

    def after_sending(self, x, seen):
        return seen

    def receive(self, x, sent, answer):
        return answer


class ChangeEquations(Equations):
    """The worker's side of rules that send the change of the weights."""

    def message(self, x, seen):
        return x - seen

    def after_sending(self, x, seen):
        return x

    def receive(self, x, sent, answer):
        return answer + x - sent


class ElasticEquations(Equations):
    """Both sides move by the same difference, of the moment of sending."""

    def __init__(self, start, alpha):
        super().__init__(start)
        self.alpha = alpha

    def message(self, x, seen):
        return x

    def after_sending(self, x, seen):
        return x

    def update(self, i, x, samples, staleness):
        before = self.c
        self.c = self.c + self.alpha * (x - before)
        return before

    def receive(self, x, sent, answer):
        return x - self.alpha * (sent - answer)


def follow(rule, equations, start, workers=3, events=60, seed=3, tolerance=2e-4, order=None):
    """Sends and receives in random order and compares all that can be seen after each event.

    Workers move while their answers travel, and others push in between: staleness is above 0.
    """
    random = np.random.default_rng(seed)
    center = Center(rule, start)
    crew = [
        Follower(
            np.float32(start),
            np.float32(start),
            expected=np.float64(start),
            expected_seen=np.float64(start),
        )
        for _ in range(workers)
    ]
    largest_staleness, pushes = 0, 0
    for _ in range(events):
        i = int(random.integers(workers))
        if order is not None and crew[i].answer is None:
            i = order[pushes % len(order)] if crew[order[pushes % len(order)]].answer is None else i
        worker = crew[i]
        step = 0.1 * random.normal(size=SIZE)
        worker.weights = np.float32(worker.weights - step)
        worker.expected = worker.expected - step
        if worker.answer is None:
            if order is not None and i != order[pushes % len(order)]:
                continue
            largest_staleness = max(largest_staleness, center.version - worker.version)
            _send(center, equations, worker, i, float(random.integers(1, 64)))
            pushes += 1
        else:
            _receive(rule, equations, worker)
        np.testing.assert_allclose(center.values, equations.c, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(worker.weights, worker.expected, rtol=tolerance, atol=tolerance)
    assert center.version == pushes > events // 4
    assert largest_staleness > 1 or workers == 1
    assert np.abs(center.values - start).max() > 0.01
    return center, crew


def _send(center, equations, worker, i, samples):
    rule = center.rule
    staleness = center.version - worker.version
    message = rule.message(worker.weights, worker.seen)
    worker.answer = center.push(i, samples, worker.version, message)
    worker.weights = worker.sent = rule.after_sending(worker.weights, worker.seen)
    worker.version = center.version
    expected = equations.message(worker.expected, worker.expected_seen)
    worker.expected_answer = equations.update(i, expected, samples, staleness)
    equations.version += 1
    worker.expected = equations.after_sending(worker.expected, worker.expected_seen)
    worker.expected_sent = worker.expected
    np.testing.assert_allclose(worker.answer, worker.expected_answer, rtol=2e-4, atol=2e-4)


def _receive(rule, equations, worker):
    worker.weights = rule.receive(worker.weights, worker.sent, worker.answer)
    worker.expected = equations.receive(
        worker.expected, worker.expected_sent, worker.expected_answer
    )
    worker.seen, worker.expected_seen = worker.answer, worker.expected_answer
    worker.answer = None


class Group:
    """Workers of a synchronous rule, and a sum over them that all of them wait for."""

    def __init__(self, rule, starts):
        self.rule = rule
        self.weights = [tf.constant(start, tf.float32) for start in starts]
        self.states = [rule.initial_state(self.weights[0]) for _ in starts]
        self.messages = 0

    def exchange(self, samples):
        """One `combine` of every worker: first what they send is collected, then the sum given."""
        sent = [self._sent(i, samples[i]) for i in range(len(self.weights))]
        total = tf.add_n(sent)
        self.messages += 1
        results = [
            self.rule.combine(x, state, n, lambda _: total)
            for x, state, n in zip(self.weights, self.states, samples, strict=True)
        ]
        self.weights, self.states = [list(column) for column in zip(*results, strict=True)]

    def _sent(self, i, samples):
        buffers = []

        def keep(buffer):
            buffers.append(buffer)
            return buffer

        self.rule.combine(self.weights[i], self.states[i], samples, keep)
        assert len(buffers) == 1  # one packed buffer
        return buffers[0]

    def assert_states_are_identical(self):
        for state in self.states[1:]:
            for name, value in state.items():
                np.testing.assert_array_equal(value, self.states[0][name])


def start_vector(seed=0):
    return np.random.default_rng(seed).normal(size=SIZE).astype("float32")
