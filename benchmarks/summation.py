"""Summation of gradients by all machines, against a ring all-reduce and parameter servers.

    python benchmarks/summation.py [--json FILE] [--quick] [--case TEXT] [--mbit-per-s RATE]

Four workers and up to four spare machines, each in its own network namespace behind a link of
limited rate (jumbo frames of 9000 bytes), sum a vector in turn by (a) the summation service, (b)
TensorFlow's ring all-reduce between the workers, (c) the spare machines alone, as parameter servers
do. `bytes_ratio` is the traffic of the busiest link, counted at its ends with all headers, over the
formula's; `predicted_speedup` is the formula's, D/n^2 for equal links. Needs root.

The cases "two workers on each host" put the four workers on two hosts, neighbors in the ring on one
host or not. There the peer is (d) the sum by host, `speedup_over_allreduce` is its, and its bytes
are 2 (H - 1) / H of the vector.

The cases "training" are `fit` of a model of as many bytes on devices that compute for a quarter of
a second (EMULATED): a step with the summation service, and one with the ring, in the same
processes. Their prediction adds that time to the formula's.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

from _namespaces import Hosts, limited_hosts, why_not
from _report import environment, print_table, write_report

import keras_het  # before the forks, so they need not import TensorFlow
from keras_het.planning import plan_summation
from keras_het.strategy.cluster.cluster_config import read_cluster_config
from keras_het.summation import Summation
from keras_het.summation.machine import start_machine

NUM_WORKERS = 4
PORT = 7000
KINDS = ("summation", "ring", "servers")
MEASURED = "BENCHMARK_MEASURES_RATES"
KINDS_OF_HOSTS = ("by host", "ring", "summation")
# The host of each worker.
PLACES = {"neighbors": (0, 0, 1, 1), "in turns": (0, 1, 0, 1)}
KINDS_OF_TRAINING = ("fit, summation", "fit, ring")
STEP_SECONDS = 0.25  # of computation, in a training
TRAINED_WITH, TRAINED_STEPS = (0, 2, 4), 5  # spare machines; steps of each turn
SECRET = "of this benchmark only, not secret"
# One worker behind a slow link, one spare machine behind a fast one.
UNEQUAL_WORKERS = (1.0, 1.0, 1.0, 0.5)
UNEQUAL_SPARE = (2.0, 1.0, 1.0, 1.0)
START_TIMEOUT = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="little data: form, not numbers")
    parser.add_argument("--case", default="", help="only cases whose names begin so")
    parser.add_argument(
        "--mbit-per-s", type=float, help="of a link of rate 1; default 80, with --quick 200"
    )
    parser.add_argument("--measured", action="store_true", help="rates of links are not given")
    options = parser.parse_args()
    os.environ[MEASURED] = "1" if options.measured else ""
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        rows: list[dict[str, Any]] = [skipped(reason)]
    else:
        chosen = [case for case in cases(options.quick) if case[0].startswith(options.case)]
        rows = []
        for case in chosen:
            rows.append(measure(*case, options.mbit_per_s, quick=options.quick))
            print(rows[-1], flush=True)
        for name, places in PLACES.items():
            case = f"two workers on each host, {name}"
            if case.startswith(options.case) and not (options.quick and name != "in turns"):
                rows.append(measure_hosts(case, places, options.mbit_per_s, quick=options.quick))
                print(rows[-1], flush=True)
        for k in TRAINED_WITH:
            case = f"training, k={k}"
            if case.startswith(options.case) and not (options.quick and k != TRAINED_WITH[-1]):
                rows.append(measure_training(case, k, options.mbit_per_s, quick=options.quick))
                print(rows[-1], flush=True)
        print_table(rows, [name for name in rows[0] if not name.endswith("_seconds")])
    write_report("summation", rows, options.json, environment())


def skipped(reason: str) -> dict[str, Any]:
    fields = ("bytes_ratio", "speedup_over_allreduce", "speedup_over_ps", "predicted_speedup")
    return {"case": "all", "n": NUM_WORKERS, "k": None, **dict.fromkeys(fields), "skipped": reason}


def cases(quick: bool) -> list[tuple[str, tuple[float, ...], tuple[float, ...]]]:
    """Return the name of each case and the relative link rates of workers and spare machines."""
    counts = range(NUM_WORKERS + 1)
    equal = [(f"equal links, k={k}", (1.0,) * NUM_WORKERS, (1.0,) * k) for k in counts]
    unequal = [(f"unequal links, k={k}", UNEQUAL_WORKERS, UNEQUAL_SPARE[:k]) for k in counts]
    return [equal[0], equal[-1], unequal[1]] if quick else [*equal, *unequal]


def measure(
    case: str,
    workers: tuple[float, ...],
    spare: tuple[float, ...],
    mbit_per_s: float | None,
    quick: bool,
) -> dict[str, Any]:
    """Return one row: all kinds take turns on the same hosts."""
    megabytes, default, rounds = (1, 200.0, 1) if quick else (8, 80.0, 5)
    mbit = mbit_per_s or default
    kinds = [kind for kind in KINDS if spare or kind != "servers"]
    rates = [mbit * rate for rate in (*workers, *spare)]
    with limited_hosts(rates, mtu=9000) as hosts, Cluster(hosts, workers, spare, megabytes) as all_:
        for kind in kinds:
            all_.run(kind)  # warms up
        turns = [{kind: all_.run(kind) for kind in kinds} for _ in range(rounds)]
    return row_of(case, workers, spare, megabytes, rates, turns)


def measure_hosts(
    case: str, places: tuple[int, ...], mbit_per_s: float | None, quick: bool
) -> dict[str, Any]:
    """Return the row of workers that share hosts."""
    megabytes, default, rounds = (1, 200.0, 1) if quick else (8, 80.0, 5)
    mbit, num_hosts = mbit_per_s or default, len(set(places))
    workers = (1.0,) * len(places)
    with (
        limited_hosts([mbit] * num_hosts, mtu=9000) as hosts,
        Cluster(hosts, workers, (), megabytes, places) as all_,
    ):
        for kind in KINDS_OF_HOSTS:
            all_.run(kind)  # warms up
        turns = [{kind: all_.run(kind) for kind in KINDS_OF_HOSTS} for _ in range(rounds)]
    most = 2 * (num_hosts - 1) / num_hosts * megabytes * 1e6
    # A worker sends 2 (W - 1) / W of the vector to its neighbor in the ring.
    leaving = max(
        sum(host == own != places[(i + 1) % len(places)] for i, host in enumerate(places))
        for own in places
    )
    in_ring = leaving * 2 * (len(places) - 1) / len(places) * megabytes * 1e6
    seconds = {kind: [turn[kind][0] for turn in turns] for kind in KINDS_OF_HOSTS}
    over_ring = sorted(b / a for a, b in zip(seconds["by host"], seconds["ring"], strict=True))
    traffic = {kind: [max(turn[kind][1]) / most for turn in turns] for kind in KINDS_OF_HOSTS}
    return {
        "case": case,
        "n": len(workers),
        "k": 0,
        "bytes_ratio": round(statistics.median(traffic["by host"]), 4),
        "ring_bytes_ratio": round(statistics.median(traffic["ring"]), 4),
        "summation_bytes_ratio": round(statistics.median(traffic["summation"]), 4),
        "speedup_over_allreduce": round(statistics.median(over_ring), 3),
        "speedup_over_ps": None,
        "predicted_speedup": round(in_ring / most, 3),
        "lowest_speedup": round(over_ring[0], 3),
        "highest_speedup": round(over_ring[-1], 3),
        "megabytes": megabytes,
        "mbit_per_s": mbit,
        **{f"{kind}_seconds": round(statistics.median(seconds[kind]), 3) for kind in seconds},
        "predicted_seconds": round(most * 8 / 1e6 / mbit, 3),
        "num_runs": len(turns),
    }


def measure_training(case: str, k: int, mbit_per_s: float | None, quick: bool) -> dict[str, Any]:
    """Return the row of a training with k spare machines, whose steps sum by either way."""
    megabytes, default, rounds = (1, 200.0, 1) if quick else (8, 80.0, 5)
    mbit, workers, spare = mbit_per_s or default, (1.0,) * NUM_WORKERS, (1.0,) * k
    with (
        limited_hosts([mbit] * (len(workers) + k), mtu=9000) as hosts,
        Cluster(hosts, workers, spare, megabytes) as all_,
    ):
        turns = [{kind: all_.run(kind) for kind in KINDS_OF_TRAINING} for _ in range(rounds)]
    plan = plan_summation(megabytes * 1_000_000, workers, spare)
    service = max(plan.link_bytes) * 8 / 1e6 / mbit
    of_ring = 2 * (len(workers) - 1) / len(workers) * megabytes * 8 / mbit
    seconds = {kind: [turn[kind][0] for turn in turns] for kind in KINDS_OF_TRAINING}
    speedups = sorted(ring / own for own, ring in zip(*seconds.values(), strict=True))
    predicted = (STEP_SECONDS + of_ring) / (STEP_SECONDS + service)
    speedup = statistics.median(speedups)
    return {
        "case": case,
        "n": len(workers),
        "k": k,
        "bytes_ratio": None,  # each fit compares workers, too
        "speedup_over_allreduce": round(speedup, 3),
        "speedup_over_ps": None,
        "predicted_speedup": round(predicted, 3),
        "ratio_to_predicted": round(speedup / predicted, 3),
        "lowest_speedup": round(speedups[0], 3),
        "highest_speedup": round(speedups[-1], 3),
        "megabytes": megabytes,
        "mbit_per_s": mbit,
        **{f"{kind}_seconds": round(statistics.median(each), 3) for kind, each in seconds.items()},
        "predicted_seconds": round(STEP_SECONDS + service, 3),
        "num_runs": len(turns),
    }


def row_of(
    case: str,
    workers: tuple[float, ...],
    spare: tuple[float, ...],
    megabytes: int,
    rates: Sequence[float],
    turns: list[dict[str, Any]],
) -> dict[str, Any]:
    plan = plan_summation(megabytes * 1_000_000, workers, spare)
    most = max(load / rate for load, rate in zip(plan.link_bytes, rates, strict=True))
    traffic = [
        max(load / rate for load, rate in zip(turn["summation"][1], rates, strict=True))
        for turn in turns
    ]
    seconds = {kind: [turn[kind][0] for turn in turns] for kind in turns[0]}
    over_ring = sorted(b / a for a, b in zip(seconds["summation"], seconds["ring"], strict=True))
    over_servers = None
    if spare:
        both = zip(seconds["summation"], seconds["servers"], strict=True)
        over_servers = round(statistics.median(b / a for a, b in both), 3)
    speedup = statistics.median(over_ring)
    return {
        "case": case,
        "n": len(workers),
        "k": len(spare),
        "bytes_ratio": round(statistics.median(traffic) / most, 4),
        "speedup_over_allreduce": round(speedup, 3),
        "speedup_over_ps": over_servers,
        "predicted_speedup": round(plan.speedup_over_all_reduce, 3),
        "ratio_to_predicted": round(speedup / plan.speedup_over_all_reduce, 3),
        "lowest_speedup": round(over_ring[0], 3),
        "highest_speedup": round(over_ring[-1], 3),
        "megabytes": megabytes,
        "mbit_per_s": max(rates),
        **{f"{kind}_seconds": round(statistics.median(seconds[kind]), 3) for kind in seconds},
        "predicted_seconds": round(most * 8 / 1e6, 3),
        "num_runs": len(turns),
    }


class Cluster:
    """One process on each host.

    Args:
        hosts: workers first, then spare machines.
        workers: relative rates of the workers' links.
        spare: relative rates of the spare machines' links.
        megabytes: size of the vector.
        places: the host of each process; by default each has its own.
    """

    def __init__(
        self,
        hosts: Hosts,
        workers: Sequence[float],
        spare: Sequence[float],
        megabytes: int,
        places: Sequence[int] | None = None,
    ) -> None:
        self._hosts = hosts
        places = places or range(len(workers) + len(spare))
        addresses = [f"{hosts.address(host)}:{PORT + i}" for i, host in enumerate(places)]
        cluster = {"worker": addresses[: len(workers)], "summation": addresses[len(workers) :]}
        cluster = {job: tasks for job, tasks in cluster.items() if tasks}
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("fork")
        for number, host in enumerate(places):
            is_worker = number < len(workers)
            index = number if is_worker else number - len(workers)
            task = {"type": "worker" if is_worker else "summation", "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            own, other = context.Pipe()
            role = worker if is_worker else machine
            rates = (tuple(workers), tuple(spare))
            arguments = (hosts, host, config, rates, megabytes, other)
            process = context.Process(target=role, args=arguments, daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)
        self._workers = self._pipes[: len(workers)]

    def __enter__(self) -> Cluster:
        try:
            for pipe in self._pipes:
                self._receive(pipe, START_TIMEOUT)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, kind: str) -> tuple[float, list[int]]:
        """Return the seconds per sum, and bytes on each host's link in its busier direction."""
        before = self._hosts.traffic()
        for pipe in self._workers:
            pipe.send(kind)
        seconds = max(self._receive(pipe, START_TIMEOUT) for pipe in self._workers)
        carried = [
            max(now - then for now, then in zip(after, start, strict=True))
            for after, start in zip(self._hosts.traffic(), before, strict=True)
        ]
        return seconds, carried

    def _receive(self, pipe: Any, timeout: float) -> Any:
        if not pipe.poll(timeout):
            raise TimeoutError(f"A process did not answer within {timeout} s.")
        return pipe.recv()


def enter(hosts: Hosts, host: int, config: str) -> None:
    """Set up a forked process; each one calls it first."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    hosts.enter(host)
    os.environ["TF_CONFIG"] = config
    os.environ["KERAS_HET_SECRET"] = SECRET
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = {"speed": 1.0, "fixed_seconds": STEP_SECONDS, "seconds_per_sample": 0.0}
    os.environ["KERAS_HET_EMULATED_DEVICES"] = json.dumps([device])


def machine(hosts: Hosts, host: int, config: str, rates: Any, megabytes: int, pipe: Any) -> None:
    """Run a spare machine."""
    enter(hosts, host, config)
    service = start_machine(read_cluster_config())
    pipe.send("ready")
    pipe.poll(None)
    service.close()


def worker(hosts: Hosts, host: int, config: str, rates: Any, megabytes: int, pipe: Any) -> None:
    """Run one of the workers."""
    enter(hosts, host, config)
    import tensorflow as tf

    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    number = read_cluster_config().worker_index
    strategy = keras_het.HeterogeneousStrategy(
        gradient_reduction=Summation(link_rates="measured")
        if os.environ.get(MEASURED)
        else Summation(link_rates=rates[0], spare_link_rates=rates[1] or None),
        communication_options=communication,
    )
    run = sums(strategy, bool(rates[1]))
    vector = tf.fill([megabytes * 250_000], float(number + 1))
    expected = strategy.num_workers * (strategy.num_workers + 1) / 2
    for kind, function in run.items():
        total = function(vector)
        if float(tf.reduce_min(total)) != expected or float(tf.reduce_max(total)) != expected:
            raise RuntimeError(f"The sum by {kind} is wrong: {total}.")
    pipe.send("ready")
    trainings: dict[str, Any] = {}
    while True:
        kind = pipe.recv()
        if kind in KINDS_OF_TRAINING:
            if not trainings:
                trainings.update(all_trainings(strategy, megabytes))
            pipe.send(trainings[kind]())
            continue
        start = time.perf_counter()
        float(run[kind](vector)[0])
        pipe.send(time.perf_counter() - start)


def all_trainings(strategy: Any, megabytes: int) -> dict[str, Any]:
    """Return a function for each kind of step, which trains some and returns the seconds of one."""
    import keras
    import numpy as np

    operations = strategy.extended._cross_device_ops  # which gradients pass
    x = np.ones((NUM_WORKERS, 64), np.float32)
    y = np.zeros(NUM_WORKERS, np.int64)
    found = {}
    for kind, uses_summation in zip(KINDS_OF_TRAINING, (True, False), strict=True):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            hidden = keras.layers.Dense(megabytes * 250_000 // 75, "relu")
            model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01), loss)
        data = np.tile(x, (TRAINED_STEPS, 1)), np.tile(y, TRAINED_STEPS)
        found[kind] = functools.partial(_seconds_of_a_step, operations, uses_summation, model, data)
        found[kind]()  # traces
    return found


def _seconds_of_a_step(
    operations: Any, uses_summation: bool, model: Any, data: tuple[Any, Any]
) -> float:
    operations.uses_summation = uses_summation
    start = time.perf_counter()
    model.fit(*data, batch_size=NUM_WORKERS, shuffle=False, verbose=0)
    seconds = (time.perf_counter() - start) / TRAINED_STEPS
    operations.uses_summation = True
    return seconds


def sums(strategy: Any, has_spare: bool) -> dict[str, Any]:
    """Return one function for each kind."""
    import tensorflow as tf

    operations = strategy.extended._host_cross_device_ops
    launcher, group = operations._launchers[0], operations.summation
    by_host = launcher.by_host

    @tf.function
    def by_ring(vector: Any) -> Any:
        operations.uses_summation, launcher.by_host = False, None
        total = operations.sum_between_workers(vector)
        operations.uses_summation, launcher.by_host = True, by_host
        return total

    if by_host is not None:
        by_machines = tf.function(strategy.extended.sum_over_workers)
        all_reduce = tf.function(by_host.all_reduce)
        return {"by host": all_reduce, "ring": by_ring, "summation": by_machines}
    functions = {
        "summation": tf.function(strategy.extended.sum_over_workers),
        "ring": by_ring,
        "servers": tf.function(lambda vector: group.sum([vector], workers_sum=False)[0]),
    }
    return {kind: functions[kind] for kind in KINDS if has_spare or kind != "servers"}


if __name__ == "__main__":
    main()
