"""The way of a vector: its partitions are sent when it is their turn, and sums put together."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import NamedTuple

import numpy as np

from keras_het.exchange.message import Message, Vector
from keras_het.summation.placement import Placement

_END_SECONDS = 5.0


class Machine(NamedTuple):
    """A machine that sums, and how to contribute a step to a slot there without waiting."""

    name: str
    contribute: Callable[[int, int, Vector], Future[Message]]


class Route(NamedTuple):
    """Where the partitions of a vector go."""

    placement: Placement
    slots: tuple[int, ...]


class Transit:
    """Sends vectors and collects their sums, in a separate thread."""

    # No thread of TensorFlow waits here: workers that begin their sums in different orders would
    # wait for each other once all threads of each do. Threads of Python also add subnormal numbers.

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: set[_Passage] = set()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="keras_het-sums", daemon=True)
        self._thread.start()

    def begin(self, route: Route, step: int, values: Vector) -> Future[Vector]:
        """Send a vector, which must not change until then; return the future of its sum."""
        passage = _Passage(self._machines, route, step, values, self._events.put)
        self._events.put(partial(self._start, passage))
        return passage.sum

    def fail(self, error: Exception) -> None:
        """Let all sums fail that are under way or begun later."""
        self._events.put(partial(self._fail, error))

    def close(self) -> None:
        self.fail(ConnectionError("The process ends."))
        self._events.put(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event()

    def _start(self, passage: _Passage) -> None:
        self._under_way.add(passage)
        passage.sum.add_done_callback(lambda _: self._under_way.discard(passage))
        if self._error is None:
            passage.start()
        else:
            passage.fail(self._error)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for passage in list(self._under_way):
            passage.fail(self._error)


class _Passage:
    """One vector on its way; used by the thread of its `Transit` only."""

    def __init__(
        self,
        machines: Sequence[Machine],
        route: Route,
        step: int,
        values: Vector,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self._machines, self._route, self._step, self._tell = machines, route, step, tell
        ends = list(itertools.accumulate(route.placement.sizes))
        cuts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._values, self._cuts = values, cuts
        self._total = np.empty_like(values)
        # Sums that each partition still waits for, and the partitions that wait for each sum.
        self._left = [len(waits) for waits in route.placement.waits]
        self._behind: list[list[int]] = [[] for _ in cuts]
        for number, waits in enumerate(route.placement.waits):
            for earlier in waits:
                self._behind[earlier].append(number)
        self._missing = len(cuts)
        self.sum: Future[Vector] = Future()

    def start(self) -> None:
        for number in [number for number, left in enumerate(self._left) if not left]:
            self._send(number)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.sum.set_exception(error)

    def _send(self, number: int) -> None:
        machine = self._machines[self._route.placement.owners[number]]
        values = self._values[self._cuts[number]]
        try:
            future = machine.contribute(self._route.slots[number], self._step, values)
        except Exception as error:
            self.fail(_named(machine, error))
        else:
            future.add_done_callback(lambda done: self._tell(partial(self._take, number, done)))

    def _take(self, number: int, done: Future[Message]) -> None:
        if self.sum.done():
            return
        error = done.exception()
        if error is not None:
            machine = self._machines[self._route.placement.owners[number]]
            self.fail(_named(machine, error))
            return
        self._total[self._cuts[number]] = done.result().vectors[0]
        self._missing -= 1
        for behind in self._behind[number]:
            self._left[behind] -= 1
            if not self._left[behind]:
                self._send(behind)
        if not self._missing:
            self.sum.set_result(self._total)


def _named(machine: Machine, error: BaseException) -> Exception:
    if isinstance(error, ValueError):
        return ValueError(
            f"The summation service of {machine.name} refused this step. Another cluster uses the "
            f"same machine, or the workers run different steps. Received: {error}"
        )
    return ConnectionError(f"{machine.name}: {error}")
