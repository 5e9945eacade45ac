"""A participant's requests to the processes that hold the center, part by part."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
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
from keras_het.exchange.message import NO_ANSWER, Kind, Message, Vector
from keras_het.exchange.server import Handle, answer_to

SERVICE = "center"
"""Name of the service of center and ledger on its server."""
ADVICE = ' Its process may be gone; give on_service_loss="continue" to continue without it.'
"""What to do where the loss of a service is an error."""
UNDER_WAY = 2
"""Messages with values that are in flight to another process; more take memory only."""


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


class UnknownTrainingError(ServiceLostError):
    """A process answers, and does not know this training: it was restarted, or not yet asked."""


class Channel:
    """The channel to a process of the service: this one, where `handle` is called, or another."""

    # `timeout_seconds` is for each answer, and for connecting; 0 for no limit.

    most_under_way = sys.maxsize
    """Messages with values that a client has in flight to the process."""

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

    most_under_way = UNDER_WAY

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
    """Client that pulls one vector or two from the service and pushes changes to them.

    Nothing raises for a lost service but where it says so: an answer that did not arrive in time
    has the status `NO_ANSWER`, and messages that were to follow are not waited for.

    Args:
        channels: to the processes that share the partitions (`spread_partitions` gives the
            assignment).
        partitions: the cuts of the first vector, the same as the service's.
        wire: format of its values, the same as the service's.
        may_wait: whether a push may have to wait for its turn, however long that takes.
        state: the cuts of the second vector, whose parts follow and are always sent in full.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        partitions: Partitions,
        wire: Wire | None = None,
        may_wait: bool = False,
        state: Partitions | None = None,
    ) -> None:
        self.partitions, self._may_wait = partitions, may_wait
        self.wire = wire or FloatWire()
        self._channels = list(channels)
        sizes = partitions.sizes if state is None else partitions.sizes + state.sizes
        self._places = spread_partitions(sizes, len(channels))
        self.num_parts = len(sizes)
        self._indices, self._own_indices = range(len(sizes)), range(len(partitions.sizes))

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
            self._ask_each([Message(Kind.LEAVE, (i, worker)) for i in self._indices])
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
        """Return versions and rule state of the first vector: name to array.

        Raises:
            ServiceLostError: if a process does not answer in time.
        """
        answers = self._ask_each([Message(Kind.EXPORT, (i,)) for i in self._own_indices])
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
        self._ask_each([Message(Kind.RESTORE, (i,), vectors) for i, vectors in both])

    def _restore_state(self, saved: Mapping[str, Vector]) -> None:
        parts: dict[str, dict[str, Vector]] = collections.defaultdict(dict)
        for name, array in saved.items():
            parts[name.partition("/")[0]][name.partition("/")[2]] = array
        expected = [f"part_{index}" for index in self._own_indices]
        if sorted(parts) != sorted(expected):
            raise ValueError(
                "The saved state is not that of a parameter service, or of another model. "
                f"Received: {sorted(saved)}; expected: {len(expected)} partitions. Remove the "
                "backup, or use the model and cluster that it was made with."
            )
        states = [
            Message(Kind.STATE, (index,), pack_state(parts[name]))
            for index, name in enumerate(expected)
        ]
        try:
            self._ask_each(states)
        except ValueError as error:
            raise ValueError(
                f"{error} Remove the backup, or use the rule and cluster that it was made with."
            ) from error

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
        pulls = {i: Message(Kind.PULL, (i, int(is_exact))) for i in self._indices}
        return self._collect(list(self._start_each(pulls).values()))

    def start_push(
        self, changes: Sequence[Vector], versions: Sequence[int], samples: int, number: int = 0
    ) -> PendingPush:
        """Send a change of every partition; do not wait for the answer.

        Args:
            changes: float32 vector of each partition, or of the first ones.
            versions: version of each partition that this worker last received.
            samples: number of samples in the change.
            number: number of the push, from 1, which makes it count once however often it is sent;
                0 for none.
        """
        full = FloatWire()
        wires = [self.wire if i in self._own_indices else full for i in range(len(changes))]
        encoded = [wire.encode(change) for wire, change in zip(wires, changes, strict=True)]
        requests = [
            Message(wires[index].push, (index, number, int(versions[index]), samples), sent)
            for index, (sent, _) in enumerate(encoded)
        ]
        calls = list(self._start_each(dict(enumerate(requests))).values())
        left = [residual for _, residual in encoded]
        return PendingPush(
            requests, calls, left, np.array(versions[: len(changes)]), samples, self._collect
        )

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
        for place, channel in enumerate(self._channels):
            own = [
                (request, calls[index])
                for index, request in requests.items()
                if self._places[index] == place
            ]
            _send(channel, own, len(own) if self._may_wait else channel.most_under_way)
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
        (values, _) = answer.vectors
        return values if answer.kind is Kind.VALUES else self.wire.decode_answer(values)


def _send(channel: Channel, requests: list[tuple[Message, Future[Message]]], most: int) -> None:
    """Send requests, some of them as answers to others arrive; none after one that is lost."""
    waiting = collections.deque(requests[most:])

    def start(request: Message, call: Future[Message]) -> None:
        channel.start(request).add_done_callback(partial(take, call))

    def take(call: Future[Message], done: Future[Message]) -> None:
        is_lost = done.exception() is not None
        pass_on(call, done)
        while waiting:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                request, following = waiting.popleft()
                if not is_lost:
                    start(request, following)
                    return
                pass_on(following, done)

    for request, call in requests[:most]:
        start(request, call)


@dataclasses.dataclass
class PendingPush:
    """A push whose answer is in flight; it can be sent again and counts once."""

    requests: list[Message]
    calls: list[Future[Message]]
    residuals: list[Vector]
    versions: np.ndarray
    samples: int
    _collect: Callable[[Sequence[Future[Message]]], Answer]
    sent: list[Vector] = dataclasses.field(default_factory=list)  # from which its sender continues

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
