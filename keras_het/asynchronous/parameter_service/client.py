"""Client of the parameter service, for use inside a training step."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.saved_state import (
    NOT_FINITE_STATE,
    REMOVE_BACKUP,
    PartState,
    piece_places,
)
from keras_het.asynchronous.parameter_service.wire import FloatWire, Wire, check_fits
from keras_het.asynchronous.rules import Signal
from keras_het.rpc.admission import Status
from keras_het.rpc.function_client import (
    FunctionClient,
    NoAnswerError,
    error_of,
)
from keras_het.rpc.partitions import Partitions, spread_partitions


@dataclasses.dataclass(frozen=True)
class Answer:
    """The service's answer, as tensors that exist once the messages arrive.

    Args:
        statuses: `Status` of each partition, -1 if no answer arrived in time; int32 of shape
            [num_partitions].
        versions: version of each partition, -1 without an answer; int64 of the same shape.
        partitions: the values of each partition; the given fallback without an answer.
        find_residuals: computes `residuals`.
    """

    statuses: tf.Tensor
    versions: tf.Tensor
    partitions: list[tf.Tensor]
    find_residuals: Callable[[], list[tf.Tensor]] = list

    @property
    def residuals(self) -> list[tf.Tensor]:
        """The part of a push that was not carried, for each partition; empty for a pull."""
        return self.find_residuals()


NO_ANSWER = -1
PARTITIONS_UNDER_WAY = 2
"""Messages that a client has in flight to each process of the service; more are slower."""
_SHORTEST_SECONDS = 1e-3
_POLL_SECONDS = 0.005
_logger = logging.getLogger("keras_het")
_TAKEN = (int(Status.OK), int(Status.REPEATED))
_STATUS = tf.TensorSpec([], tf.int32)
_VALUES = (
    tf.TensorSpec([], tf.int32),
    tf.TensorSpec([], tf.int64),
    tf.TensorSpec([None], tf.float32),
)


class ParameterClient:
    """Client that pulls from and pushes to a `ParameterService`.

    `pull` and `push` may be called in a `tf.function`: messages are sent one after another as
    answers arrive, and the graph continues until an answer is read. Few are in flight at a time,
    because both sides keep several copies of each while it travels. Nothing raises in the graph; an
    answer that did not arrive in time has the status `NO_ANSWER`, and messages that were to follow
    are not waited for.

    Args:
        address: "host:port" of the service, or of each of several that share the partitions
            (`spread_partitions` gives the assignment).
        partitions: the cuts of the weights, the same as the service's.
        credential: the same as the service's.
        client: this worker's number, from 0.
        timeout_seconds: timeout of each message.
        wire: format of the values, the same as the service's.
        prefix: prefix of the service's functions.

    Raises:
        ConnectionError: if the service does not answer in time.
        PermissionError: if it refuses the credential: another secret, model or rule.
        ValueError: if a partition is too large for a message of the format.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        partitions: Partitions,
        credential: bytes,
        client: int,
        timeout_seconds: float = 10.0,
        wire: Wire | None = None,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._wire = wire or FloatWire()
        check_fits(self._wire, partitions)
        self.partitions = partitions
        self._client = tf.constant(client, tf.int32)
        addresses = [address] if isinstance(address, str) else list(address)
        self._places = spread_partitions(partitions.sizes, len(addresses))
        self._loads = [self._places.count(place) for place in range(len(addresses))]
        self._services = [FunctionClient(at, credential, timeout_seconds) for at in addresses]
        self.greet()

    @property
    def wire_is_exact(self) -> bool:
        """Whether a message leaves no residual."""
        return self._wire.is_exact

    def use_wire(self, wire: Wire) -> None:
        """Send in another format from now on.

        Args:
            wire: format of a kind that the service accepts, such as another fraction of the values.

        Raises:
            ValueError: if a partition is too large for a message of the format.
        """
        check_fits(wire, self.partitions)
        self._wire = wire

    def greet(self) -> None:
        """Ask whether this worker is admitted.

        Raises:
            ConnectionError: if the service does not answer in time.
            PermissionError: if it refuses the credential.
        """
        for service in self._services:
            self._greet(service)

    def _greet(self, service: FunctionClient) -> None:
        try:
            status = service.ask(f"{self._prefix}hello", [], tf.TensorSpec([], tf.int32))
        except NoAnswerError as error:
            raise ConnectionError(
                f"The parameter service at {error} Start it first, and check that the address can "
                "be reached from here."
            ) from error
        if int(status) != Status.OK:
            raise PermissionError(
                f"The parameter service at {service.address} refused this worker: its shared "
                "secret, model (names, shapes and types of the weights), update rule or messages "
                "(wire, partition_bytes) differs. Use the same script and secret on every task."
            )

    def restore(
        self, center: Sequence[tf.Tensor], states: Sequence[PartState] | None = None
    ) -> None:
        """Set the center, and before it the versions and rule state if given.

        Args:
            center: float32 vector of each partition.
            states: the result of `export`.

        Raises:
            ConnectionError: if a part does not answer in time.
            ValueError: if the states belong to another rule or number of workers, are not finite,
                or have a version below 0.
        """
        if states is not None:
            self._restore_states(states)
        calls = self._call_each("restore", [[values] for values in center], _STATUS)
        _check_taken(calls, range(len(calls)))

    def _restore_states(self, states: Sequence[PartState]) -> None:
        pieces = [
            (index, state.sizes, *place, piece)
            for index, state in enumerate(states)
            for place, piece in zip(piece_places(state.sizes), state.pieces, strict=True)
        ]
        messages = [
            [tf.constant(sizes, tf.int64), *_constants(place, start), tf.constant(piece)]
            for _, sizes, place, start, piece in pieces
        ]
        indices = [index for index, *_ in pieces]
        calls = self._call_each("set_state", messages, _STATUS, indices=indices)
        statuses = {int(call.get_value()) for call in calls if bool(call.is_ok())}
        if int(Status.NOT_FINITE) in statuses:
            raise ValueError(
                f"{NOT_FINITE_STATE} Received: one that is not, of {len(states)} partitions. "
                f"{REMOVE_BACKUP}"
            )
        if statuses - {int(Status.OK)}:
            raise ValueError(
                "The saved state of the parameter service is that of another rule or number of "
                f"workers. Received: variables of {states[0].sizes} elements in partition 0. "
                "Remove the backup, or use the rule and cluster that it was made with."
            )
        _check_taken(calls, indices)

    def signal(self, signal: Signal, client: int | None = None) -> int | None:
        """Send the rule a signal about a worker.

        Args:
            signal: the signal.
            client: the worker's number; by default this worker's.

        Returns:
            The stage of training, None if no answer arrives in time.
        """
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32))
        about = self._client if client is None else tf.constant(client)
        arguments = [about, tf.constant(int(signal))]
        count = 1 if signal == Signal.NOTHING else len(self.partitions.sizes)
        calls = self._call_each("signal", [arguments] * count, specs)
        if not all(bool(call.is_ok()) for call in calls):
            return None
        return int(calls[0].get_value()[1])

    def close_training(self) -> None:
        """Make the service reject further pushes; return once the last one is complete.

        Raises:
            ConnectionError: if a part does not answer in time, or refuses.
        """
        deadline = time.monotonic() + self._services[0].timeout_seconds
        while not all(self._ask_all("close", [], tf.TensorSpec([], tf.bool))):
            if time.monotonic() > deadline:
                _logger.warning("A push to the parameter service has not come to its end.")
                break
            time.sleep(_POLL_SECONDS)

    def latest_sequence(self) -> int:
        """Return the service's largest known push number of this worker; 0 for none.

        Raises:
            ConnectionError: if a part does not answer in time, or refuses.
        """
        numbers = self._ask_all("latest", [self._client], tf.TensorSpec([], tf.int64))
        return max(int(number) for number in numbers)

    def export(self) -> list[PartState]:
        """Return version and rule state of each partition.

        Raises:
            ConnectionError: if a part does not answer in time, or refuses.
        """
        firsts = self._export([(index, 0, 0) for index in range(len(self.partitions.sizes))])
        sizes = [tuple(int(size) for size in own) for own, _ in firsts]
        rest = [
            (index, *place) for index, own in enumerate(sizes) for place in piece_places(own)[1:]
        ]
        pieces = [[piece] for _, piece in firsts]
        for (index, *_), (_, piece) in zip(rest, self._export(rest), strict=True):
            pieces[index].append(piece)
        return [
            PartState(own, tuple(bytes(piece.numpy()) for piece in found))
            for own, found in zip(sizes, pieces, strict=True)
        ]

    def _export(self, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Fetch variable sizes and the piece, for given partitions, variables and elements."""
        specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.string))
        messages = [_constants(place, start) for _, place, start in pieces]
        return self._ask_each("export", messages, specs, [index for index, *_ in pieces])

    def _ask_all(
        self, method: str, arguments: list[tf.Tensor], spec: tf.TensorSpec
    ) -> list[tf.Tensor]:
        """Return each partition's answer after its status."""
        messages = [arguments] * len(self.partitions.sizes)
        return [values[0] for values in self._ask_each(method, messages, (spec,), None)]

    def _ask_each(
        self,
        method: str,
        messages: Sequence[list[tf.Tensor]],
        specs: tf.TensorSpec | tuple[tf.TensorSpec, ...],
        indices: Sequence[int] | None,
    ) -> list[Any]:
        """Return the partitions' answers to messages, after the status."""
        every = (tf.TensorSpec([], tf.int32), *specs)
        calls = self._call_each(method, messages, every, indices=indices)
        # Wait for all: a caller that drops this client after an error must not free pending calls.
        for call, is_ok in [(call, bool(call.is_ok())) for call in calls]:
            if not is_ok:
                raise ConnectionError(
                    f"The parameter service did not answer in time. Received: {_error_of(call)}."
                )
            if int(call.get_value()[0]) != Status.OK:
                raise ConnectionError(
                    "The parameter service refused a request of this worker, which it let in "
                    f"before. Received: status {Status(int(call.get_value()[0])).name}. It serves "
                    "another training now, or was started with another secret or model."
                )
        return [tuple(call.get_value()[1:]) for call in calls]

    def pull(self, fallback: Iterable[tf.Tensor], exact: bool = False) -> Answer:
        """Read the center.

        Args:
            fallback: values of each partition to use without an answer.
            exact: whether it arrives as float32 even if other messages are rounded.
        """
        method, wire = ("center", FloatWire()) if exact else ("pull", self._wire)
        calls = self._call_each(method, [[]] * len(self.partitions.sizes), _VALUES)
        return _collect(calls, fallback, wire)

    def push(
        self,
        changes: Sequence[tf.Tensor],
        versions: np.ndarray | tf.Tensor,
        samples: float | tf.Tensor,
        fallback: Sequence[tf.Tensor],
        sequence: int | tf.Tensor = 0,
    ) -> Answer:
        """Send a change of every partition and return the rule's answer.

        Args:
            changes: float32 vector of each partition.
            versions: version of each partition that this worker last received, int64 of shape
                [num_partitions].
            samples: number of samples behind the change, scalar.
            fallback: values of each partition to use without an answer.
            sequence: number of the push, from 1, which makes it count once however often it is
                sent; 0 for none.

        Returns:
            The answer. Its `residuals` are the parts that the format could not carry, or the whole
            change if the service did not accept it: add them to the next change.
        """
        return self.start_push(changes, versions, samples, sequence).answer(fallback)

    def start_push(
        self,
        changes: Sequence[tf.Tensor],
        versions: np.ndarray | tf.Tensor,
        samples: float | tf.Tensor,
        sequence: int | tf.Tensor = 0,
    ) -> PendingPush:
        """Send like `push`, but do not wait for the answer.

        Args:
            changes: as for `push`.
            versions: as for `push`.
            samples: as for `push`.
            sequence: as for `push`.
        """
        samples = tf.cast(samples, tf.float32)
        sequence = tf.cast(sequence, tf.int64)
        encoded = [self._wire.encode(change) for change in changes]
        messages = [
            [self._client, samples, versions[index], sequence, *sent]
            for index, (sent, _) in enumerate(encoded)
        ]
        residuals = [residual for _, residual in encoded]
        push = PendingPush(self, [], list(changes), residuals, self._wire, messages)

        def send() -> None:
            self._call_each("push", messages, _VALUES, push.calls)

        if tf.executing_eagerly() and max(self._loads) > PARTITIONS_UNDER_WAY:
            push.send(send)
        else:
            send()
        return push

    def push_again(self, push: PendingPush, indices: Sequence[int]) -> None:
        """Resend partitions that were not answered, or were told to wait.

        Args:
            push: the push, with a number, which makes it count once.
            indices: indices of the partitions.
        """
        push.wait()
        messages = [push.messages[index] for index in indices]
        for index, call in zip(
            indices, self._call_each("push", messages, _VALUES, indices=indices), strict=True
        ):
            push.calls[index] = call

    def ask_turns(self, push: PendingPush, indices: Sequence[int]) -> list[int]:
        """Ask whose turn it is, by messages without values, for a rule whose workers wait.

        Args:
            push: the push.
            indices: indices of partitions that were told to wait.

        Returns:
            For each partition `Status.WAIT`, `NO_ANSWER`, or a status that allows sending it again.
        """
        messages = []
        for index in indices:
            client, _, version, *_ = push.messages[index]
            messages.append([client, version])
        calls = self._call_each("turn", messages, _STATUS, indices=indices)
        return [int(call.get_value()) if bool(call.is_ok()) else NO_ANSWER for call in calls]

    def _call_each(
        self,
        method: str,
        messages: Sequence[list[tf.Tensor]],
        specs: tf.TensorSpec | tuple[tf.TensorSpec, ...],
        calls: list[Any] | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a function of several partitions, each once an earlier call has its answer.

        In eager mode, this waits until the last calls are in flight.
        """
        calls = [] if calls is None else calls
        sizes = self.partitions.sizes
        under_way: list[list[Any]] = [[] for _ in self._services]
        for place, message in enumerate(messages):
            index = place if indices is None else indices[place]
            name, at = f"{self._prefix}{method}_{sizes[index]}", self._places[index]
            message = [tf.constant(index), *message]
            earlier, seconds = under_way[at], float(self._services[at].timeout_seconds)
            if len(earlier) < PARTITIONS_UNDER_WAY:
                call = self._services[at].call(name, message, specs)
            else:
                is_ok = earlier[-PARTITIONS_UNDER_WAY].is_ok()
                with tf.control_dependencies([is_ok]):
                    # Do not wait the full time-out for a lost service with each message.
                    seconds = tf.where(is_ok, seconds, _SHORTEST_SECONDS)
                    call = self._services[at].call(name, message, specs, seconds)
            earlier.append(call)
            calls.append(call)
        return calls


@dataclasses.dataclass(frozen=True)
class PendingPush:
    """A push whose answer is in flight.

    It keeps a reference to its client: TensorFlow crashes if one is freed while an answer is
    pending.
    """

    client: object
    calls: list[Any]
    changes: list[tf.Tensor]
    residuals: list[tf.Tensor]
    wire: Wire
    messages: list[list[tf.Tensor]]
    _sender: list[threading.Thread] = dataclasses.field(default_factory=list)
    _watcher: list[threading.Thread] = dataclasses.field(default_factory=list)

    def send(self, work: Callable[[], Any]) -> None:
        """Send in the background."""
        self._sender.append(_start_thread(work))

    def watch(self) -> None:
        """Wait in the background; `has_answer` is valid from now on."""
        self._watcher.append(_start_thread(self.wait))

    @property
    def has_answer(self) -> bool:
        """Whether all awaited answers have arrived or will not come; only if watched."""
        return bool(self._watcher) and not self._watcher[0].is_alive()

    def wait(self) -> None:
        """Wait for the answer."""
        for thread in self._sender:
            thread.join()
        for call in self.calls:
            call.is_ok()

    def answer(self, fallback: Iterable[tf.Tensor]) -> Answer:
        """Wait for the answer and return it."""
        for thread in self._sender:
            thread.join()
        answer = _collect(self.calls, fallback, self.wire)

        def residuals() -> list[tf.Tensor]:
            pairs = zip(self.residuals, self.changes, strict=True)
            return [
                tf.where(tf.reduce_any(tf.equal(answer.statuses[index], _TAKEN)), left, change)
                for index, (left, change) in enumerate(pairs)
            ]

        return dataclasses.replace(answer, find_residuals=residuals)


def _start_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, name="keras_het-push", daemon=True)
    thread.start()
    return thread


def _collect(calls: Sequence[Any], fallback: Iterable[tf.Tensor], wire: Wire) -> Answer:
    """Wait for all answers, in the graph."""
    results = [_result(call, values, wire) for call, values in zip(calls, fallback, strict=True)]
    statuses, versions, partitions = zip(*results, strict=True)
    return Answer(tf.stack(statuses), tf.stack(versions), list(partitions))


def _result(call: Any, fallback: tf.Tensor, wire: Wire) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    def received() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        status, version, received_values = call.get_value()
        has_values = (int(Status.OK), int(Status.STALE), int(Status.REPEATED))
        accepted = tf.reduce_any(tf.equal(status, has_values))
        size = int(fallback.shape[0])
        values = tf.cond(
            accepted, lambda: wire.decode_answer(received_values, size), lambda: fallback
        )
        return status, version, values

    def nothing() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.constant(NO_ANSWER), tf.constant(-1, tf.int64), fallback

    status, version, values = tf.cond(call.is_ok(), received, nothing)
    for scalar in (status, version):
        scalar.set_shape([])
    return status, version, tf.ensure_shape(values, fallback.shape)


def _check_taken(calls: Sequence[Any], indices: Sequence[int]) -> None:
    for index, call in zip(indices, calls, strict=True):
        if not bool(call.is_ok()) or int(call.get_value()) != Status.OK:
            raise ConnectionError(
                f"The parameter service did not take partition {index}. Received: "
                f"{_error_of(call)}. Restart it, and check that the weights are finite."
            )


def _constants(place: int, start: int) -> list[tf.Tensor]:
    return [tf.constant(place, tf.int32), tf.constant(start, tf.int64)]


def _error_of(call: Any) -> str:
    if bool(call.is_ok()):
        value = call.get_value()
        return Status(int(value)).name
    code, text = error_of(call)
    return f"error {code}, {text!r}"
