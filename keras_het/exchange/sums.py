"""Sums of one vector of each worker, place by place and step by step."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

import numpy as np

from keras_het.exchange.message import Kind, Message, Vector

MOST_SLOTS = 2**16
"""Places that a service has; one takes memory while it is in use."""


class Sums:
    r"""Sums over workers, one slot for each partition, of any length.

    In step t, worker i contributes :math:`x_i`; the last to arrive adds up
    :math:`x_1 + x_2 + \dots + x_n`, in the order of the workers, so that the result has the same
    bits regardless of the order of arrival. Everybody gets the same future of the sum.

    A contribution that would leave a slot without a sum is refused and changes nothing: one of
    another run, from a worker that does not wait for the step before, or of another length than
    the first of its step. A repeated one, whose answer was lost, counts once. A slot keeps its last
    sum for that, and the one before until all workers have contributed to the last: none can be
    further ahead of another, whose contribution it needs to continue.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020, section 3 (Summation Service).
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._run = 0
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()

    def handle(self, worker: int, request: Message) -> Message | Future[Message]:
        """Answer a message of a worker."""
        if request.kind is Kind.JOIN:
            self.join(*request.numbers)
            return Message(Kind.DONE)
        if request.kind is not Kind.CONTRIBUTION:
            raise ValueError(f"Received: {request.kind.name}; expected: JOIN or CONTRIBUTION.")
        run, slot, step = request.numbers
        return self.contribute(run, slot, worker, step, request.vectors[0])

    def join(self, run: int) -> None:
        """Begin a run unless it has begun; discard all state of the previous one."""
        if not run:
            raise ValueError("A run has a number. Received: 0.")
        with self._lock:
            if run == self._run:
                return
            self._run, slots, self._slots = run, self._slots, {}
        for slot in slots.values():
            for waiting in slot.sums.values():
                with contextlib.suppress(InvalidStateError):  # it is there
                    waiting.set_exception(ConnectionError("Another run has begun here."))

    def contribute(
        self, run: int, slot: int, worker: int, step: int, values: Vector
    ) -> Future[Message]:
        """Contribute to a step (from 1) of a slot; `values` must not change until the sum is there.

        What is not due is a `ValueError`, and has no effect.
        """
        with self._lock:
            place = self._slots.get(slot) or _Slot(self._num_workers)
            self._check(run, slot, worker, step, values, place)
            self._slots[slot] = place
            total = place.sums.setdefault(step, Future())
            if place.latest[worker] == step:
                return total
            place.parts[worker], place.latest[worker] = values, step
            if min(place.latest) < step:
                return total
            parts, place.parts, place.sums = place.parts, {}, {step: total}
        summed = _add([parts[number] for number in range(self._num_workers)])
        with contextlib.suppress(InvalidStateError):  # another run has begun meanwhile
            total.set_result(Message(Kind.SUM, (), (summed,)))
        return total

    def _check(
        self, run: int, slot: int, worker: int, step: int, values: Vector, place: _Slot
    ) -> None:
        if run != self._run or not run:
            raise ValueError(f"Another run is summed here. Received: {run}.")
        if not (0 <= slot < MOST_SLOTS and 0 <= worker < self._num_workers):
            raise ValueError(
                f"Nothing is being summed there. Received: slot {slot}, worker {worker}."
            )
        latest = place.latest[worker]
        if step == latest and step > 0:
            return  # repeated
        if step != latest + 1 or min(place.latest) + 1 < step:
            raise ValueError(f"It is another step's turn. Received: {step} after {latest}.")
        length = next((len(part) for part in place.parts.values()), len(values))
        if len(values) != length:
            raise ValueError(f"Lengths differ. Received: {len(values)}; expected: {length}.")


class _Slot:
    """The latest step of each worker, contributions to the present step, and futures of sums."""

    def __init__(self, num_workers: int) -> None:
        self.latest = [0] * num_workers
        self.parts: dict[int, Vector] = {}
        self.sums: dict[int, Future[Message]] = {}


@np.errstate(all="ignore")
def _add(parts: list[Vector]) -> Vector:
    total = np.array(parts[0])
    for part in parts[1:]:
        np.add(total, part, out=total)
    return total
