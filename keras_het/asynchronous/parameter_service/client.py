"""Client of the parameter service, for use inside a training step."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.part import LARGEST_PIECE
from keras_het.asynchronous.parameter_service.wire import FloatWire, Wire, check_fits
from keras_het.asynchronous.rules import Signal
from keras_het.rpc.admission import Status
from keras_het.rpc.channel import Call, Channel, FunctionClient, NoAnswerError, error_of
from keras_het.rpc.vector import Partitions, spread_partitions


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
        channels: how to reach the services, in place of new connections to the addresses.

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
        channels: Sequence[Channel] = (),
    ) -> None:
        self._prefix = prefix
        self._wire = wire or FloatWire()
        check_fits(self._wire, partitions)
        self.partitions = partitions
        self._client = tf.constant(client, tf.int32)
        addresses = [address] if isinstance(address, str) else list(address)
        self._places = spread_partitions(partitions.sizes, len(addresses))
        self._loads = [self._places.count(place) for place in range(len(addresses))]
        self._services: Sequence[Channel] = channels or [
            FunctionClient(at, credential, timeout_seconds) for at in addresses
        ]
        self.answers_at_once = all(service.answers_at_once for service in self._services)
        self.greet()

    @property
    def wire_is_exact(self) -> bool:
        """Whether a message leaves no residual."""
        return self._wire.is_exact

    def use_wire(self, wire: Wire) -> None:
        """Send in another format from now on, of a kind that the service accepts."""
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

    def _greet(self, service: Channel) -> None:
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
        self, center: Sequence[tf.Tensor], saved: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Set the center, and before it the versions and rule state if given.

        Args:
            center: float32 vector of each partition.
            saved: the result of `export`.

        Raises:
            ConnectionError: if a part does not answer in time.
            ValueError: if the state belongs to another model, rule or number of workers, is not
                finite, or has a version below 0.
        """
        if saved is not None:
            self._restore_state(saved)
        calls = self._call_each("restore", [[values] for values in center], _STATUS)
        _check_taken(calls, range(len(calls)))

    def _restore_state(self, saved: Mapping[str, np.ndarray]) -> None:
        self._check_names(saved)
        indices, messages = [], []
        for index in range(len(self.partitions.sizes)):
            sizes = saved[f"part_{index}/sizes"]
            for number, (place, start) in enumerate(_piece_places(sizes)):
                piece = saved[f"part_{index}/{number}"].tobytes()
                indices.append(index)
                messages.append(
                    [tf.constant(sizes, tf.int64), *_constants(place, start), tf.constant(piece)]
                )
        calls = self._call_each("set_state", messages, _STATUS, indices=indices)
        statuses = {int(call.get_value()) for call in calls if bool(call.is_ok())}
        if int(Status.NOT_FINITE) in statuses:
            raise ValueError(
                "The saved state of the parameter service must be finite, and its versions at "
                "least 0, or no push could be taken with it. Received: one that is not, of "
                f"{len(self.partitions.sizes)} partitions. Remove the backup (the training was "
                "diverging, or the file is damaged)."
            )
        if statuses - {int(Status.OK)}:
            raise ValueError(
                "The saved state of the parameter service is that of another rule or number of "
                f"workers. Received: variables of {saved['part_0/sizes'].tolist()} elements in "
                "partition 0. Remove the backup, or use the rule and cluster that it was made with."
            )
        _check_taken(calls, indices)

    def _check_names(self, saved: Mapping[str, np.ndarray]) -> None:
        expected = {f"part_{index}" for index in range(len(self.partitions.sizes))}
        has_sizes = all(f"{part}/sizes" in saved for part in expected)
        if not has_sizes or {name.partition("/")[0] for name in saved} != expected:
            raise ValueError(
                "The saved state is not that of a parameter service, or of another model. "
                f"Received: {sorted(saved)}; expected: {len(expected)} partitions. Remove the "
                "backup, or use the model and cluster that it was made with."
            )

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
        """Make the service reject further pushes; return once the last one is complete."""
        deadline = time.monotonic() + self._services[0].timeout_seconds
        while not all(self._ask_all("close", [], tf.TensorSpec([], tf.bool))):
            if time.monotonic() > deadline:
                _logger.warning("A push to the parameter service has not come to its end.")
                break
            time.sleep(_POLL_SECONDS)

    def latest_sequence(self) -> int:
        """Return the service's largest known push number of this worker; 0 for none."""
        numbers = self._ask_all("latest", [self._client], tf.TensorSpec([], tf.int64))
        return max(int(number) for number in numbers)

    def export(self) -> dict[str, np.ndarray]:
        """Return versions and rule state, in pieces that fit into messages: name to array.

        Raises:
            ConnectionError: if a part does not answer in time, or refuses.
        """
        found: dict[str, np.ndarray] = {}
        pieces: dict[str, tf.Tensor] = {}
        following: dict[str, tuple[int, int, int]] = {}
        firsts = self._export([(index, 0, 0) for index in range(len(self.partitions.sizes))])
        for index, (sizes, first) in enumerate(firsts):
            found[f"part_{index}/sizes"] = sizes.numpy()
            pieces[f"part_{index}/0"] = first
            for number, place in enumerate(_piece_places(sizes.numpy())[1:], start=1):
                following[f"part_{index}/{number}"] = index, *place
        answers = self._export(list(following.values()))
        pieces |= {name: piece for name, (_, piece) in zip(following, answers, strict=True)}
        return found | {n: np.frombuffer(piece.numpy(), np.uint8) for n, piece in pieces.items()}

    def _export(self, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Fetch variable sizes and the piece, for given partitions, variables and elements."""
        specs = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.string))
        messages = [_constants(place, start) for _, place, start in pieces]
        return self._ask_each("export", messages, specs, [index for index, *_ in pieces])

    def _ask_all(
        self, method: str, arguments: list[tf.Tensor], spec: tf.TensorSpec
    ) -> list[tf.Tensor]:
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
        """Send like `push`, with the same arguments, but do not wait for the answer."""
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

        is_long = max(self._loads) > PARTITIONS_UNDER_WAY and not self.answers_at_once
        if tf.executing_eagerly() and is_long:
            push.send(send)
        else:
            send()
        return push

    def push_again(self, push: PendingPush, indices: Sequence[int]) -> None:
        """Resend partitions that were not answered, or were told to wait; their number stays."""
        push.wait()
        messages = [push.messages[index] for index in indices]
        calls = self._call_each("push", messages, _VALUES, indices=indices)
        for index, call in zip(indices, calls, strict=True):
            push.calls[index] = call

    def ask_turns(self, push: PendingPush, indices: Sequence[int]) -> list[int]:
        """Ask for the turn of partitions that were told to wait, by messages without values.

        Returns:
            For each partition `Status.WAIT`, `NO_ANSWER`, or a status that allows sending it again.
        """
        messages = [[push.messages[index][0], push.messages[index][2]] for index in indices]
        calls = self._call_each("turn", messages, _STATUS, indices=indices)
        return [int(call.get_value()) if bool(call.is_ok()) else NO_ANSWER for call in calls]

    def _call_each(
        self,
        method: str,
        messages: Sequence[list[tf.Tensor]],
        specs: tf.TensorSpec | tuple[tf.TensorSpec, ...],
        calls: list[Call] | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[Call]:
        """Call a function of several partitions, each once an earlier call has its answer.

        In eager mode, this waits until the last calls are in flight.
        """
        calls = [] if calls is None else calls
        sizes = self.partitions.sizes
        under_way: list[list[Call]] = [[] for _ in self._services]
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
        self._sender.append(_start_thread(work))

    def watch(self) -> None:
        """Wait in the background; `has_answer` is valid from now on."""
        self._watcher.append(_start_thread(self.wait))

    @property
    def has_answer(self) -> bool:
        """Whether all awaited answers have arrived or will not come; only if watched."""
        return bool(self._watcher) and not self._watcher[0].is_alive()

    def wait(self) -> None:
        for thread in self._sender:
            thread.join()
        for call in self.calls:
            call.is_ok()

    def answer(self, fallback: Iterable[tf.Tensor]) -> Answer:
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


def _piece_places(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return the pieces of variables of these sizes: number of the variable and first element."""
    return [
        (place, start)
        for place, size in enumerate(sizes)
        for start in range(0, size, LARGEST_PIECE)
    ]


def _constants(place: int, start: int) -> list[tf.Tensor]:
    return [tf.constant(place, tf.int32), tf.constant(start, tf.int64)]


def _error_of(call: Any) -> str:
    if bool(call.is_ok()):
        value = call.get_value()
        return Status(int(value)).name
    code, text = error_of(call)
    return f"error {code}, {text!r}"
