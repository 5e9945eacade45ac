"""All summing machines, seen from one worker: started, joined, and used in its step."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.rpc.admission import Status
from keras_het.rpc.channel import FunctionClient, NoAnswerError
from keras_het.rpc.vector import pack, unpack
from keras_het.strategy.cluster.cluster_address import free_port
from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES, ClusterConfig
from keras_het.summation.machine import tell_group_size
from keras_het.summation.options import Summation
from keras_het.summation.placement import Placement, place_partitions
from keras_het.summation.service import NUM_SLOTS, SummationService, summation_credential
from keras_het.value_types import Summand

if TYPE_CHECKING:
    from keras_het.strategy.extended import HeterogeneousExtended
    from keras_het.strategy.membership import Membership

_logger = logging.getLogger(__name__)

_NUM_COUNTERS = 1024
_START_TIMEOUT_SECONDS = 120.0
_DEADLINE_EXCEEDED = 4
_SECONDS_OF_A_CALL = 1.0
_EXCHANGE_SPECS = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32))


def start_summation(
    options: Summation,
    extended: HeterogeneousExtended,
    membership: Membership,
    check: Callable[[], None],
) -> SummationGroup:
    """Start this worker's service and join those of all machines; all workers must call it.

    The service listens on a free port of its host in TF_CONFIG. `check` is called while waiting for
    the others, and raises if one is lost.
    """
    hosts = [address.rpartition(":")[0] for address in membership.workers.values()]
    spare = () if membership.config is None else membership.config.summation_machines
    worker, num_workers = extended.layout.worker_index, extended.layout.num_workers
    proof = summation_credential(num_workers, len(spare))
    port = free_port(hosts[worker])
    service = SummationService(f"{hosts[worker]}:{port}", num_workers, proof)
    service.start()
    if worker == 0 and spare and os.environ.get(CHOSEN_ROLES):
        tell_group_size(spare, num_workers, proof)  # before the others join
    told = np.array([port, secrets.randbelow(2**62) + 1], np.int64)
    everyone = extended.gather_over_workers(told).reshape(-1, len(told))
    addresses = [f"{host}:{port}" for host, port in zip(hosts, everyone[:, 0], strict=True)]
    machines, run = [*addresses, *spare], int(everyone[0, 1])
    group = SummationGroup(options, service, machines, num_workers, worker, proof, run, check)
    atexit.register(group.close)
    return group


def check_is_no_summation_machine(config: ClusterConfig | None) -> None:
    """Refuse to train on a machine reserved for summing gradients."""
    if config is not None and config.is_summation_machine:
        raise RuntimeError(
            'TF_CONFIG gives this process the job "summation": it sums gradients of the workers '
            "and does not train. Run `python -m keras_het.summation` here instead of the "
            "training script."
        )


class SummationGroup:
    """Summation over the workers, each partition on the machine that the plan assigns it to.

    Partitions that this worker sums itself need no message. All workers build the same graphs in
    the same order, as for collectives, and therefore agree on the place of every partition without
    communicating.
    """

    def __init__(
        self,
        options: Summation,
        service: SummationService,
        addresses: Sequence[str],
        num_workers: int,
        worker: int,
        credential: bytes,
        run: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._service = service
        self._worker = worker
        self._run = run
        self._num_workers = num_workers
        num_spare = len(addresses) - num_workers
        self._rates = options.worker_rates(num_workers), options.spare_rates(num_spare)
        with tf.init_scope(), tf.device("CPU:0"):
            self._is_lost = tf.Variable(False, trainable=False)
            self._steps = tf.Variable(tf.zeros([_NUM_COUNTERS], tf.int64), trainable=False)
        self._clients = {
            machine: SummationClient(
                f"worker {machine}" if machine < num_workers
                else f"summation machine {machine - num_workers}",
                address, credential, worker, run, self._is_lost, options.timeout_seconds,
            )
            for machine, address in enumerate(addresses)
        }  # fmt: skip
        for client in self._clients.values():
            client.join(_START_TIMEOUT_SECONDS, check)
        self._used_slots = [0] * len(addresses)
        self._places: dict[tuple[str, int, int, bool], _Place | None] = {}
        # Number of sums of each outermost graph so far.
        self._ordinals: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()

    @property
    def num_partitions(self) -> list[int]:
        """Number of partitions that each machine sums, over all graphs traced so far."""
        return list(self._used_slots)

    @property
    def spare_machines(self) -> dict[str, str]:
        """Map from the name of each spare machine's task to its address."""
        return {
            f"/job:summation/replica:0/task:{machine - self._num_workers}": client.address
            for machine, client in self._clients.items()
            if machine >= self._num_workers
        }

    def is_healthy(self, task: str, timeout_seconds: float) -> bool:
        """Return whether a spare machine answers; `task` is its name."""
        machine = self._num_workers + list(self.spare_machines).index(task)
        return self._clients[machine].is_healthy(timeout_seconds)

    def abort(self) -> None:
        """Make pending sums fail at their next time-out, because a process is lost."""
        self._is_lost.assign(True)

    def close(self) -> None:
        """End the calls that still wait at this worker's service."""
        self._service.close()

    def can_sum(self, value: Summand) -> bool:
        """Whether a value suits this group: dense float32 of known shape, in a `tf.function`.

        Graphs that never run do not count: Keras infers shapes in one, in which a worker with
        several devices reduces its metrics and a worker with one does not.
        """
        return (
            isinstance(value, tf.Tensor)
            and not tf.executing_eagerly()
            and private_api.function_being_traced(value.graph) is not None
            and value.dtype == tf.float32
            and bool(value.shape.num_elements())
        )

    def sum(self, values: Sequence[tf.Tensor], workers_sum: bool = True) -> list[tf.Tensor] | None:
        """Sum tensors for which `can_sum` is true over all workers; in a graph.

        Unless `workers_sum`, only the spare machines sum, as parameter servers. Without a place for
        the sums, which is then the case on every worker, it returns None.
        """
        with tf.device("CPU:0"):
            vector = pack(values)
            place = self._find_place(int(vector.shape[0]), workers_sum)
            if place is None:
                return None
            return unpack(self._sum(vector, place), [value.shape for value in values])

    def _sum(self, vector: tf.Tensor, place: _Place) -> tf.Tensor:
        step = self._next_step(place.counter)
        placement = place.placement
        partitions = tf.split(vector, list(placement.sizes))
        messages = zip(placement.owners, place.slots, partitions, placement.waits, strict=True)
        totals: list[tf.Tensor] = []
        for owner, slot, values, waits in messages:
            before = [totals[number] for number in waits]
            totals.append(self._exchange(owner, slot, step, values, before))
        return tf.concat(totals, axis=0)

    def _exchange(
        self, owner: int, slot: int, step: tf.Tensor, values: tf.Tensor, before: list[tf.Tensor]
    ) -> tf.Tensor:
        """Send one partition once the sums it waits for have arrived."""
        with tf.control_dependencies(before):
            if owner == self._worker:
                status, total = self._service.exchange_locally(
                    tf.constant(self._run, tf.int64), tf.constant(slot), tf.constant(owner), step,
                    values,
                )  # fmt: skip
            else:
                status, total = self._clients[owner].exchange(tf.constant(slot), step, values)
        # Otherwise these calls would wait for each other, in the order of the graph.
        private_api.run_independently(total)
        refused = [
            f"The summation service of {self._clients[owner].name} refused this step. Another "
            "cluster uses the same machine, or the workers run different steps."
        ]
        # Not tf.debugging.Assert, which creates a branch of two functions for each partition.
        check = tf.raw_ops.Assert(condition=tf.equal(status, int(Status.OK)), data=refused)
        # Otherwise it would wait for the preceding partitions, whichever machine sums them.
        private_api.run_independently(check)
        with tf.control_dependencies([check]):
            return tf.ensure_shape(total, values.shape)

    def _next_step(self, counter: int) -> tf.Tensor:
        counted = self._steps.scatter_nd_add([[counter]], [tf.constant(1, tf.int64)])
        with tf.control_dependencies([counted]):
            return self._steps.read_value()[counter]

    def _find_place(self, num_elements: int, workers_sum: bool) -> _Place | None:
        """Return slots for the next sum of the graph under construction.

        Sums at the same position of functions with the same name share slots if they have the same
        size: a retraced step needs no additional slots, and the two do not run at the same time.
        """
        key = (*self._next_position(), num_elements, workers_sum)
        if key not in self._places:
            self._places[key] = self._make_place(num_elements, workers_sum)
        return self._places[key]

    def _next_position(self) -> tuple[str, int]:
        # Not the names of branches and loops inside: TensorFlow numbers these over all functions of
        # a process, and a worker with more devices creates more of them.
        function = private_api.function_being_traced(tf.compat.v1.get_default_graph())
        ordinal = self._ordinals.get(function, 0)
        self._ordinals[function] = ordinal + 1
        return str(function.name), ordinal

    def _make_place(self, num_elements: int, workers_sum: bool) -> _Place | None:
        workers, spare = self._rates
        largest = self._options.elements_per_message(num_elements, len(self._clients))
        in_flight = self._options.partitions_in_flight
        placement = place_partitions(num_elements, workers, spare, largest, workers_sum, in_flight)
        used, slots = list(self._used_slots), []
        for owner in placement.owners:
            slots.append(used[owner])
            used[owner] += 1
        if max(used) > NUM_SLOTS or len(self._places) >= _NUM_COUNTERS:
            _logger.warning(
                "A sum of %d values is left to TensorFlow's all-reduce: it would need more than "
                "the %d partitions that a machine can sum. Larger partition_bytes help.",
                num_elements,
                NUM_SLOTS,
            )
            return None
        self._used_slots = used
        return _Place(placement, tuple(slots), counter=len(self._places))


class _Place(NamedTuple):
    """The place of one sum of the graph."""

    placement: Placement
    slots: tuple[int, ...]
    counter: int


class SummationClient:
    """One worker's connection to one summing machine.

    An answer waits for the slowest worker, however long that takes: a call that times out is sent
    again until the machine, or a worker, is known to be lost. A broken connection is an immediate
    error.
    """

    def __init__(
        self,
        name: str,
        address: str,
        credential: bytes,
        worker: int,
        run: int,
        is_lost: tf.Variable,
        timeout_seconds: float,
    ) -> None:
        self.name = name
        self.address = address
        self._worker = worker
        self._run = run
        self._is_lost = is_lost
        self._client = FunctionClient(address, credential, timeout_seconds)
        # One trace for all partitions. TensorFlow must not copy it into the step for each
        # partition: it would optimize all copies before the first step.
        self.exchange = tf.function(
            self._exchange,
            experimental_attributes={"_noinline": True},
            input_signature=[
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.float32),
            ],
        )

    def join(self, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> None:
        run, spec = tf.constant(self._run, tf.int64), tf.TensorSpec([], tf.int32)
        end = time.monotonic() + timeout_seconds
        # Short calls: this thread handles nothing else in the meantime, not even Ctrl-C.
        while True:
            seconds = max(0.001, min(end - time.monotonic(), _SECONDS_OF_A_CALL))
            try:
                status = self._client.ask("sum_join", [run], spec, seconds)
                break
            except NoAnswerError as error:
                if error.code != _DEADLINE_EXCEEDED or time.monotonic() >= end:
                    raise ConnectionError(
                        f"{self.name}: {error} Start all workers, and `python -m "
                        "keras_het.summation` on every machine of TF_CONFIG's job 'summation', "
                        "and check that the address can be reached from here."
                    ) from error
                check()
        if int(status) != Status.OK:
            raise PermissionError(
                f"{self.name} ({self.address}) refused this worker: its shared secret or its "
                "TF_CONFIG (number of workers and summation machines) differs. Use the same for "
                "all tasks."
            )

    def is_healthy(self, timeout_seconds: float) -> bool:
        spec = tf.TensorSpec([], tf.int32)
        call = self._client.call("sum_hello", [], spec, timeout_seconds)
        return bool(call.is_ok())

    def _exchange(
        self, slot: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return status and sum; raise the connection's error in the graph."""
        arguments = [
            tf.constant(self._run, tf.int64),
            slot,
            tf.constant(self._worker),
            step,
            values,
        ]

        def attempt() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            call = self._client.call("sum_exchange", arguments, _EXCHANGE_SPECS)
            code = tf.ensure_shape(call.get_error()[0], [])
            with tf.control_dependencies([code]):  # read now, not when the call was sent
                is_lost = self._is_lost.read_value()
            may_try_again = tf.equal(code, _DEADLINE_EXCEEDED) & ~is_lost
            status, total = tf.cond(
                may_try_again,
                lambda: (tf.constant(int(Status.WAIT)), tf.zeros([0])),
                call.get_value,  # raises if there is no value
            )
            return may_try_again, tf.ensure_shape(status, []), tf.ensure_shape(total, [None])

        _, status, total = tf.while_loop(
            lambda again, status, total: again,
            lambda again, status, total: attempt(),
            attempt(),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([]),
                tf.TensorShape([None]),
            ),
        )
        return status, total
