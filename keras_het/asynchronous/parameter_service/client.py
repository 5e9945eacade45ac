"""A participant's requests to the processes that hold the center, part by part."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from keras_het.asynchronous.parameter_service.part import pack_state, unpack_state
from keras_het.asynchronous.parameter_service.wire import (
    FloatWire,
    Partitions,
    Wire,
    spread_partitions,
)
from keras_het.exchange.client import Client
from keras_het.exchange.message import NO_ANSWER, Kind, Message, Status, Vector
from keras_het.exchange.server import Handle, answer_to

SERVICE = "center"
"""Name of the service of center and ledger on its server."""
ADVICE = ' Its process may be gone; give on_service_loss="continue" to continue without it.'
"""What to do where the loss of a service is an error."""


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


class UnknownTrainingError(ServiceLostError):
    """A process answers, and does not know this training: it was restarted, or not yet asked."""


class Channel:
    """The channel to a process of the service: this one, where `handle` is called, or another."""

    # `timeout_seconds` is for each answer, and for connecting; 0 for no limit.

    def __init__(self, address: str, handle: Handle, timeout_seconds: float = 0.0) -> None:
        self.address, self._handle, self.timeout_seconds = address, handle, timeout_seconds

    def start(self, request: Message) -> Future[Message]:
        """Send a request without waiting for its answer; a failure is the future's."""
        return answer_to(self._handle, request)

    def ask(self, request: Message) -> Message:
        """Send a request and wait for its answer; raise as `translated` does if there is none."""
        return result_of(self.start(request), self)

    def close(self) -> None:
        """End the connection, if there is one; requests that wait fail."""


class RemoteChannel(Channel):
    """The channel to another process; it connects with its first request and after a loss."""

    def __init__(
        self, address: str, credential: bytes, participant: int, timeout_seconds: float
    ) -> None:
        super().__init__(address, self._send, timeout_seconds)
        self._client = Client(address, SERVICE, credential, participant)

    def _send(self, request: Message) -> Future[Message]:
        if self._client.is_connected:
            return self._client.send(request)
        # Several processes that do not answer are waited for side by side.
        answer: Future[Message] = Future()
        connect = partial(self._connect_and_send, request, answer)
        threading.Thread(target=connect, name="keras_het-connects", daemon=True).start()
        return answer

    def _connect_and_send(self, request: Message, answer: Future[Message]) -> None:
        try:
            self._client.connect(self.timeout_seconds)
            self._client.send(request).add_done_callback(partial(pass_on, answer))
        except MemoryError as error:  # the server has as many connections as it takes
            answer.set_exception(ConnectionError(str(error)))
        except Exception as error:
            answer.set_exception(error)

    def close(self) -> None:
        self._client.close()


def pass_on(call: Future[Message], done: Future[Message]) -> None:
    """End a call as another one has ended."""
    error = done.exception()
    if error is None:
        call.set_result(done.result())
    else:
        call.set_exception(error)


def result_of(answer: Future[Message], channel: Channel, seconds: float | None = None) -> Message:
    """Wait for the answer to a request, by default for the time-out."""
    with translated():
        try:
            return answer.result((channel.timeout_seconds if seconds is None else seconds) or None)
        except TimeoutError as error:
            raise TimeoutError(
                f"{channel.address} did not answer within {channel.timeout_seconds:g} s."
            ) from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise `ServiceLostError` without a service, or for one that does not know the training."""
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"The parameter service refused this worker: its shared secret, model (names, shapes "
            "and types of the weights), update rule with its settings, messages (wire, "
            f"partition_bytes) or number differs. Received: {error} Use the same script, TF_CONFIG "
            "cluster and secret on every task."
        ) from error
    except NotImplementedError as error:
        raise UnknownTrainingError(f"The parameter service at {error}{ADVICE}") from error
    except (ConnectionError, TimeoutError) as error:
        raise ServiceLostError(f"The parameter service at {error}{ADVICE}") from error


UNDER_WAY = 2
"""Messages with values that a client has in flight to each process; more take memory only."""
_HAVE_VALUES = (Kind.VALUES, Kind.VALUES_16)
_NO_PUSH = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The service's answer.

    Args:
        statuses: `Status` of each partition, -1 if no answer arrived in time.
        versions: version of each partition, -1 without an answer.
        values: of each partition; None where the answer has none.
        latest: number of the latest push of each worker in the values, by partition; likewise.
        loss: the first error of a process without an answer; it names the process.
    """

    statuses: np.ndarray
    versions: np.ndarray
    values: list[Vector | None]
    latest: list[Vector | None]
    loss: ServiceLostError | None = None


class ParameterClient:
    """Client that pulls one vector from the service and pushes changes to it.

    Nothing raises for a lost service but where it says so: an answer that did not arrive in time
    has the status `NO_ANSWER`, and messages that were to follow are not waited for.

    Args:
        channels: to the processes that share the partitions (`spread_partitions` gives the
            assignment).
        partitions: the cuts of the vector, the same as the service's.
        first: number of the vector's first part.
        wire: format of the values, the same as the service's.
        may_wait: whether a push may have to wait for its turn, however long that takes.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        partitions: Partitions,
        first: int = 0,
        wire: Wire | None = None,
        may_wait: bool = False,
    ) -> None:
        self.partitions, self._first, self._may_wait = partitions, first, may_wait
        self.wire = wire or FloatWire()
        self._channels = list(channels)
        self._places = spread_partitions(partitions.sizes, len(channels))
        self._indices = range(len(partitions.sizes))

    def greet(self) -> None:
        """Ask all processes whether they are there, and know this training.

        Raises:
            ServiceLostError: if one does not answer in time, or does not know it.
            PermissionError: if one refuses this participant.
        """
        for channel in self._channels:
            channel.ask(Message(Kind.LATEST))

    def leave(self, worker: int) -> bool:
        """Say that a worker has ended; return whether the answers arrived in time."""
        try:
            self._ask_each([Message(Kind.LEAVE, (self._first + i, worker)) for i in self._indices])
        except ServiceLostError:
            return False
        return True

    def close_training(self) -> None:
        """Make the service reject further pushes; return once the last one is complete."""
        for channel in self._channels:
            channel.ask(Message(Kind.CLOSE_TRAINING))

    def latest_number(self) -> int:
        """Return the service's largest known push number of this worker; 0 for none."""
        answers = [channel.ask(Message(Kind.LATEST)) for channel in self._channels]
        return max(answer.numbers[1] for answer in answers)

    def export(self) -> dict[str, Vector]:
        """Return versions and rule state: name to array.

        Raises:
            ServiceLostError: if a process does not answer in time.
        """
        answers = self._ask_each([Message(Kind.EXPORT, (self._first + i,)) for i in self._indices])
        return {
            f"part_{index}/{name}": array
            for index, answer in enumerate(answers)
            for name, array in unpack_state(*answer.vectors).items()
        }

    def restore(
        self,
        center: Sequence[Vector],
        saved: Mapping[str, Vector] | None = None,
        latest: Sequence[Vector | None] | None = None,
    ) -> None:
        """Set the center, and before it versions and rule state if given.

        Args:
            center: values of each partition.
            saved: the result of `export`.
            latest: `Answer.latest` of the pushes in the center, which must not count again.

        Raises:
            ServiceLostError: if a process does not answer in time.
            ValueError: if the state belongs to another model, rule or number of workers, or
                something is not finite.
        """
        if saved is not None:
            self._restore_state(saved)
        pushes = [_NO_PUSH if each is None else each for each in latest or [None] * len(center)]
        both = enumerate(zip(center, pushes, strict=True))
        answers = self._ask_each(
            [Message(Kind.RESTORE, (self._first + i,), vectors) for i, vectors in both]
        )
        if any(answer.numbers[0] != Status.OK for answer in answers):
            raise ValueError(
                "The center must be finite. Received: weights that are not. The training has "
                "diverged: lower the learning rate."
            )

    def _restore_state(self, saved: Mapping[str, Vector]) -> None:
        parts: dict[str, dict[str, Vector]] = collections.defaultdict(dict)
        for name, array in saved.items():
            parts[name.partition("/")[0]][name.partition("/")[2]] = array
        expected = [f"part_{index}" for index in self._indices]
        if sorted(parts) != sorted(expected):
            raise ValueError(
                "The saved state is not that of a parameter service, or of another model. "
                f"Received: {sorted(saved)}; expected: {len(expected)} partitions. Remove the "
                "backup, or use the model and cluster that it was made with."
            )
        states = [
            Message(Kind.STATE, (self._first + index,), pack_state(parts[name]))
            for index, name in enumerate(expected)
        ]
        try:
            answers = self._ask_each(states)
        except ValueError as error:
            raise ValueError(
                f"{error} Remove the backup, or use the rule and cluster that it was made with."
            ) from error
        if any(answer.numbers[0] != Status.OK for answer in answers):
            raise ValueError(
                "The saved state of the parameter service must be finite, and its versions at "
                "least 0, or no push could be taken with it. Received: one that is not, of "
                f"{len(expected)} partitions. Remove the backup (the training was diverging, or "
                "the file is damaged)."
            )

    def _ask_each(self, requests: Sequence[Message]) -> list[Message]:
        """Return the answers to requests about the first parts.

        Raises:
            ServiceLostError: if one is not answered in time.
        """
        calls = self._start_each(dict(enumerate(requests)))
        return [result_of(calls[i], self._channel(i)) for i in range(len(requests))]

    def pull(self, is_exact: bool = False) -> Answer:
        """Read the center.

        Args:
            is_exact: whether it arrives as float32 even if other messages are rounded.
        """
        pulls = {i: Message(Kind.PULL, (self._first + i, int(is_exact))) for i in self._indices}
        return self._collect(list(self._start_each(pulls).values()))

    def start_push(
        self, changes: Sequence[Vector], versions: Sequence[int], samples: int, number: int = 0
    ) -> PendingPush:
        """Send a change of every partition; do not wait for the answer.

        Args:
            changes: float32 vector of each partition.
            versions: version of each partition that this worker last received.
            samples: number of samples in the change.
            number: number of the push, from 1, which makes it count once however often it is sent;
                0 for none.
        """
        encoded = [self.wire.encode(change) for change in changes]
        requests = [
            Message(
                self.wire.push, (self._first + index, number, int(versions[index]), samples), sent
            )
            for index, (sent, _) in enumerate(encoded)
        ]
        calls = list(self._start_each(dict(enumerate(requests))).values())
        return PendingPush(requests, calls, [left for _, left in encoded], self._collect)

    def push_again(self, push: PendingPush, indices: Sequence[int]) -> None:
        """Resend partitions that were not answered; their number stays."""
        again = self._start_each({index: push.requests[index] for index in indices})
        for index, call in again.items():
            push.calls[index] = call

    def _channel(self, index: int) -> Channel:
        return self._channels[self._places[index]]

    def _start_each(self, requests: Mapping[int, Message]) -> dict[int, Future[Message]]:
        """Send requests about parts, a few to each process at a time.

        Where pushes wait for a turn, all at once: a worker that comes back while another's push
        is at half of the parts has its turn earlier at the first ones than at the last.
        """
        calls: dict[int, Future[Message]] = {index: Future() for index in requests}
        most = len(requests) if self._may_wait else UNDER_WAY
        for place, channel in enumerate(self._channels):
            own = [index for index in requests if self._places[index] == place]
            _Sender(channel, [(requests[index], calls[index]) for index in own], most).send()
        return calls

    def _collect(self, calls: Sequence[Future[Message]]) -> Answer:
        """Wait for all answers, each for the time-out after the one before of its process."""
        lost: dict[int, ServiceLostError] = {}
        heard = dict.fromkeys(self._places, time.monotonic())
        answers = []
        for index, call in enumerate(calls):
            place, answer = self._places[index], None
            try:
                if place not in lost or call.done():
                    answer = self._wait_for(call, self._channels[place], heard[place])
                    heard[place] = time.monotonic()
            except ServiceLostError as error:
                lost.setdefault(place, error)
            answers.append(answer)
        numbers = [(NO_ANSWER, -1) if a is None else a.numbers for a in answers]
        statuses, versions = np.array(numbers, np.int64).T
        values = [self._values(answer) for answer in answers]
        latest = [a.vectors[1] if a and a.kind in _HAVE_VALUES else None for a in answers]
        return Answer(statuses, versions, values, latest, next(iter(lost.values()), None))

    def _wait_for(self, call: Future[Message], channel: Channel, since: float) -> Message:
        while True:
            left = channel.timeout_seconds - (time.monotonic() - since)
            try:
                return result_of(call, channel, channel.timeout_seconds and max(left, 1e-9))
            except ServiceLostError:
                if call.done() or not self._may_wait:
                    raise
                # It may be another's turn. A service that is there answers at once; while a part
                # elsewhere is lost, whose turn it is may have gone on alone.
                self.greet()
                since = time.monotonic()

    def _values(self, answer: Message | None) -> Vector | None:
        if answer is None or answer.kind not in _HAVE_VALUES:
            return None
        if answer.kind == self.wire.answer:
            return self.wire.decode_answer(answer.vectors[0])
        return answer.vectors[0]


class _Sender:
    """Sends requests one after another as answers arrive, from the threads that receive these."""

    def __init__(
        self,
        channel: Channel,
        requests: Sequence[tuple[Message, Future[Message]]],
        most_under_way: int,
    ) -> None:
        self._channel, self._waiting = channel, collections.deque(requests)
        self._most_under_way = most_under_way
        self._under_way = 0
        self._is_sending = False
        self._lock = threading.Lock()

    def send(self) -> None:
        """Send what may be in flight; not from within itself, as where answers are immediate."""
        with self._lock:
            if self._is_sending:
                return
            self._is_sending = True
        while True:
            with self._lock:
                if self._under_way >= self._most_under_way or not self._waiting:
                    self._is_sending = False
                    return
                request, call = self._waiting.popleft()
                self._under_way += 1
            answer = self._channel.start(request)
            answer.add_done_callback(lambda done, call=call: self._pass_on(done, call))  # type: ignore[misc]

    def _pass_on(self, done: Future[Message], call: Future[Message]) -> None:
        with self._lock:
            self._under_way -= 1
            following = () if done.exception() is None else tuple(self._waiting)
            if following:
                self._waiting.clear()
        for each in (call, *(other for _, other in following)):
            pass_on(each, done)
        self.send()


@dataclasses.dataclass(frozen=True)
class PendingPush:
    """A push whose answer is in flight."""

    requests: list[Message]
    calls: list[Future[Message]]
    residuals: list[Vector]
    _collect: Callable[[Sequence[Future[Message]]], Answer]

    @property
    def has_answer(self) -> bool:
        """Whether all answers have arrived."""
        return all(call.done() for call in self.calls)

    def check(self) -> None:
        """Raise the error of a message that has failed by now: it could not even be sent."""
        for call in self.calls:
            if call.done():
                with translated():
                    call.result()

    def answer(self) -> Answer:
        """Wait for the answer; a silent service has the time-out for each part."""
        return self._collect(self.calls)
