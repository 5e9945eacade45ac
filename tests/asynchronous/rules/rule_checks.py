"""Follows a rule on both sides, push by push, beside the equations in float64 numpy."""

import types

import numpy as np
import tensorflow as tf

from keras_het.rules import PushMeta

SIZES = (6, 6, 6)  # the parts of the center
SIZE = sum(SIZES)


def start_vector(seed=0):
    return np.random.default_rng(seed).normal(size=SIZE).astype("float32")


def frozen(array):
    array = np.array(array)
    array.setflags(write=False)
    return array


class Center:
    """Parts of a center with a rule, without a service; that the rule is pure is checked."""

    def __init__(self, rule, start, sizes=SIZES):
        self.rule, self.sizes, self.version = rule, sizes, 0
        self.parts = [part.copy() for part in self._cut(start)]
        self.slots = [rule.create_slots(frozen(part)) for part in self.parts]

    def _cut(self, vector):
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
        changes = enumerate(self._cut(message))
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

    def are_taken(self, *workers):
        """Whether a push of each, one after another, is taken; of ones."""
        return [self.push(i, 1, self.version, np.ones(SIZE)) is not None for i in workers]

    def leave(self, worker):
        self._change_slots("leave", worker)

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


class Equations:
    """What a paper says of one push (`update` returns the answer), and the worker's side.

    The latter is that of gradient rules.
    """

    version = 0

    def __init__(self, start):
        self.c = np.float64(start)

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


class ElasticEquations(ChangeEquations):
    """Both sides move by the same difference, of the moment of sending."""

    def __init__(self, start, alpha):
        super().__init__(start)
        self.alpha = alpha

    def message(self, x, seen):
        return x

    def update(self, i, x, samples, staleness):
        before = self.c
        self.c = self.c + self.alpha * (x - before)
        return before

    def receive(self, x, sent, answer):
        return x - self.alpha * (sent - answer)


class Worker:
    answer = None

    def __init__(self, rule, start):
        self.rule, self.weights, self.seen = rule, start, start

    def send(self):
        message = self.rule.message(self.weights, self.seen)
        self.weights = self.sent = self.rule.after_sending(self.weights, self.seen)
        return message

    def receive(self):
        self.weights = self.rule.receive(self.weights, self.sent, self.answer)
        self.seen, self.answer = self.answer, None


def follow(rule, equations, start, workers=3, events=60, in_turns=False):
    """Sends and receives in random order and compares all that can be seen after each event.

    Workers move while their answers travel, and others push in between: staleness is above 0.
    """
    random, center, largest_staleness = np.random.default_rng(3), Center(rule, start), 0
    ours = [Worker(rule, np.float32(start)) for _ in range(workers)]
    theirs = [Worker(equations, np.float64(start)) for _ in range(workers)]
    seen = [0] * workers
    for _ in range(events):
        i = int(random.integers(workers))
        if in_turns and ours[i].answer is None:
            i = center.version % workers
        own, expected = ours[i], theirs[i]
        step = 0.1 * random.normal(size=SIZE)
        own.weights = np.float32(own.weights - step)
        expected.weights = expected.weights - step
        if own.answer is None:
            samples, staleness = float(random.integers(1, 64)), center.version - seen[i]
            own.answer = center.push(i, samples, seen[i], own.send())
            expected.answer = equations.update(i, expected.send(), samples, staleness)
            assert_close(own.answer, expected.answer)
            equations.version = seen[i] = center.version
            largest_staleness = max(largest_staleness, staleness)
        else:
            own.receive()
            expected.receive()
        assert own.weights.dtype == np.float32
        assert_close(center.values, equations.c)
        assert_close(own.weights, expected.weights)
    assert center.version > events // 4
    assert largest_staleness > 1
    assert np.abs(center.values - start).max() > 0.01
    return center


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


class Group:
    """Workers of a synchronous rule, and a sum over them that all of them wait for."""

    def __init__(self, rule, starts):
        self.rule = rule
        self.weights = [tf.constant(start, tf.float32) for start in starts]
        self.states = [rule.initial_state(self.weights[0]) for _ in starts]

    def move(self, changes):
        self.weights = [w + np.float32(m) for w, m in zip(self.weights, changes, strict=True)]

    def exchange(self, samples):
        """One `combine` of every worker: first what they send is collected, then the sum given."""
        sent = []
        self._combine(samples, lambda own: sent.append(own) or own)
        assert len(sent) == len(self.weights)  # one packed buffer of each
        results = self._combine(samples, lambda _: tf.add_n(sent))
        self.weights, self.states = (list(column) for column in zip(*results, strict=True))
        first, *others = (tf.nest.map_structure(np.array, state) for state in self.states)
        np.testing.assert_equal(others, [first] * len(others))

    def receive(self, now, sent):
        """Continue from an exchange that took some steps."""
        columns = zip(now, sent, self.weights, strict=True)
        self.weights = [self.rule.receive(*column) for column in columns]

    def _combine(self, samples, all_reduce_sum):
        columns = zip(self.weights, self.states, samples, strict=True)
        return [self.rule.combine(*column, all_reduce_sum) for column in columns]
