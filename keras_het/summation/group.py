"""All summing machines, seen from one worker."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_het import private_api
from keras_het.rpc.admission import Status
from keras_het.summation.client import SummationClient
from keras_het.summation.options import Summation
from keras_het.summation.placement import Placement, place_partitions
from keras_het.summation.service import SummationService
from keras_het.summation.slots import NUM_SLOTS
from keras_het.value_types import Summand

_logger = logging.getLogger(__name__)

_NUM_COUNTERS = 1024
_START_TIMEOUT_SECONDS = 120.0


class SummationGroup:
    """Summation over the workers, each partition on the machine that the plan assigns it to.

    Partitions that this worker sums itself need no message. All workers build the same graphs in
    the same order, as for collectives, and therefore agree on the place of every partition without
    communicating.

    Args:
        options: the user's options.
        service: this worker's own service, started.
        addresses: "host:port" of every machine's service, workers first, then spare machines.
        num_workers: the number of workers.
        worker: this worker.
        credential: the same as that of all services.
        run: the number of this run, equal on all workers.
        check: called while waiting for the machines; raises if a worker is lost.
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
        """Return whether a spare machine answers.

        Args:
            task: the task's name.
            timeout_seconds: how long to wait for it.
        """
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

        Args:
            value: tensor or `tf.IndexedSlices`.
        """
        return (
            isinstance(value, tf.Tensor)
            and not tf.executing_eagerly()
            and private_api.function_being_traced(value.graph) is not None
            and value.dtype == tf.float32
            and bool(value.shape.num_elements())
        )

    def sum(self, values: Sequence[tf.Tensor], workers_sum: bool = True) -> list[tf.Tensor] | None:
        """Sum tensors over all workers; in a graph.

        Args:
            values: tensors for which `can_sum` is true.
            workers_sum: whether the workers' machines sum too, or only the spare ones, as parameter
                servers.

        Returns:
            The sums; None if there is no place for them, which is then the case on every worker.
        """
        with tf.device("CPU:0"):
            vector = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
            place = self._find_place(int(vector.shape[0]), workers_sum)
            if place is None:
                return None
            total = self._sum(vector, place)
            parts = tf.split(total, [value.shape.num_elements() for value in values])
            return [tf.reshape(p, v.shape) for p, v in zip(parts, values, strict=True)]

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


class _Place:
    """The place of one sum of the graph."""

    def __init__(self, placement: Placement, slots: tuple[int, ...], counter: int) -> None:
        self.placement = placement
        self.slots = slots
        self.counter = counter
