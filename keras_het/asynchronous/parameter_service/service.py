"""Service that holds the center; workers push to it and pull from it over TensorFlow's RPC."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.bound_function import BoundFunction, PartFunction
from keras_het.asynchronous.parameter_service.part import Part
from keras_het.asynchronous.parameter_service.saved_state import check_values
from keras_het.asynchronous.parameter_service.state_functions import (
    export_function,
    set_state_function,
)
from keras_het.asynchronous.parameter_service.undo import Change, Taken
from keras_het.asynchronous.parameter_service.updates import Updates, nothing
from keras_het.asynchronous.parameter_service.wire import FloatWire, Wire, check_fits
from keras_het.asynchronous.rules import PushMeta, Signal, UpdateRule
from keras_het.rpc.admission import DIVERGED, Status
from keras_het.rpc.function_server import FunctionServer
from keras_het.rpc.gate import Gate
from keras_het.rpc.partitions import Partitions
from keras_het.rpc.served_function import TfFunction, answer_if, hello_function
from keras_het.usable_cpus import usable_cpus

LONGEST_CLOSE_SECONDS = 10.0
"""Time for lock-free pushes still in progress at the end of training."""
LARGEST_NUM_LOCKS = 16
"""Number of locks on a large machine."""
LARGEST_SAMPLES = 2.0**31
"""Largest plausible number of samples of one push."""
_POLL_SECONDS = 0.002
_logger = logging.getLogger("keras_het")


def number_of_locks() -> int:
    """Return how many partitions may be updated at the same time, for atomic rules.

    An update is a tenth of the work of an exchange, so a few are enough; each needs a thread, for
    which the allocator keeps separate memory.
    """
    return min(LARGEST_NUM_LOCKS, max(1, int(usable_cpus()) // 4))


class ParameterService:
    """Real variables in this process, updated and read by functions that others call.

    Each partition of the center has a version that counts its updates; a push states the version
    that the worker last saw. Atomic rules update a partition under one of `number_of_locks()`
    locks, so no push is lost and versions count every one. A push may carry a number: a push whose
    answer was lost can be sent again and counts once. A request with the wrong credential, an
    unknown client or a value that is not finite changes nothing, nor does one that would leave the
    center or the rule's state not finite; after `close_training` no push does.

    Args:
        address: "host:port" to listen on; use 127.0.0.1 unless other machines must connect.
        partitions: the cuts of the weights.
        rule: combines pushes with the center.
        credential: the credential that every request must carry, see `admission.credential`.
        num_clients: number of workers that may push; clients are numbered from 0.
        wire: format of the values.
        staleness_bound: number of updates of a partition since the worker last saw it, beyond which
            a push is rejected: the answer is the center, from which to start over. A push from a
            version that this service has not reached gets the same answer. None for no bound.
        prefix: prefix of the names of its functions, if several services share a server.
        server: server to answer on; by default a new one at `address`.
        indices: numbers of the partitions that it holds, if several services share them; all by
            default.
        awaits_center: whether others can push and pull only after the center has been set or
            restored (status `NO_CENTER`); by default it starts as zeros.

    Raises:
        ValueError: if a partition is too large for a message of the format, or the rule was created
            for fewer workers.
    """

    def __init__(
        self,
        address: str,
        partitions: Partitions,
        rule: UpdateRule,
        credential: bytes,
        num_clients: int,
        wire: Wire | None = None,
        staleness_bound: int | None = None,
        prefix: str = "",
        server: FunctionServer | None = None,
        indices: Sequence[int] | None = None,
        awaits_center: bool = False,
    ) -> None:
        self.address = address
        self._updates = Updates(rule, staleness_bound)
        self._wire = wire or FloatWire()
        check_fits(self._wire, partitions)
        _check_number_of_workers(rule, num_clients)
        self.partitions = partitions
        self._rule = rule
        self._num_clients = num_clients
        self._has_warned = False
        self.indices = tuple(range(len(partitions.sizes)) if indices is None else indices)
        locks = number_of_locks()
        with tf.init_scope(), tf.device("CPU:0"):
            self._parts = [
                Part(
                    partitions.sizes[i],
                    rule,
                    num_clients,
                    f"{prefix}part_{i % locks}",
                    has_center=not awaits_center,
                )
                for i in self.indices
            ]
        self._server = FunctionServer(address) if server is None else server
        gate = Gate(credential)
        # One partition per call: with several critical sections in one call, TensorFlow waits
        # forever.
        for name, make in self._served().items():
            function = PartFunction(make)
            for size, parts in self._parts_of_each_size().items():
                served = function.served(parts, len(partitions.sizes))
                self._server.register(f"{prefix}{name}_{size}", served, gate)
        self._server.register(f"{prefix}hello", hello_function(), gate)

    def _served(self) -> dict[str, Callable[[Part], TfFunction]]:
        """Return, for each client call on a partition, its name and the factory of its function."""
        return {
            "push": self._push_function,
            "pull": self._pull_function,
            "center": functools.partial(self._pull_function, exact=True),
            "export": export_function,
            "restore": self._restore_function,
            "set_state": set_state_function,
            "signal": self._signal_function,
            "latest": self._latest_function,
            "close": self._close_function,
            **({"turn": self._turn_function} if self._rule.may_wait else {}),
        }

    def _parts_of_each_size(self) -> dict[int, dict[int, Part]]:
        found: dict[int, dict[int, Part]] = {}
        for index, part in zip(self.indices, self._parts, strict=True):
            found.setdefault(part.size, {})[index] = part
        return found

    def start(self) -> None:
        """Start answering."""
        self._server.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def set_center(self, tensors: Sequence[tf.Tensor]) -> None:
        """Set the weights; versions stay.

        Args:
            tensors: one tensor for each variable.
        """
        self.set_partitions(self.partitions.pack(tensors))

    def set_partitions(self, partitions: Sequence[tf.Tensor]) -> None:
        """Set the weights; versions stay.

        Args:
            partitions: one vector for each partition that it holds.
        """
        for part, values in zip(self._parts, partitions, strict=True):
            part.set_center(values)
            part.seen_here.assign(part.version)

    def center_partitions(self) -> list[tf.Tensor]:
        """Return the weights, one vector for each partition."""
        return [part.center.read_value() for part in self._parts]

    def center(self) -> list[tf.Tensor]:
        """Return the weights, one float32 tensor for each variable."""
        return self.partitions.unpack([part.center.read_value() for part in self._parts])

    def slots(self) -> list[dict[str, tf.Variable]]:
        """State of the rule for each partition: name to variable."""
        return [part.slots for part in self._parts]

    def versions(self) -> np.ndarray:
        """Number of updates of each partition, int64 of shape [num_partitions]."""
        return np.array([int(part.version) for part in self._parts], np.int64)

    def state(self) -> dict[str, np.ndarray]:
        """Return versions and rule state, to be saved with the center: name to array."""
        found = {"versions": self.versions()}
        for index, part in zip(self.indices, self._parts, strict=True):
            for name, variable in part.slots.items():
                found[f"{index}/{name}"] = variable.numpy()
        return found

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`.

        Args:
            state: state of a service for the same model, rule and partitions.

        Raises:
            ValueError: if it belongs to another service, is not finite, or has a version below 0.
        """
        expected = self.state()
        if {n: a.shape for n, a in state.items()} != {n: a.shape for n, a in expected.items()}:
            raise ValueError(
                "The saved state of the parameter service is that of another model or rule. "
                f"Received: {sorted(state)}; expected: {sorted(expected)} of the same shapes. "
                "Remove the backup, or use the model and rule that it was made with."
            )
        check_values(state, expected)
        for place, (index, part) in enumerate(zip(self.indices, self._parts, strict=True)):
            part.version.assign(state["versions"][place])
            part.seen_here.assign(part.version)
            for name, variable in part.slots.items():
                variable.assign(state[f"{index}/{name}"])

    def exchange_locally(
        self, client: int, samples: float, changes: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Push from this process, without a message; return the rule's answer for each partition.

        A partition with a value that is not finite is rejected: the answer is its center.

        Raises:
            ValueError: if the rule makes workers wait for each other, which this would ignore.
        """
        if self._rule.may_wait:
            raise ValueError(
                "A push from the service's own process cannot be told to try again. Received: the "
                f"rule {self._rule.name}, in which workers wait for each other. Use a "
                "ParameterClient here too, or a rule that never waits."
            )
        who, weight = tf.constant(client, tf.int32), tf.constant(samples, tf.float32)
        pairs = zip(self._exchanges, changes, strict=True)
        answers = [exchange(who, weight, change) for exchange, change in pairs]
        if not self._has_warned and any(int(s) == Status.NOT_FINITE for s, _ in answers):
            self._has_warned = True
            _logger.warning(DIVERGED)
        return [answer for _, answer in answers]

    def close_training(self) -> None:
        """Reject further pushes from others; return once the last one is complete."""
        deadline = time.monotonic() + LONGEST_CLOSE_SECONDS
        while not all([bool(self._close(part)) for part in self._parts]):
            if time.monotonic() > deadline:
                _logger.warning("A push of the rule %s has not come to its end.", self._rule.name)
                break
            time.sleep(_POLL_SECONDS)

    def prepare_local_exchange(self) -> None:
        """Trace `exchange_locally`, so that the first call does not delay a training step."""
        _ = self._exchanges

    @functools.cached_property
    def _exchanges(self) -> list[BoundFunction]:
        exchange = PartFunction(self._exchange_function)
        return [exchange.of(part) for part in self._parts]

    def _exchange_function(self, part: Part) -> TfFunction:
        signature = [
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([part.size], tf.float32),
        ]

        @tf.function(input_signature=signature, autograph=False)
        def exchange(
            client: tf.Tensor, samples: tf.Tensor, change: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            seen = part.seen_here.read_value()
            sent = Change(change)
            status, version, answer = tf.cond(
                sent.is_finite(),
                lambda: self._updates.take(part, client, samples, seen, sent),
                lambda: (
                    tf.constant(int(Status.NOT_FINITE)),
                    part.version.read_value(),
                    part.center.read_value(),
                ),
            )
            part.seen_here.assign(version)
            return status, answer

        return exchange

    def _pull_function(self, part: Part, exact: bool = False) -> TfFunction:
        encode = tf.identity if exact else self._wire.encode_answer

        @tf.function(input_signature=[], autograph=False)
        def pull() -> Taken:
            def read() -> Taken:
                center = encode(part.center.read_value())
                return tf.identity(status), part.version.read_value(), center

            status = _first_failed(_there_is_a_center(part))
            return tf.cond(_is_ok(status), read, lambda: nothing(status))

        return pull

    def _push_function(self, part: Part) -> TfFunction:
        signature = [
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float32),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([], tf.int64),
            *self._wire.signature(part.size),
        ]

        @tf.function(input_signature=signature, autograph=False)
        def push(
            client: tf.Tensor,
            samples: tf.Tensor,
            version: tf.Tensor,
            sequence: tf.Tensor,
            *sent: tf.Tensor,
        ) -> Taken:
            change = Change(self._wire.decode(list(sent), part.size))

            def update() -> Taken:
                taken, new_version, answer = self._updates.take(
                    part, client, samples, version, change, sequence
                )
                return taken, new_version, self._wire.encode_answer(answer)

            def refuse() -> Taken:
                is_in_turn = tf.equal(status, int(Status.NOT_FINITE))
                passed = self._updates.pass_turn(part, is_in_turn, client, samples, sequence)
                with tf.control_dependencies([passed]):
                    return nothing(status)

            finite = change.is_finite() & (samples <= LARGEST_SAMPLES)  # false for NaN, too
            known = (client >= 0) & (client < self._num_clients) & (version >= 0)
            # NaN is handled separately below. Not ~(samples < 0): TensorFlow's graph optimizer
            # turns that into samples >= 0.
            known &= (sequence >= 0) & ((samples >= 0) | tf.math.is_nan(samples))
            # One branch for all: TensorFlow takes a while for each.
            status = _first_failed(
                (known, Status.UNKNOWN_CLIENT),
                _there_is_a_center(part),
                (finite, Status.NOT_FINITE),
            )
            return tf.cond(_is_ok(status), update, refuse)

        return push

    def signal_locally(self, client: int, signal: Signal) -> int:
        """Send the rule a signal about a client, from this process; return the stage of training.

        Args:
            client: the worker's number.
            signal: the signal.
        """
        arguments = tf.constant(client), tf.constant(int(signal))
        stages = [self._signal(part, *arguments) for part in self._parts]
        return int(stages[0])

    def _signal(self, part: Part, client: tf.Tensor, signal: tf.Tensor) -> tf.Tensor:
        return part.lock.execute(lambda: self._rule.signal(part.slots, client, signal))

    def _signal_function(self, part: Part) -> TfFunction:
        @tf.function(
            input_signature=[tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32)],
            autograph=False,
        )
        def signal(client: tf.Tensor, signal: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            known = (client >= 0) & (client < self._num_clients)
            known &= (signal >= 0) & (signal <= max(Signal))
            return answer_if(
                known, lambda: (tf.constant(int(Status.OK)), self._signal(part, client, signal))
            )

        return signal

    def _close(self, part: Part) -> tf.Tensor:
        """Reject further pushes; return whether the last one, locked or not, is complete."""
        closed = part.lock.execute(lambda: part.is_closed.assign(True, read_value=True))
        with tf.control_dependencies([closed]):
            return tf.equal(part.under_way.read_value(), 0)

    def _close_function(self, part: Part) -> TfFunction:
        @tf.function(input_signature=[], autograph=False)
        def close() -> tuple[tf.Tensor, tf.Tensor]:
            is_done = self._close(part)
            with tf.control_dependencies([is_done]):
                return tf.constant(int(Status.OK)), tf.identity(is_done)

        return close

    def _latest_function(self, part: Part) -> TfFunction:
        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
        def latest(client: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            known = (client >= 0) & (client < self._num_clients)
            return answer_if(known, lambda: (tf.constant(int(Status.OK)), part.sequences[client]))

        return latest

    def _restore_function(self, part: Part) -> TfFunction:
        @tf.function(input_signature=[tf.TensorSpec([part.size], tf.float32)], autograph=False)
        def restore(center: tf.Tensor) -> tf.Tensor:
            def take() -> tf.Tensor:
                with tf.control_dependencies([part.set_center(center)]):
                    return tf.constant(int(Status.OK))

            finite = tf.reduce_all(tf.math.is_finite(center))
            return tf.cond(finite, take, lambda: tf.constant(int(Status.NOT_FINITE)))

        return restore

    def _turn_function(self, part: Part) -> TfFunction:
        @tf.function(
            input_signature=[tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)],
            autograph=False,
        )
        def turn(client: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
            """Return whether a push would be told to wait, without its values."""

            def may_send() -> tf.Tensor:
                zero = tf.constant(0.0)
                meta = PushMeta(client, zero, zero, part.version.read_value())
                is_turn = self._updates.is_turn(part, meta)
                # A push reports these statuses at once.
                may_not_wait = (
                    part.is_closed | ~part.has_center | self._updates.is_stale(part, version)
                )
                return tf.where(is_turn | may_not_wait, int(Status.OK), int(Status.WAIT))

            known = (client >= 0) & (client < self._num_clients) & (version >= 0)
            return answer_if(known, lambda: part.lock.execute(may_send))

        return turn


def _first_failed(*checks: tuple[tf.Tensor, Status]) -> tf.Tensor:
    """Return the status of the first check that fails, `Status.OK` if all hold."""
    status = tf.constant(int(Status.OK))
    for holds, failed in reversed(checks):
        status = tf.where(holds, status, int(failed))
    return status


def _there_is_a_center(part: Part) -> tuple[tf.Tensor, Status]:
    """Check for a center: a restarted process has none until the leader restores it."""
    return part.has_center.read_value(), Status.NO_CENTER


def _is_ok(status: tf.Tensor) -> tf.Tensor:
    return tf.equal(status, int(Status.OK))


def _check_number_of_workers(rule: UpdateRule, num_clients: int) -> None:
    """Check the number: some would share another worker's state, or never have their turn."""
    made_for = rule.get_config().get("num_workers")
    if made_for is not None and made_for < num_clients:
        raise ValueError(
            f"The rule {rule.name!r} was made for {made_for} workers. Received: a service with "
            f"num_clients={num_clients}. Give the rule num_workers={num_clients}."
        )
