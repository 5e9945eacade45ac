"""Random messages to the service are refused, or leave everything finite."""

import numpy as np
import pytest
from service_doubles import SECRET, service_spec

from keras_het.asynchronous.parameter_service import FloatWire, Partitions, Status, TopKWire
from keras_het.asynchronous.parameter_service.hosting import HostedParts
from keras_het.asynchronous.parameter_service.part import LARGEST_SAMPLES, pack_state
from keras_het.exchange.message import Kind, Message, decode, encode
from keras_het.rules import AsyncSGD, serialize

WIRES = {"float32": FloatWire(), "float16": FloatWire("float16"), "top": TopKWire(0.4)}
PUSHES = (Kind.PUSH, Kind.PUSH_16, Kind.PUSH_TOP)
FUZZED = Partitions(((4, 3), (2,)), partition_bytes=28)  # 14 elements: two of seven
EDGES = (-(2**63), -(2**31), -1, 3, 4, LARGEST_SAMPLES, 2**62, 2**63 - 1)


class Requests:
    """Messages of random senders: any kind, numbers, lengths and values, and often almost right."""

    def __init__(self, seed, good_state):
        self.random = np.random.default_rng(seed)
        self.good = good_state
        self.kinds = [kind for kind in Kind if kind != Kind.CLOSE_TRAINING]
        self.likely = (*PUSHES, Kind.RESTORE, Kind.STATE, Kind.LEAD)

    def number(self):
        way = self.random.integers(12)
        if way == 0:
            return int(self.random.integers(-(2**63), 2**63 - 1))
        return int(self.random.choice(EDGES) if way == 1 else self.random.integers(3))

    def vector(self, kind):
        length = int(self.random.choice([0, 1, 6, 7, 7, 7, 7, 8, 100]))
        values = self.random.normal(size=length)
        if length and self.random.integers(3) == 0:
            odd = self.random.choice([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38])
            values[self.random.integers(length)] = odd
        with np.errstate(all="ignore"):
            if kind == "<i4":
                places = [*range(7)] * 4 + [-1, 7, -(2**31)]
                return self.random.choice(places, self.random.choice([length, 7, 7, 7]))
            if kind == "<i8":  # pushes of three workers
                return self.random.choice(EDGES, self.random.choice([length, 0, 0, 3]))
            return values.astype(kind)

    def make(self):
        pool = self.likely if self.random.integers(2) else self.kinds
        kind = Kind(self.random.choice(pool))
        numbers = tuple(self.number() for _ in range(kind.numbers))
        vectors = [self.vector(type_) for type_ in kind.types]
        if kind == Kind.STATE and self.random.integers(3):
            state = dict(self.good)
            name = str(self.random.choice(sorted(state)))
            way, odd = self.random.integers(3), self.random.choice([-1.0, np.nan, np.inf, 2.0**63])
            with np.errstate(all="ignore"):
                state[name] = (
                    np.full_like(state[name], odd) if way else np.append(state[name], state[name])
                )
            vectors = list(pack_state(state))
        sender = int(self.random.integers(-1, 4))
        return sender, next(decode(encode(Message(kind, numbers, tuple(vectors)), b""), b""))


def is_right(sender, request, wire):
    """Whether a push or a center may be taken, by all but what the center makes of it."""
    part, *numbers = request.numbers
    if request.kind == Kind.RESTORE:
        vector, latest = request.vectors
        fits = len(vector) == 7 and len(latest) in (0, 3)
        return part in (0, 1) and fits and bool(np.isfinite(vector.sum()))
    number, version, samples = numbers
    if request.kind != wire.push or part not in (0, 1) or not 0 <= sender < 3:
        return False
    if min(number, version) < 0 or not 0 <= samples < LARGEST_SAMPLES:
        return False
    vectors = request.vectors
    fits = len(vectors[0]) == 7
    if isinstance(wire, TopKWire):
        places = vectors[1]
        fits = len(places) == len(vectors[0]) and set(places.tolist()) <= {*range(7)}
    return fits and bool(np.isfinite(wire.decode(vectors, 7).sum()))


def hosted(wire, server=None):
    rule = serialize(AsyncSGD(0.1, momentum=0.5))
    given = {"shapes": FUZZED.shapes, "rule": rule, "wire": wire.name, "max_staleness": 5}
    parts = HostedParts(server, 0, service_spec(**given), SECRET)
    for part in parts.parameters.parts.values():
        part.set_center(np.zeros(7, np.float32))
    return parts


def snapshot(parts):
    kept = [{"center": part.center, **part.state()} for part in parts.parameters.parts.values()]
    return [{name: value.copy() for name, value in each.items()} for each in kept]


class NoServer:
    def end(self, service):
        """Nobody is connected."""


@pytest.mark.quick("float32-600", "top-600")
@pytest.mark.parametrize("rounds", [600, 20_000])
@pytest.mark.parametrize("wire", WIRES)
def test_random_messages_are_refused_or_leave_everything_finite(wire, rounds):
    parts, wire = hosted(WIRES[wire], NoServer()), WIRES[wire]
    requests = Requests(3, parts.parameters.parts[0].state())
    taken, refused = 0, 0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(rounds):
            sender, request = requests.make()
            before = snapshot(parts)
            try:
                answer = parts.handle(sender, request)
                assert list(encode(answer, b""))  # its numbers fit into a message
            except (ValueError, PermissionError):
                answer = None
            if request.kind in (*PUSHES, Kind.RESTORE) and is_right(sender, request, wire):
                assert answer is not None
                taken += answer.numbers[0] == Status.OK
            elif request.kind != Kind.STATE or answer is None:
                np.testing.assert_equal(snapshot(parts), before)
                refused += 1
            if answer is not None and answer.numbers and answer.numbers[0] == Status.NOT_FINITE:
                np.testing.assert_equal(snapshot(parts), before)
            for part in snapshot(parts):
                assert all(np.isfinite(value).all() for value in part.values())
                assert 0 <= part["version"] < 2**63 - 1
    assert taken > rounds / 100 and refused > rounds / 2
    for request in (
        Message(Kind.RESTORE, (0,), (np.ones(7, np.float32), np.zeros(0, np.int64))),
        Message(Kind.PULL, (0, 1)),
    ):
        answer = parts.handle(1, request)  # none has kept the lock
        assert answer.numbers[0] == Status.OK
    np.testing.assert_array_equal(answer.vectors[0], 1)
