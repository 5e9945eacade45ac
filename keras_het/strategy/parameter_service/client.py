"""Talks to the parameter service from inside a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_het.strategy.parameter_service.admission import Status
from keras_het.strategy.parameter_service.function_client import (
    FunctionClient,
    NoAnswerError,
    error_of,
)
from keras_het.strategy.parameter_service.partitions import Partitions, place_partitions
from keras_het.strategy.parameter_service.wire import FloatWire, Wire
from keras_het.strategy.rules import Signal


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back from the service, tensors that are there when the messages are.

    Args:
        statuses: `Status` of each partition, -1 where no answer came in time; int32 of shape
            [num_partitions].
        versions: version of each partition, -1 where there is no answer; int64 likewise.
        partitions: the values of each partition; where there is no answer, those given as fallback.
        residuals: what a push did not carry, for each partition; empty for a pull.
    """

    statuses: Any
    versions: Any
    partitions: list[Any]
    residuals: list[Any] = dataclasses.field(default_factory=list)


NO_ANSWER = -1
_TAKEN = (int(Status.OK), int(Status.REPEATED))


class ParameterClient:
    """Pulls from and pushes to a `ParameterService`.

    `pull` and `push` may be called in a `tf.function`: all partitions are on their way at once, and
    the graph goes on until an answer is read. Nothing raises in the graph; an answer that did not
    come in time has the status `NO_ANSWER`.

    Args:
        address: "host:port" of the service, or of each of several that share the partitions
            (`place_partitions` says which has which).
        partitions: how the weights are cut, as the service has it.
        credential: as the service has it.
        client: number of this worker, from 0.
        timeout_seconds: for each message.
        wire: how values travel, as the service has it.
        prefix: of the service's functions.

    Raises:
        ConnectionError: if the service does not answer in time.
        PermissionError: if it refuses the credential: another secret, model or rule.
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
        self.partitions = partitions
        self._client = tf.constant(client, tf.int32)
        addresses = [address] if isinstance(address, str) else list(address)
        self._places = place_partitions(partitions.sizes, len(addresses))
        self._services = [FunctionClient(at, credential, timeout_seconds) for at in addresses]
        self.greet()

    @property
    def wire_is_exact(self) -> bool:
        """Whether nothing is left of a message that was sent."""
        return self._wire.is_exact

    def greet(self) -> None:
        """Asks whether this worker is let in.

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
                "secret, model (names, shapes and types of the weights) or update rule differs. "
                "Use the same script and secret on every task."
            )

    def restore(self, center: Sequence[Any], states: Sequence[Any] | None = None) -> None:
        """Sets the center, and versions and the rule's state if they are given.

        Args:
            center: float32 vector of each partition.
            states: what `export` gave.

        Raises:
            ConnectionError: if a part is not answered in time.
        """
        nothing = tf.zeros([0], tf.string)
        states = [nothing] * len(center) if states is None else states
        spec = tf.TensorSpec([], tf.int32)
        calls = [
            self._ask("restore", index, [values, state], spec)
            for index, (values, state) in enumerate(zip(center, states, strict=True))
        ]
        for index, call in enumerate(calls):
            if not bool(call.is_ok()) or int(call.get_value()) != Status.OK:
                raise ConnectionError(
                    f"The parameter service did not take partition {index}. Received: "
                    f"{_error_of(call)}. Start it anew, and check that the weights are finite."
                )

    def signal(self, signal: Signal, client: int | None = None) -> int | None:
        """Tells the rule something of a worker.

        Args:
            signal: what.
            client: number of the worker; this one by default.

        Returns:
            The stage that training is in, None if there is no answer in time.
        """
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32))
        about = self._client if client is None else tf.constant(client)
        arguments = [about, tf.constant(int(signal))]
        indices = range(len(self.partitions.sizes))
        if signal == Signal.NOTHING:
            indices = range(1)
        calls = [self._ask("signal", index, arguments, specs) for index in indices]
        if not all(bool(call.is_ok()) for call in calls):
            return None
        return int(calls[0].get_value()[1])

    def latest_sequence(self) -> int:
        """The largest number of a push that the service knows of this worker; 0 for none.

        Raises:
            ConnectionError: if a part is not answered in time.
        """
        numbers = self._ask_all("latest", [self._client], tf.TensorSpec([], tf.int64))
        return max(int(number) for number in numbers)

    def export(self) -> list[Any]:
        """Version and the rule's state of each partition, vectors of serialized tensors.

        Raises:
            ConnectionError: if a part is not answered in time.
        """
        return self._ask_all("export", [], tf.TensorSpec([None], tf.string))

    def _ask_all(self, method: str, arguments: list[Any], spec: Any) -> list[Any]:
        """What each partition answers after its status."""
        specs = (tf.TensorSpec([], tf.int32), spec)
        indices = range(len(self.partitions.sizes))
        calls = [self._ask(method, index, arguments, specs) for index in indices]
        for call in calls:
            if not bool(call.is_ok()):
                raise ConnectionError(
                    f"The parameter service did not answer in time. Received: {_error_of(call)}."
                )
        return [call.get_value()[1] for call in calls]

    def pull(self, fallback: Sequence[Any]) -> Answer:
        """Reads the center.

        Args:
            fallback: values of each partition to go on with where no answer comes.
        """
        calls = [self._call("pull", index, []) for index in range(len(self.partitions.sizes))]
        return _collect(calls, fallback, self._wire)

    def push(
        self,
        changes: Sequence[Any],
        versions: Any,
        samples: Any,
        fallback: Sequence[Any],
        sequence: Any = 0,
    ) -> Answer:
        """Sends a change of every partition and gets the rule's answer.

        Args:
            changes: float32 vector of each partition.
            versions: version of each partition that this worker last got, int64 of shape
                [num_partitions].
            samples: samples behind the change, scalar.
            fallback: values of each partition to go on with where no answer comes.
            sequence: number of the push, from 1, so that it counts once however often it is sent; 0
                for none.

        Returns:
            The answer. Its `residuals` are what the format could not carry, and the whole change
            where the service did not accept it: add them to the next change.
        """
        return self.start_push(changes, versions, samples, sequence).answer(fallback)

    def start_push(
        self, changes: Sequence[Any], versions: Any, samples: Any, sequence: Any = 0
    ) -> PendingPush:
        """Sends as `push` does, and does not wait for the answer.

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
        calls = [self._call("push", index, message) for index, message in enumerate(messages)]
        residuals = [residual for _, residual in encoded]
        return PendingPush(calls, list(changes), residuals, self._wire, messages)

    def push_again(self, push: PendingPush, index: int) -> None:
        """Sends a partition again, which was not answered, or was told to wait.

        Args:
            push: what was sent, with a number, so that it counts once.
            index: of the partition.
        """
        push.calls[index] = self._call("push", index, push.messages[index])

    def _call(self, method: str, index: int, arguments: list[Any]) -> Any:
        specs = (
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([None], tf.float32),
        )
        return self._ask(method, index, arguments, specs)

    def _ask(self, method: str, index: int, arguments: list[Any], specs: Any) -> Any:
        service = self._services[self._places[index]]
        return service.call(f"{self._prefix}{method}_{index}", arguments, specs)


@dataclasses.dataclass(frozen=True)
class PendingPush:
    """A push whose answer travels.

    Args:
        calls: one for each partition.
        changes: what was to be sent.
        residuals: what the format did not carry.
        wire: the format.
        messages: what was sent for each partition.
    """

    calls: list[Any]
    changes: list[Any]
    residuals: list[Any]
    wire: Wire
    messages: list[list[Any]]

    def wait(self) -> None:
        """Waits for the answer, at most for the time-out of a message."""
        for call in self.calls:
            call.is_ok()

    def answer(self, fallback: Sequence[Any]) -> Answer:
        """Waits for the answer, and gives it.

        Args:
            fallback: values of each partition to go on with where no answer comes.
        """
        answer = _collect(self.calls, fallback, self.wire)
        residuals = [
            tf.where(tf.reduce_any(tf.equal(answer.statuses[index], _TAKEN)), residual, change)
            for index, (residual, change) in enumerate(
                zip(self.residuals, self.changes, strict=True)
            )
        ]
        return dataclasses.replace(answer, residuals=residuals)


def _collect(calls: Sequence[Any], fallback: Sequence[Any], wire: Wire) -> Answer:
    """Waits for all answers, in the graph."""
    results = [_result(call, values, wire) for call, values in zip(calls, fallback, strict=True)]
    statuses, versions, partitions = zip(*results, strict=True)
    return Answer(tf.stack(statuses), tf.stack(versions), list(partitions))


def _result(call: Any, fallback: Any, wire: Wire) -> tuple[Any, Any, Any]:
    def received() -> tuple[Any, Any, Any]:
        status, version, received_values = call.get_value()
        has_values = (int(Status.OK), int(Status.STALE), int(Status.REPEATED))
        accepted = tf.reduce_any(tf.equal(status, has_values))
        size = int(fallback.shape[0])
        values = tf.cond(
            accepted, lambda: wire.decode_answer(received_values, size), lambda: fallback
        )
        return status, version, values

    def nothing() -> tuple[Any, Any, Any]:
        return tf.constant(NO_ANSWER), tf.constant(-1, tf.int64), fallback

    status, version, values = tf.cond(call.is_ok(), received, nothing)
    for scalar in (status, version):
        scalar.set_shape([])
    return status, version, tf.ensure_shape(values, fallback.shape)


def _error_of(call: Any) -> str:
    if bool(call.is_ok()):
        value = call.get_value()
        return Status(int(value)).name
    code, text = error_of(call)
    return f"error {code}, {text!r}"
