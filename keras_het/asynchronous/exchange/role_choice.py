"""Choose the workers' roles from measurements of the first steps and messages."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from keras_het.asynchronous.exchange.participant import (
    HybridOptions,
    ModelVectors,
    check_can_be_shared,
)
from keras_het.exchange.client import Client
from keras_het.exchange.links import PROBES, measure_link, send_probe, serve_probes
from keras_het.exchange.secret import credential, read_secret
from keras_het.exchange.server import Server
from keras_het.planning import ClusterSpeeds, ExchangeSettings, RolePlan, advise_roles
from keras_het.planning.noise_scale import EXPECTED_GROWTH, SmoothedNoiseScale, noise_scale_estimate
from keras_het.strategy.cluster.cluster_config import (
    CHOSEN_ROLES,
    TF_CONFIG,
    ClusterConfig,
    config_of,
)
from keras_het.strategy.cluster.stop_signals import leave_together
from keras_het.strategy.measure.compute_times import StepTimes

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_ROLES = ("sync", "async", "out")
WARM_UP_STEPS = 4
"""Number of steps before the measured ones."""
MEASURED_STEPS = 16
"""Number of measured steps after these, unless the user sets it."""
LARGEST_NOISE_SCALE = 1e9
"""Represents a gradient hidden by its noise: staleness costs nothing."""
_ABOUT = "keras_het link rates 1"
_READINGS = 15
_PARTS = 4
"""Reading, updating or reporting, claiming batches and writing: all take about equally long."""


class RoleChoice:
    """Measurement while the whole cluster trains synchronously, then a decision for all."""

    # The leader's plan applies to all workers, because machines could round differently.

    def __init__(
        self,
        model: keras.Model,
        strategy: HeterogeneousStrategy,
        options: HybridOptions,
        profile_steps: int,
        noise_scale: float | None = None,
    ) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        data = strategy.extended.data_path.to_be_trained()
        self._num_batches = None
        # For arrays, this is known once there are async workers.
        if data is not None and not data.takes_keras_arrays:
            check_can_be_shared(data)  # now, not after the script restarts
            self._num_batches = int(data.cardinality)
        self._measured_steps = profile_steps
        self._noise_scale = noise_scale
        self._steps = 0
        self._rates = measure_link_rates(strategy)
        strategy.extended.compute_times.begin(model, gradients=noise_scale is None, stops=True)

    def steps_done(self, steps: int) -> RolePlan | None:
        """Count steps; return the plan once it is made."""
        self._steps += steps
        if self._steps < self._measured_steps + WARM_UP_STEPS:
            return None
        speeds = self._speeds()
        _logger.info("Gradient noise scale of the roles: %s samples.", speeds.noise_scale)
        plan = advise_roles(speeds)
        own = np.array([_ROLES.index(role) for role in plan.roles], np.int64)
        agreed = self._strategy.extended.gather_over_workers(own[None])[0]
        roles = tuple(_ROLES[int(number)] for number in agreed)
        chosen = dataclasses.replace(plan.chosen, roles=roles)  # type: ignore[arg-type]
        return dataclasses.replace(plan, chosen=chosen)

    def end(self) -> None:
        """Stop measuring; report if there was no plan."""
        wanted = self._measured_steps + WARM_UP_STEPS
        if self._steps < wanted and self._strategy.is_chief:
            _logger.warning(
                'roles="auto" needs %d steps, %d to warm up and profile_steps=%d. Received: a fit '
                "of %d, after which everybody is still in the sync group. Give a fit more epochs "
                "or batches, or profile_steps a lower number: %d more fits measure.",
                wanted,
                WARM_UP_STEPS,
                self._measured_steps,
                self._steps,
                self._strategy.extended.training_state.role_trials_left,
            )
        self._strategy.extended.compute_times.end(self._model)

    def _speeds(self) -> ClusterSpeeds:
        steps = self._strategy.extended.compute_times.latest(self._measured_steps)
        seconds = np.median([step.seconds for step in steps], axis=0)
        shares = np.median([step.shares for step in steps], axis=0)
        rates = np.maximum(shares, 1) / np.maximum(seconds, 1e-9)
        counts = self._strategy.layout.replicas_per_worker
        workers = np.split(rates, np.cumsum(counts)[:-1])
        weights = self._model.trainable_variables
        size = self._options.partition_bytes
        times = measure_exchange(self._model, self._strategy, size, steps)
        cluster = ClusterSpeeds(
            samples_per_second=tuple(float(own.sum()) for own in workers),
            link_bytes_per_second=self._rates,
            model_bytes=4 * sum(int(np.prod(variable.shape)) for variable in weights),
            global_batch_size=int(shares.sum()),
            noise_scale=self._expected_noise_scale(steps),
            exchange=self._exchange(times.busy_seconds),
        )
        return cluster.with_all_reduce_of(times.all_reduce_seconds)

    def _expected_noise_scale(self, steps: Sequence[StepTimes]) -> float | None:
        """Return the user's noise scale, or the one expected from the first steps of training."""
        if self._noise_scale is not None:
            return self._noise_scale
        measured = noise_scale_of(steps)
        return None if measured is None else EXPECTED_GROWTH * measured

    def _exchange(self, busy_seconds: float) -> ExchangeSettings:
        options = self._options
        return ExchangeSettings(
            period=None if options.adapts_period else options.period,
            async_batch_size=options.async_batch_size,
            busy_seconds=busy_seconds,
            sends_gradients=options.rule.uses_gradients,
            num_batches=self._num_batches,
            least_period=options.rule.least_period,
        )


def noise_scale_of(steps: Sequence[StepTimes]) -> float | None:
    average = SmoothedNoiseScale()
    for step in steps:
        if (step.shares > 0).sum() > 1:
            squares = step.gradient_squares, step.global_gradient_square
            average.add(noise_scale_estimate(step.shares, *squares))
    return None if average.value is None else min(average.value.noise_scale, LARGEST_NOISE_SCALE)


def environment_of(config: ClusterConfig, roles: Sequence[str]) -> dict[str, str] | None:
    """Return the TF_CONFIG of this process in the cluster with these roles."""
    # Tasks that do not train keep their places: evaluator and summation machines.
    addresses = config.sync_group_addresses
    jobs: dict[str, list[str]] = {"worker": [], "async": []}
    task: dict[str, Any] | None = None
    for index, (address, role) in enumerate(zip(addresses, roles, strict=True)):
        job = {"sync": "worker", "async": "async"}.get(role)
        if job is None:
            continue
        if index == config.worker_index:
            task = {"type": job, "index": len(jobs[job])}
        jobs[job].append(address)
    if task is None:
        return None
    before = config.as_cluster_dict()
    jobs |= {job: before.get(job, []) for job in ("evaluator", "summation")}
    cluster = {job: listed for job, listed in jobs.items() if listed}
    return {TF_CONFIG: json.dumps({"cluster": cluster, "task": task})}


def start_again(strategy: HeterogeneousStrategy, plan: RolePlan) -> None:
    """Restart this process's script in its new role, or end it if it is left out."""
    environment = environment_of(config_of(strategy), plan.roles)
    leave_together(lambda: strategy)
    sys.stdout.flush()
    sys.stderr.flush()
    if environment is None:
        _logger.warning("This worker is left out: the others are faster without it. %s", plan)
        os._exit(0)
    os.environ.update(environment)
    os.environ[CHOSEN_ROLES] = str(plan)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def measure_link_rates(strategy: HeterogeneousStrategy) -> tuple[float, ...]:
    """Measure one worker's link to the leader after another; all workers must call it."""
    # The leader's own link is assumed to be as fast as the fastest of the others.
    proof = credential(read_secret(), _ABOUT)
    address = config_of(strategy).service_address()
    server, rate = None, 0.0
    if strategy.is_chief:
        server = Server(address)
        serve_probes(server, proof)
        server.start()
    for worker in range(strategy.num_workers):
        strategy.extended.gather_over_workers(np.zeros([1]))  # one at a time, after the server
        if worker == strategy.worker_index and not strategy.is_chief:
            client = Client(address, PROBES, proof, worker)
            rate = measure_link(functools.partial(send_probe, client)).bytes_per_second
            client.close()
    everyone = strategy.extended.gather_over_workers(np.array([rate]))
    if server is not None:
        server.close()
    return tuple(float(own) if own > 0 else float(everyone.max()) for own in everyone)


class ExchangeTimes(NamedTuple):
    """The cost of an exchange besides the travel time of its bytes."""

    all_reduce_seconds: float
    busy_seconds: float


def measure_exchange(
    model: keras.Model,
    strategy: HeterogeneousStrategy,
    partition_bytes: int,
    steps: Sequence[StepTimes],
    clock: Callable[[], float] = time.perf_counter,
) -> ExchangeTimes:
    """Measure weight reads and collectives; all workers must call it."""
    # An all-reduce on an idle cluster would say too little. Nothing is written: weights of 64 bits
    # would lose some of them.
    weights = ModelVectors(model, strategy, partition_bytes).weights
    readings = []
    for _ in range(1 + _READINGS):
        began = clock()
        weights.read()
        readings.append(clock() - began)
    busy = _PARTS * statistics.median(readings[1:])  # the first one is traced
    local = strategy.layout.local_replicas
    own = np.array([[*(waited(step, local) for step in steps), busy]])
    found = strategy.extended.gather_over_workers(own)
    # The worker that computes longest waits for no other.
    return ExchangeTimes(float(np.median(found[:, :-1].min(axis=0))), float(found[0, -1]))


def waited(step: StepTimes, local: range) -> float:
    """Return the seconds from this worker's last gradients to the end of the collective."""
    seconds = step.seconds[local.start : local.stop]
    return float(step.collective_seconds - (seconds.max() - seconds[0]))
