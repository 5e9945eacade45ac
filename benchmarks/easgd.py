"""Sync EASGD against the original, round-robin EASGD: savings by packing, a ring and overlap.

    python benchmarks/easgd.py [--json FILE] [--quick] [--case TEXT] [--scaling]

Eight workers and a master, each in its own network namespace behind a link of limited rate, train
the same network with `fit` and exchange with the center in every step. Devices are emulated: a step
waits as long as it would compute. In turn, in the same processes:

* `before`: round-robin EASGD. The master (a parameter service) serves one worker at a time, in
  order; a worker continues when its answer has arrived. The turn is handed from worker to worker,
  so one message travels at a time.
* `after`: Sync EASGD, one packed sum by ring all-reduce, overlapped with the next step's
  computation (period 1, overlap 1: the authors' Sync EASGD3); also without overlap.
* `alone`: the same steps without any exchange, which is the cost of computation here.

`communication_share` is the part of a step that is not computation: 1 - alone / step. The links of
the case "paper" are such that round robin has about the paper's 87 %. Needs root.

`--scaling` measures weak scaling of Sync EASGD instead, with one to sixteen workers that compute
for a second a step: `efficiency` is the step of one worker over the step of all.

Reference: You, Buluc and Demmel, SC 2017: 5.3 times as fast, communication from 87 % to 14 %; weak
scaling at 91.5 %.
"""

from __future__ import annotations

import argparse
import ctypes
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
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")  # an emulated device waits in one
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# before the forks, so they need not import TensorFlow
import keras
import numpy as np
import tensorflow as tf
from _namespaces import Hosts, limited_hosts, why_not
from _report import environment, print_table, write_report

import keras_het
from keras_het.asynchronous.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    Status,
)
from keras_het.asynchronous.parameter_service.client import SERVICE, RemoteChannel
from keras_het.exchange.server import Server
from keras_het.local_training import LocalSteps, adopt_variables_of_the_chief
from keras_het.packed_variables import PackedVariables
from keras_het.rules import RoundRobinEASGD, SyncEASGD
from keras_het.strategy.keras_calls import SessionCallback

PORT = 7000
CREDENTIAL = b"of this benchmark only, not secret"
SAMPLES = 8  # of each worker in a step
RATE = 0.05
MODES = ("alone", "round_robin", "sync", "sync_without_overlap")
START_TIMEOUT, TURN_TIMEOUT = 240, 240
COLUMNS = (
    "case",
    "mbit_per_s",
    "speedup",
    "lowest_speedup",
    "highest_speedup",
    "speedup_without_overlap",
    "communication_share_before",
    "communication_share_after",
    "skipped",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few workers: form, not numbers")
    parser.add_argument("--case", default="", help="only cases whose names begin so")
    parser.add_argument("--scaling", action="store_true", help="weak scaling instead")
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        fields = ("speedup", "communication_share_before", "communication_share_after")
        rows: list[dict[str, Any]] = [
            {"case": "all", "workers": None, **dict.fromkeys(fields), "skipped": reason}
        ]
    elif options.scaling:
        rows = measure_scaling((1, 2) if options.quick else (1, 2, 4, 8, 16), options.quick)
    else:
        rows = measure(options.quick, options.case)
    columns = list(rows[0]) if options.scaling else [n for n in COLUMNS if n in rows[0]]
    print_table(rows, columns)
    write_report("easgd", rows, options.json, environment())


def cases(quick: bool) -> dict[str, float]:
    """Return the name of each case with its links, in Mbit/s."""
    return {"paper": 200.0} if quick else {"paper": 67.0, "fast links": 200.0, "slow links": 26.0}


def measure(quick: bool, only: str) -> list[dict[str, Any]]:
    """Return all rows, from one cluster whose links are changed."""
    num_workers, floats, seconds = (3, 25_000, 0.02) if quick else (8, 250_000, 0.25)
    rounds = 1 if quick else 3
    chosen = {name: mbit for name, mbit in cases(quick).items() if name.startswith(only)}
    rows = []
    with (
        limited_hosts([1000.0] * (num_workers + 1), mtu=9000) as hosts,
        Cluster(hosts, num_workers, floats, seconds) as cluster,
    ):
        for name, mbit in chosen.items():
            for host in range(num_workers + 1):
                hosts.set_rate(host, mbit)
            lengths = {mode: _num_steps(mode, quick) for mode in MODES}
            turns = [
                {mode: cluster.run(mode, steps) for mode, steps in lengths.items()}
                for _ in range(rounds)
            ]
            rows.append(row_of(name, mbit, num_workers, floats, seconds, turns))
            print(rows[-1], flush=True)
    return rows


def measure_scaling(numbers: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """Return a row for each number of workers; the first is one, which exchanges nothing."""
    floats, seconds, steps, mbit = (25_000, 0.02, 4, 200.0) if quick else (250_000, 1.0, 12, 67.0)
    rows: list[dict[str, Any]] = []
    for number in numbers:
        with (
            limited_hosts([mbit] * (number + 1), mtu=9000) as hosts,
            Cluster(hosts, number, floats, seconds) as cluster,
        ):
            modes = ("alone",) if number == 1 else ("alone", "sync")
            turns = [[cluster.run(mode, steps) for mode in modes] for _ in range(3)]
        alone, step = ([turn[place] for turn in turns] for place in (0, -1))
        one = rows[0]["step_ms"] if rows else round(1e3 * statistics.median(step), 1)
        row = {
            "case": "weak scaling",
            "workers": number,
            "mbit_per_s": mbit,
            "step_ms": round(1e3 * statistics.median(step), 1),
            "alone_ms": round(1e3 * statistics.median(alone), 1),
            "efficiency": round(one / (1e3 * statistics.median(step)), 3),
            "lowest": round(one / (1e3 * max(step)), 3),
            "highest": round(one / (1e3 * min(step)), 3),
            "emulated_compute_ms": 1e3 * seconds,
            "num_runs": len(turns),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def _num_steps(mode: str, quick: bool) -> int:
    if quick:
        return 4
    return 5 if mode == "round_robin" else 12


def row_of(
    case: str,
    mbit: float,
    num_workers: int,
    floats: int,
    seconds: float,
    turns: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Return medians over turns; a turn has the seconds per step of each mode."""
    step = {mode: [turn[mode] for turn in turns] for mode in MODES}

    def share(mode: str) -> float:
        pairs = zip(step["alone"], step[mode], strict=True)
        return round(statistics.median(max(0.0, 1 - alone / own) for alone, own in pairs), 3)

    def speedups(mode: str) -> list[float]:
        pairs = zip(step["round_robin"], step[mode], strict=True)
        return sorted(before / after for before, after in pairs)

    megabytes = floats * 4 / 1e6
    link_seconds = megabytes * 8 / mbit
    return {
        "case": case,
        "workers": num_workers,
        "mbit_per_s": mbit,
        "megabytes": megabytes,
        "speedup": round(statistics.median(speedups("sync")), 2),
        "lowest_speedup": round(speedups("sync")[0], 2),
        "highest_speedup": round(speedups("sync")[-1], 2),
        "speedup_without_overlap": round(statistics.median(speedups("sync_without_overlap")), 2),
        "communication_share_before": share("round_robin"),
        "communication_share_after": share("sync"),
        "communication_share_without_overlap": share("sync_without_overlap"),
        **{f"{mode}_ms": round(1e3 * statistics.median(step[mode]), 1) for mode in MODES},
        "emulated_compute_ms": 1e3 * seconds,
        # limits of the links: one at a time, there and back; and a ring
        "round_robin_link_ms": round(2e3 * num_workers * link_seconds, 1),
        "ring_link_ms": round(2e3 * (num_workers - 1) / num_workers * link_seconds, 1),
        "num_runs": len(turns),
    }


class Cluster:
    """One process on each host: the workers, then the master.

    Args:
        hosts: workers first, then the master.
        num_workers: number of workers.
        floats: approximate number of weights of the model.
        seconds: emulated computation of a step.
    """

    def __init__(self, hosts: Hosts, num_workers: int, floats: int, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        addresses = [f"{hosts.address(host)}:{PORT}" for host in range(num_workers)]
        turns = [context.Semaphore(int(number == 0)) for number in range(num_workers)]
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for host in range(num_workers + 1):
            own, other = context.Pipe()
            if host == num_workers:
                process = context.Process(
                    target=master, args=(hosts, host, num_workers, floats, other), daemon=True
                )
            else:
                config = {
                    "cluster": {"worker": addresses},
                    "task": {"type": "worker", "index": host},
                }
                arguments = (hosts, host, config, floats, seconds, turns, other)
                process = context.Process(target=worker, args=arguments, daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)

    def __enter__(self) -> Cluster:
        try:
            self._receive(self._pipes[-1])  # the master first
            for pipe in self._pipes[:-1]:
                pipe.send("connect")
            for pipe in self._pipes[:-1]:
                self._receive(pipe)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, mode: str, steps: int) -> float:
        """Return the seconds per step of the slowest worker."""
        if mode == "round_robin":
            center = self._of_workers("weights", 0)[0]
            self._pipes[-1].send(center)
            self._receive(self._pipes[-1])
        return float(max(self._of_workers(mode, steps)))

    def _of_workers(self, mode: str, steps: int) -> list[Any]:
        for pipe in self._pipes[:-1]:
            pipe.send((mode, steps))
        return [self._receive(pipe) for pipe in self._pipes[:-1]]

    def _receive(self, pipe: Any) -> Any:
        if not pipe.poll(START_TIMEOUT):
            raise TimeoutError(f"A process did not answer within {START_TIMEOUT} s.")
        return pipe.recv()


def enter(hosts: Hosts, host: int) -> None:
    """Set up a forked process; each one calls it first."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    hosts.enter(host)


def width(floats: int) -> int:
    """Return the hidden units of a 64-h-10 perceptron with about this many weights."""
    return max(1, (floats - 10) // (64 + 1 + 10))


def shapes(floats: int) -> tuple[tuple[int, ...], ...]:
    hidden = width(floats)
    return (64, hidden), (hidden,), (hidden, 10), (10,)


def master(hosts: Hosts, host: int, num_workers: int, floats: int, pipe: Any) -> None:
    """Hold the center of round-robin EASGD."""
    enter(hosts, host)
    service = ParameterService(num_workers)
    service.hold(Partitions(shapes(floats)), RoundRobinEASGD(num_workers))
    server = Server(f"{hosts.address(host)}:{PORT}")
    server.serve(SERVICE, CREDENTIAL, service.handle)
    server.start()
    pipe.send("ready")
    while True:
        service.parts[0].set_center(pipe.recv())
        pipe.send("set")


def worker(
    hosts: Hosts,
    host: int,
    config: dict[str, Any],
    floats: int,
    seconds: float,
    turns: Sequence[Any],
    pipe: Any,
) -> None:
    """Run one of the workers."""
    enter(hosts, host)
    os.environ["TF_CONFIG"] = json.dumps(config)
    device = {"speed": 1.0, "fixed_seconds": seconds, "seconds_per_sample": 0.0}
    os.environ["KERAS_HET_EMULATED_DEVICES"] = json.dumps([device])
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = keras_het.HeterogeneousStrategy(communication_options=options)
    pipe.recv()
    address = f"{hosts.address(strategy.num_workers)}:{PORT}"
    channel = RemoteChannel(address, CREDENTIAL, host, TURN_TIMEOUT)
    client = ParameterClient([channel], Partitions(shapes(floats)), may_wait=True)
    model = make_model(strategy, floats)
    run_steps(strategy, model, "alone", 2, None)  # traces
    pipe.send("ready")
    while True:
        mode, steps = pipe.recv()
        adopt_variables_of_the_chief(model, strategy)
        if mode == "weights":
            weights = PackedVariables(model.trainable_variables, strategy)
            pipe.send(weights.read().numpy())
            continue
        exchange = RoundRobin(model, strategy, client, turns) if mode == "round_robin" else None
        pipe.send(run_steps(strategy, model, mode, steps, exchange))


def make_model(strategy: Any, floats: int) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(width(floats), "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE), loss)
    return model


def run_steps(
    strategy: Any, model: Any, mode: str, steps: int, exchange: RoundRobin | None
) -> float:
    """Train; return the seconds per step after the first two."""

    class Clock(keras.callbacks.Callback):
        """Ends of steps, including the exchange."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    random = np.random.default_rng(0)
    count = SAMPLES * strategy.num_workers * (steps + 2)
    x = random.normal(size=(count, 64)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.abs(x[:, :10]).argmax(1)))
    batches = data.batch(SAMPLES * strategy.num_workers)
    callbacks = {
        "alone": lambda: Alone(strategy),
        "round_robin": lambda: exchange,
        "sync": lambda: local_training(strategy, overlap=1),
        "sync_without_overlap": lambda: local_training(strategy, overlap=0),
    }
    model.fit(batches, epochs=1, verbose=0, callbacks=[callbacks[mode](), clock])
    return (clock.ends[-1] - clock.ends[1]) / (len(clock.ends) - 2)


def local_training(strategy: Any, overlap: int) -> Any:
    rule = SyncEASGD(strategy.num_workers, period=1, overlap=overlap)
    return keras_het.callbacks.LocalTraining(rule)


class Alone(SessionCallback):
    """Local steps without an exchange."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        LocalSteps(self._required_session(), self._strategy)


class RoundRobin(Alone):
    """Local steps that each end with a blocking exchange with the master, on this worker's turn.

    Args:
        model: the model, whose weights are the first center.
        strategy: its strategy.
        client: this worker's connection to the master.
        turns: a semaphore for each worker; the one whose turn it is may pass its own.
    """

    def __init__(self, model: Any, strategy: Any, client: Any, turns: Sequence[Any]) -> None:
        super().__init__(strategy)
        self._client, self._turns = client, turns
        self._rule = RoundRobinEASGD(strategy.num_workers)
        self._weights = PackedVariables(model.trainable_variables, strategy)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        index = self._strategy.worker_index
        own = self._weights.read().numpy()
        if not self._turns[index].acquire(timeout=TURN_TIMEOUT):
            raise TimeoutError("The turn did not come.")
        message = [self._rule.message(own, own)]
        answer = self._client.start_push(message, [0], SAMPLES).answer()
        if answer.statuses[0] != Status.OK:
            raise RuntimeError(f"The master did not take the push: {answer.statuses}.")
        self._turns[(index + 1) % len(self._turns)].release()
        self._weights.write(self._rule.receive(own, own, answer.values[0]))


if __name__ == "__main__":
    main()
