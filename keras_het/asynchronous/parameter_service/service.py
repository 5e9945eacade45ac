"""Service that holds the center; workers push to it and pull from it over TensorFlow's RPC."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.part import (
    Change,
    Part,
    PartFunction,
    Push,
    Taken,
    Updates,
    nothing,
)
from keras_het.asynchronous.parameter_service.wire import FloatWire, Wire, check_fits
from keras_het.asynchronous.rules import PushMeta, Signal, UpdateRule
from keras_het.rpc.admission import Gate, Status
from keras_het.rpc.server import FunctionServer, TfFunction, answer_if, hello_function
from keras_het.rpc.vector import Partitions
from keras_het.usable_cpus import usable_cpus
from keras_het.value_types import Nest

LARGEST_NUM_LOCKS = 16
"""Number of locks on a large machine."""
LARGEST_SAMPLES = 2.0**31
"""Largest plausible number of samples of one push."""
_INT, _LONG = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64)
_FLOAT = tf.TensorSpec([], tf.float32)
_PLACE = [_INT, _LONG]


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
        self.indices = tuple(range(len(partitions.sizes)) if indices is None else indices)
        locks = number_of_locks()
        with tf.init_scope(), tf.device("CPU:0"):
            self._parts = [
                Part(size, rule, num_clients, f"{prefix}part_{i % locks}", not awaits_center)
                for i, size in enumerate(partitions.sizes)
                if i in self.indices
            ]
        self._server = FunctionServer(address) if server is None else server
        gate = Gate(credential)
        self._server.register(f"{prefix}hello", hello_function(), gate)
        if self.indices:
            size, local = partitions.sizes[0], self._local()
            for name, function in self._served().items():
                self._server.register(f"{prefix}{name}_{size}", self._of_all(function), gate)
                if name in local:
                    make = functools.partial(self._of_all, local[name])
                    self._server.register_locally(f"{prefix}{name}_{size}", make)

    def _of_all(self, function: PartFunction) -> TfFunction:
        """Return a function of the partition whose number comes first.

        One partition per call: with several critical sections in one call, TensorFlow waits
        forever.
        """
        parts = dict(zip(self.indices, self._parts, strict=True))
        return function.served(parts, len(self.partitions.sizes))

    def _served(self) -> dict[str, PartFunction]:
        vector = tf.TensorSpec([self.partitions.sizes[0]], tf.float32)
        sizes, text = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.string)
        served = {
            "push": self._push_function(self._wire, self._updates),
            "pull": PartFunction([], functools.partial(self._pull, self._wire)),
            "center": PartFunction([], functools.partial(self._pull, FloatWire())),
            "export": PartFunction(_PLACE, Part.export),
            "restore": PartFunction([vector], functools.partial(self._restore, True)),
            "set_state": PartFunction([sizes, *_PLACE, text], Part.set_state),
            "signal": PartFunction([_INT, _INT], self._signal),
            "latest": PartFunction([_INT], self._latest),
            "close": PartFunction([], _close),
        }
        if self._rule.may_wait:
            served["turn"] = PartFunction([_INT, _LONG], self._turn)
        return served

    def _local(self) -> dict[str, PartFunction]:
        """Return what differs for a client in this process: it is trusted, and never too stale."""
        vector = tf.TensorSpec([self.partitions.sizes[0]], tf.float32)
        return {
            "push": self._push_function(FloatWire(), Updates(self._rule, None)),
            "pull": PartFunction([], functools.partial(self._pull, FloatWire())),
            "restore": PartFunction([vector], functools.partial(self._restore, False)),
        }

    def _push_function(self, wire: Wire, updates: Updates) -> PartFunction:
        signature = [_INT, _FLOAT, _LONG, _LONG, *wire.signature(self.partitions.sizes[0])]
        return PartFunction(signature, functools.partial(self._push, wire, updates))

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

    def center_partitions(self) -> list[tf.Tensor]:
        """Return the weights, one vector for each partition."""
        return [part.center.read_value() for part in self._parts]

    def center(self) -> list[tf.Tensor]:
        """Return the weights, one float32 tensor for each variable."""
        return self.partitions.unpack(self.center_partitions())

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

    def _pull(self, wire: Wire, part: Part) -> Taken:
        def read() -> Taken:
            center = wire.encode_answer(part.center.read_value())
            return tf.identity(status), part.version.read_value(), tf.identity(center)

        status = _first_failed(_there_is_a_center(part))
        return tf.cond(_is_ok(status), read, lambda: nothing(status))

    def _push(
        self,
        wire: Wire,
        updates: Updates,
        part: Part,
        *arguments: tf.Tensor,
    ) -> Taken:
        push, change = Push(*arguments[:4]), Change(wire.decode(list(arguments[4:]), part.size))

        def update() -> Taken:
            taken = updates.take(part, push, change)
            return taken[0], taken[1], wire.encode_answer(taken[2])

        def refuse() -> Taken:
            is_in_turn = tf.equal(status, int(Status.NOT_FINITE))
            passed = updates.pass_turn(part, is_in_turn, push)
            with tf.control_dependencies([passed]):
                return nothing(status)

        finite = change.is_finite() & (push.samples <= LARGEST_SAMPLES)  # false for NaN, too
        known = self._is_known(push.client) & (push.version >= 0)
        # NaN is handled separately below. Not ~(samples < 0): TensorFlow's graph optimizer
        # turns that into samples >= 0.
        known &= (push.sequence >= 0) & ((push.samples >= 0) | tf.math.is_nan(push.samples))
        # One branch for all: TensorFlow takes a while for each.
        status = _first_failed(
            (known, Status.UNKNOWN_CLIENT),
            _there_is_a_center(part),
            (finite, Status.NOT_FINITE),
        )
        return tf.cond(_is_ok(status), update, refuse)

    def _signal(self, part: Part, client: tf.Tensor, signal: tf.Tensor) -> Nest:
        known = self._is_known(client) & (signal >= 0) & (signal <= max(Signal))

        def tell() -> tuple[tf.Tensor, tf.Tensor]:
            stage = part.lock.execute(lambda: self._rule.signal(part.slots, client, signal))
            return tf.constant(int(Status.OK)), stage

        return answer_if(known, tell)

    def _latest(self, part: Part, client: tf.Tensor) -> Nest:
        return answer_if(
            self._is_known(client), lambda: (tf.constant(int(Status.OK)), part.sequences[client])
        )

    def _restore(self, checks: bool, part: Part, center: tf.Tensor) -> tf.Tensor:
        def take() -> tf.Tensor:
            with tf.control_dependencies([part.set_center(center)]):
                return tf.constant(int(Status.OK))

        finite = tf.reduce_all(tf.math.is_finite(center)) if checks else tf.constant(True)
        return tf.cond(finite, take, lambda: tf.constant(int(Status.NOT_FINITE)))

    def _turn(self, part: Part, client: tf.Tensor, version: tf.Tensor) -> Nest:
        """Return whether a push would be told to wait, without its values."""

        def may_send() -> tf.Tensor:
            zero = tf.constant(0.0)
            meta = PushMeta(client, zero, zero, part.version.read_value())
            is_turn = self._updates.is_turn(part, meta)
            # A push reports these statuses at once.
            may_not_wait = part.is_closed | ~part.has_center | self._updates.is_stale(part, version)
            return tf.where(is_turn | may_not_wait, int(Status.OK), int(Status.WAIT))

        known = self._is_known(client) & (version >= 0)
        return answer_if(known, lambda: part.lock.execute(may_send))

    def _is_known(self, client: tf.Tensor) -> tf.Tensor:
        return (client >= 0) & (client < self._num_clients)


def _close(part: Part) -> tuple[tf.Tensor, tf.Tensor]:
    """Reject further pushes; return whether the last one, locked or not, is complete."""
    closed = part.lock.execute(lambda: part.is_closed.assign(True, read_value=True))
    with tf.control_dependencies([closed]):
        is_done = tf.equal(part.under_way.read_value(), 0)
    with tf.control_dependencies([is_done]):
        return tf.constant(int(Status.OK)), tf.identity(is_done)


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
