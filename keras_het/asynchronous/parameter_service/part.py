"""One partition of the center: its values, the rule's state, and pushes that wait for a turn."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import numpy as np

from keras_het.asynchronous.parameter_service.wire import check_size
from keras_het.exchange.message import Status, Vector
from keras_het.rules.update_rule import PushMeta, Slots, Update, UpdateRule

LARGEST_SAMPLES = 2**31
"""Largest plausible number of samples of one push."""
_VERSION = "version"
_LARGEST_VERSION = 2**62  # with updates to come it fits into a message
_NOTHING = np.zeros(0, np.uint8)


class Push(NamedTuple):
    """A worker's change of a partition."""

    worker: int
    number: int  # of the push, from 1, by which it counts once; 0 for none
    version: int  # of the partition that the worker saw last
    samples: int  # in the change
    change: Vector
    is_trusted: bool = False  # whether it comes from this process, which is never too far behind


class Answer(NamedTuple):
    """The answer to a push or pull; without values where nothing is to be continued from."""

    status: Status
    version: int
    values: Vector | None = None
    latest: Vector | None = None  # number of the latest push of each worker in the values


Ready: TypeAlias = "list[tuple[Future[Answer], Answer | Exception]]"


class Part:
    """A partition that any thread may push to and pull from.

    Its arrays are replaced, never written into (unless the rule is not atomic), so that answers
    need no copy, and an update whose result is not finite is simply not kept.

    Args:
        size: number of elements.
        rule: combines pushes with the center.
        num_workers: number of workers that may push.
        max_staleness: number of updates since a worker last saw the center, beyond which a push
            is rejected; None for no bound.
    """

    def __init__(
        self, size: int, rule: UpdateRule, num_workers: int, max_staleness: int | None = None
    ) -> None:
        self.size, self._rule, self._bound = size, rule, max_staleness
        self.center: Vector = np.zeros(size, np.float32)
        self.slots: Slots = rule.create_slots(self.center)
        self.version = 0
        self.has_center = self._is_closed = False
        self.latest: Vector = np.zeros(num_workers, np.int64)
        """Number of the latest push of each worker."""
        self._waiting: dict[int, tuple[Push, Future[Answer]]] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._under_way = 0  # pushes without the lock

    def pull(self) -> Answer:
        """Return the center."""
        with self._lock:
            if not self.has_center:
                return Answer(Status.NO_CENTER, -1)
            return self._seen(Status.OK)

    def _seen(self, status: Status) -> Answer:
        center = self.center if self._rule.is_atomic else self.center.copy()
        return Answer(status, self.version, center, self.latest.copy())

    def set_center(
        self, values: Vector, latest: Vector | None = None, is_trusted: bool = False
    ) -> None:
        """Set the values from outside the rule, with the pushes in them; the version stays.

        Raises:
            ValueError: if they are of another size, or not finite and not trusted.
        """
        check_size(values, self.size)
        if latest is not None:
            check_size(latest, len(self.latest))
        if not is_trusted and not is_finite(values):
            raise ValueError(
                "The center must be finite. Received: weights that are not. The training has "
                "diverged: lower the learning rate."
            )
        with self._lock:
            self.center = values if self._rule.is_atomic else np.array(values)
            self.has_center = True
            if latest is not None:
                self.latest = np.maximum(self.latest, latest)

    def push(self, push: Push) -> Answer | Future[Answer]:
        """Apply the rule; a push that is not in its turn is answered when it is.

        Raises:
            ValueError: if the push makes no sense.
        """
        self._check(push)
        if not self._rule.is_atomic:
            return self._push_at_once(push)
        with self._lock:
            ready: Ready = []
            answer = self._push(push, ready)
            ready += self._take_waiting()
        resolve(ready)
        return answer

    def _check(self, push: Push) -> None:
        check_size(push.change, self.size)
        if not (
            0 <= push.worker < len(self.latest)
            and push.number >= 0
            and push.version >= 0
            and 0 <= push.samples < LARGEST_SAMPLES
        ):
            raise ValueError(
                f"There is no such push. Received: {push._replace(change=None)}; expected: one of "  # type: ignore[arg-type]
                f"{len(self.latest)} workers, and numbers from 0."
            )

    def _push(self, push: Push, ready: Ready) -> Answer | Future[Answer]:
        refusal = self._refusal(push)
        if refusal is not None:
            if refusal.status == Status.NOT_FINITE:
                self._pass_turn(push)
            return refusal
        if self._rule.may_wait:
            self.slots = self._rule.note_presence(self.slots, push.worker)
        if self._is_turn(push.worker):
            return self._take(push)
        future: Future[Answer] = Future()
        if push.worker in self._waiting:  # it has come back, or has sent its push again
            error = ConnectionError("The push was sent again.")
            ready.append((self._waiting[push.worker][1], error))
        self._waiting[push.worker] = push, future
        return future

    def _refusal(self, push: Push) -> Answer | None:
        """Return the answer to a push that is not to be taken."""
        if not self.has_center:
            return Answer(Status.NO_CENTER, -1)
        if not is_finite(push.change):
            return Answer(Status.NOT_FINITE, -1)
        if self._is_repeated(push):
            return self._seen(Status.REPEATED)
        if self._is_closed:
            return Answer(Status.CLOSED, self.version)
        if self._is_stale(push):
            return self._seen(Status.STALE)
        return None

    def _is_repeated(self, push: Push) -> bool:
        return 0 < push.number <= self.latest[push.worker]

    def _is_stale(self, push: Push) -> bool:
        """Whether a worker saw the center too long ago, or another service's in the future."""
        if self._bound is None or push.is_trusted:
            return False
        return self.version - push.version > self._bound or push.version > self.version

    def _is_turn(self, worker: int) -> bool:
        return not self._rule.may_wait or self._rule.is_turn(self.slots, worker)

    def _pass_turn(self, push: Push) -> None:
        """End the turn of a worker whose push is refused, once: the others would wait for it."""
        if not self._rule.may_wait or self._is_repeated(push) or not self._is_turn(push.worker):
            return
        self.slots = self._rule.pass_turn(self.slots, push.worker)
        self._note(push)

    def _note(self, push: Push) -> None:
        self.latest[push.worker] = max(push.number, self.latest[push.worker])

    def _take(self, push: Push) -> Answer:
        update = self._updated(push)
        if not (is_finite(update.center) and self._is_state_as_finite(update.slots)):
            self._pass_turn(push)
            return Answer(Status.NOT_FINITE, self.version)
        self.center, self.slots = update.center, update.slots
        self.version += 1
        self._note(push)
        return Answer(Status.OK, self.version, update.answer, self.latest.copy())

    def _updated(self, push: Push) -> Update:
        staleness = max(self.version - push.version, 0)
        meta = PushMeta(push.worker, float(push.samples), staleness, self.version)
        with np.errstate(all="ignore"):  # finite messages may add up to more than float32 holds
            return self._rule.update(self.center, self.slots, push.change, meta)

    def _is_state_as_finite(self, slots: Slots) -> bool:
        """Whether no state stops being finite: a momentum may make the center so later."""
        return all(
            slots[name] is old or is_finite(slots[name]) or not is_finite(old)
            for name, old in self.slots.items()
        )

    def _take_waiting(self) -> Ready:
        """Take the pushes whose turn has come; an error is that of the one that it concerns."""
        ready: Ready = []
        while found := [worker for worker in sorted(self._waiting) if self._is_turn(worker)]:
            push, future = self._waiting.pop(found[0])
            try:
                ready.append((future, self._refusal(push) or self._take(push)))
            except Exception as error:
                ready.append((future, error))
        return ready

    def _push_at_once(self, push: Push) -> Answer:
        """Let simultaneous pushes write into the same center."""
        with self._lock:
            refusal = self._refusal(push)
            if refusal is not None:
                return refusal
            self._note(push)
            self._under_way += 1
            center, before = self.center, self.center.copy()
        try:
            answer = self._updated(push).answer
        finally:
            with self._lock:
                self._under_way -= 1
                self._idle.notify_all()
        if not is_finite(center):
            center[:] = before  # pushes of others meanwhile are undone, too
            return Answer(Status.NOT_FINITE, self.version)
        with self._lock:
            self.version += 1
            return Answer(Status.OK, self.version, answer, self.latest.copy())

    def leave(self, worker: int) -> None:
        """Wait for no push of a worker that has ended."""
        with self._lock:
            self.slots = self._rule.leave(self.slots, worker)
            ready = self._take_waiting()
        resolve(ready)

    def close(self) -> None:
        """Reject further pushes; return once the last one is complete."""
        with self._lock:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._under_way)
            waiting, self._waiting = self._waiting, {}
        resolve([(future, Answer(Status.CLOSED, self.version)) for _, future in waiting.values()])

    def state(self) -> dict[str, Vector]:
        """Return version and the rule's state, to be saved with the center: name to array."""
        with self._lock:
            return self._state()

    def _state(self) -> dict[str, Vector]:
        return {_VERSION: np.asarray(self.version, np.int64), **self.slots}

    def set_state(self, state: Mapping[str, Vector]) -> None:
        """Take over a saved state.

        Raises:
            ValueError: if it is that of another rule, size or number of workers, or if no push
                could be taken with it.
        """
        with self._lock:
            expected = _described(self._state())
            if _described(state) != expected:
                raise ValueError(
                    "The saved state is that of another rule, size or number of workers. Received: "
                    f"{_described(state)}; expected: {expected}."
                )
            version = int(state[_VERSION])
            if not 0 <= version < _LARGEST_VERSION or not self._is_state_as_finite(state):
                raise ValueError(
                    "The saved state of the parameter service must be finite, and its versions at "
                    f"least 0. Received: version {version}, and state of a training that was "
                    "diverging, or of a damaged file."
                )
            self.version = version
            self.slots = {name: state[name] for name in self.slots}


def resolve(ready: Ready) -> None:
    """Answer pushes that have waited; outside the lock, since callbacks send the answers."""
    for future, answer in ready:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def is_finite(values: Vector) -> bool:
    """Whether all values are finite, in one pass; a sum beyond float32 is just as useless."""
    if values.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)))


def _described(state: Mapping[str, Vector]) -> list[list[object]]:
    return sorted([name, array.dtype.str, list(array.shape)] for name, array in state.items())


def pack_state(state: Mapping[str, Vector]) -> tuple[Vector, Vector]:
    """Return named arrays as a file of NumPy, for one message; it holds no objects."""
    file = io.BytesIO()
    np.savez(file, **state)  # type: ignore[arg-type]
    return np.frombuffer(file.getvalue(), np.uint8), _NOTHING


def unpack_state(content: Vector, _: Vector = _NOTHING) -> dict[str, Vector]:
    """Return the named arrays of `pack_state`."""
    try:
        with np.load(io.BytesIO(content.tobytes()), allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # of zipfile, of its decompression or of NumPy
        raise ValueError(f"A state cannot be read. Received: {error!r}.") from error
