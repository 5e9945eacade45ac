"""All summing machines, seen from one worker: started, joined, and used in its step."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.exchange.client import Client
from keras_het.exchange.links import PROBES, measure_link, send_probe
from keras_het.exchange.message import Kind, Message, Vector
from keras_het.packed_variables import pack, unpack
from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES
from keras_het.summation.machine import (
    SERVICE,
    SummationService,
    summation_credential,
    tell_group_size,
)
from keras_het.summation.options import MEASURED, Summation
from keras_het.summation.placement import place_partitions
from keras_het.summation.transit import Machine, Route, Transit

if TYPE_CHECKING:
    from keras_het.strategy.extended import HeterogeneousExtended
    from keras_het.strategy.membership import Membership

_START_TIMEOUT_SECONDS = 120.0
_SECONDS_OF_A_CALL = 1.0
_MOST_SUMS = 2**20
_ALIKE = 0.75


def start_summation(
    options: Summation,
    extended: HeterogeneousExtended,
    membership: Membership,
    check: Callable[[], None],
) -> SummationGroup | None:
    """Start this worker's service and join all machines' services; all workers must call it."""
    # `check` raises, while others are waited for, if one is lost. Where workers are summed by host,
    # the first one of each contributes; others return None.
    names = [address.rpartition(":")[0] for address in membership.workers.values()]
    spare = () if membership.config is None else membership.config.summation_machines
    worker, num_workers = extended.layout.worker_index, extended.layout.num_workers
    members, rates = list(range(num_workers)), options.worker_rates(num_workers)
    if (hosts := extended.hosts) is not None:
        members = [hosts.index(host) for host in range(len(set(hosts)))]
        if options.link_rates != MEASURED:
            options = dataclasses.replace(options, link_rates=[rates[each] for each in members])
    proof, port = summation_credential(len(members), len(spare)), 0
    if worker in members:
        service = SummationService(f"{names[worker]}:0", len(members), proof)
        service.start()
        port = int(service.address.rpartition(":")[2])
    if worker == 0 and spare and (os.environ.get(CHOSEN_ROLES) or len(members) < num_workers):
        tell_group_size(spare, len(members))  # before the others join
    told = np.array([port, secrets.randbelow(2**62) + 1], np.int64)
    everyone = extended.gather_over_workers(told).reshape(-1, len(told))
    machines = [*(f"{names[member]}:{everyone[member, 0]}" for member in members), *spare]
    if options.link_rates == MEASURED:
        found = _measured_rates(machines, members, worker, proof, extended.gather_over_workers)
        own, other = found[: len(members)], found[len(members) :]
        options = dataclasses.replace(options, link_rates=own, spare_link_rates=other or None)
    if worker not in members:
        return None
    place, run = members.index(worker), int(everyone[0, 1])
    group = SummationGroup(options, service, machines, len(members), place, proof, run, check)
    atexit.register(group.close)
    return group


def _measured_rates(
    machines: Sequence[str],
    members: Sequence[int],
    worker: int,
    proof: bytes,
    gather: Callable[[np.ndarray], np.ndarray],
) -> list[float]:
    """Measure the links of all to the first two members, one after another; all must call it."""
    # r_i = max_j m_ij with m_ij = min(r_i, r_j): of two machines the slower link tells. What else
    # machines do disturbs a measurement: one up to a quarter slower counts as fast as the fastest.
    speeds = np.zeros([len(machines)] * 2)
    for near, far in itertools.combinations(range(len(machines)), 2):
        if near > 1:
            break
        gather(np.zeros([1]))  # one at a time
        asks, answers = (far, near) if far < len(members) else (near, far)  # spare ones only answer
        if worker == members[asks]:
            client = Client(machines[answers], PROBES, proof, worker)
            measured = measure_link(functools.partial(send_probe, client))
            speeds[near, far] = measured.bytes_per_second
            client.close()
    found = gather(speeds.reshape(1, -1)).sum(axis=0).reshape(speeds.shape)
    rates = np.maximum(found, found.T).max(axis=1)
    most = float(rates.max())
    return [most if rate > _ALIKE * most else float(rate) for rate in rates]


class SummationGroup:
    """Summation over the workers, each partition on the machine that the plan assigns it to."""

    # All workers build the same graphs in the same order, and so agree on the place of every
    # partition without communicating.

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
        self._num_workers = num_workers
        num_spare = len(addresses) - num_workers
        self._rates = options.worker_rates(num_workers), options.spare_rates(num_spare)
        seconds = options.timeout_seconds
        self._clients = {
            machine: SummationClient(
                f"worker {machine}" if machine < num_workers
                else f"summation machine {machine - num_workers}",
                address, credential, worker, run, seconds,
            )
            for machine, address in enumerate(addresses) if machine != worker
        }  # fmt: skip
        service.sums.join(run)

        def contribute(slot: int, step: int, values: Vector) -> Future[Message]:
            return service.sums.contribute(run, slot, worker, step, values)

        for client in self._clients.values():
            client.join(_START_TIMEOUT_SECONDS, check)
        machines = [Machine(each.name, each.contribute) for each in self._clients.values()]
        machines.insert(worker, Machine(f"worker {worker}", contribute))  # needs no message
        self._transit = Transit(machines)
        self._used_slots = [0] * len(addresses)
        self._places: dict[tuple[str, int, int, bool], _Place] = {}
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
        """Make pending and later sums fail, because a process is lost."""
        self._transit.fail(ConnectionError("A process that sums, or contributes, is lost."))

    def close(self) -> None:
        """End the sums that are under way, the connections and this worker's service."""
        self._transit.close()
        for client in self._clients.values():
            client.close()
        self._service.close()

    def sum(self, values: Sequence[tf.Tensor], workers_sum: bool = True) -> list[tf.Tensor]:
        """Sum tensors that suit a summation over all workers; in a graph."""
        # Unless `workers_sum`, only the spare machines sum, as parameter servers.
        with tf.device("CPU:0"):
            vector = pack(values)
            place = self._find_place(int(vector.shape[0]), workers_sum)
            return unpack(self._sum(vector, place), [value.shape for value in values])

    def _sum(self, vector: tf.Tensor, place: _Place) -> tf.Tensor:
        """Begin the sum, wait for it as an operation that occupies no thread, and take it."""
        begin = functools.partial(place.begin, self._transit)
        ticket = private_api.run_independently(tf.numpy_function(begin, [vector], tf.int64))
        with tf.control_dependencies([ticket]):
            waited = private_api.run_independently(place.is_there.dequeue())
        with tf.control_dependencies([waited]):
            total = tf.numpy_function(place.take, [ticket], tf.float32)
        return tf.ensure_shape(private_api.run_independently(total), vector.shape)

    def _find_place(self, num_elements: int, workers_sum: bool) -> _Place:
        """Return the place of the next sum of the graph under construction."""
        # A retraced step takes the places of the one before, which does not run at the same time.
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

    def _make_place(self, num_elements: int, workers_sum: bool) -> _Place:
        workers, spare = self._rates
        largest = self._options.elements_per_message(num_elements, len(self._used_slots))
        in_flight = self._options.partitions_in_flight
        placement = place_partitions(num_elements, workers, spare, largest, workers_sum, in_flight)
        slots = []
        for owner in placement.owners:
            slots.append(self._used_slots[owner])
            self._used_slots[owner] += 1
        return _Place(Route(placement, tuple(slots)))


class _Place:
    """The place of one sum of the graph, between TensorFlow and the `Transit`."""

    def __init__(self, route: Route) -> None:
        self._route, self._step = route, 0
        self._sums: dict[int, Future[Vector]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            # One element for each sum that is there.
            self.is_there = tf.queue.FIFOQueue(_MOST_SUMS, tf.bool, shapes=[])

    def begin(self, transit: Transit, values: Vector) -> np.int64:
        self._step += 1
        self._sums[self._step] = transit.begin(self._route, self._step, values)
        self._sums[self._step].add_done_callback(self._announce)
        return np.int64(self._step)

    def _announce(self, done: Future[Vector]) -> None:
        with tf.device("CPU:0"):
            self.is_there.enqueue(True)

    def take(self, ticket: np.int64) -> Vector:
        # Waits only if an earlier step was cancelled and has left its element in the queue.
        return self._sums.pop(int(ticket)).result()


class SummationClient:
    """One worker's connection to a machine, whose answers wait for the slowest worker."""

    def __init__(
        self,
        name: str,
        address: str,
        credential: bytes,
        worker: int,
        run: int,
        timeout_seconds: float,
    ) -> None:
        self.name = name
        self.address = address
        self._run = run
        self._client = Client(address, SERVICE, credential, worker, timeout_seconds)

    def join(self, timeout_seconds: float, check: Callable[[], None] = lambda: None) -> None:
        end = time.monotonic() + timeout_seconds
        # Short calls: in between, this thread sees whether others are lost.
        while True:
            seconds = max(0.001, min(end - time.monotonic(), _SECONDS_OF_A_CALL))
            try:
                self._client.ask(Message(Kind.JOIN, (self._run,)), seconds)
                return
            except PermissionError as error:
                raise PermissionError(
                    f"{self.name} ({self.address}) refused this worker: its shared secret or its "
                    "TF_CONFIG (number of workers and summation machines) differs. Use the same "
                    "for all tasks."
                ) from error
            except (ConnectionError, TimeoutError) as error:
                if not isinstance(error, TimeoutError) or time.monotonic() >= end:
                    raise ConnectionError(
                        f"{self.name}: {error} Start all workers, and `keras-het "
                        "summation-server` on every machine of TF_CONFIG's job 'summation', "
                        "and check that the address can be reached from here."
                    ) from error
                check()

    def is_healthy(self, timeout_seconds: float) -> bool:
        return self._client.is_there(timeout_seconds)

    def contribute(self, slot: int, step: int, values: Vector) -> Future[Message]:
        return self._client.send(Message(Kind.CONTRIBUTION, (self._run, slot, step), (values,)))

    def close(self) -> None:
        self._client.close()
