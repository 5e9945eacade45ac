"""Time to a target accuracy: synchronous groups, even, balanced or smaller, against hybrid.

    python benchmarks/hybrid.py [--json FILE] [--quick] [--only CASE] [--seeds N]

Emulated devices train in real processes. Cases: two fast and four slow workers (4:4:2:2:2:2) on
equal links ("equal_links") and with the slow ones behind 50 Mbit/s ("slow_link"); three fast ones
and one at an eighth ("one_eighth"); an even cluster ("even"). Modes: "even" and "balanced" (all in
the sync group), "leave_out" (the sync group without the slow ones), "hybrid" (the slow ones
asynchronous, rule "delta") and "hybrid:async_easgd". A row is the median of all seeds.
`ratio_to_best_other` is the best other mode's time over this one's; `advised` the mode that
`keras_het.planning.advise_roles` names for the case's true speeds and links and the task's measured
gradient noise scale.

The task (see `_noisy_task`) needs many samples rather than many steps, as trainings do to which
machines are added: a synchronous batch of twice the size needs about half the steps. Where that is
not so, nobody's help pays, whatever the mode. A first short `fit` traces and connects everything;
the second begins again from the first weights and is timed from its first step. The chief keeps its
weights every few steps; the first ones that reach the target, evaluated afterwards, tell the time.
`step_ms` is the median step of the sync group. In the mode "hybrid, stopped" (case "one_eighth")
the async worker gets SIGSTOP soon after it began. Limited links need root; without, "slow_link" is
skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _noisy_task import HIDDEN, NUM_CLASSES, NUM_INPUTS, TARGET, NoisyTask

SAMPLE_MILLISECONDS = 8.0  # of a device of speed 1
BATCH, MOMENTUM, PERIOD = 48, 0.9, 2
# Of 0.005, 0.007, 0.01 and 0.014 the best one in a simulation with numpy, for the synchronous group
# and for hybrid; without momentum it is the tenfold.
RATE, PLAIN_RATE = 0.01, 0.1
SAMPLES, WARM_UP_BATCHES, STEPS_BETWEEN_LOOKS = 14400, 96, 4
MODEL_BYTES = 4 * (NUM_INPUTS * HIDDEN + HIDDEN + HIDDEN * NUM_CLASSES + NUM_CLASSES)
FAST_MBIT = 1000.0
TIMEOUT_SECONDS = 240
STOPPED = "hybrid, stopped"
MODES = ("even", "balanced", "leave_out", "hybrid", "hybrid:async_easgd")


@dataclasses.dataclass(frozen=True)
class Case:
    """A cluster.

    Args:
        speeds: relative speed of each worker's device.
        num_slow: how many, the last ones, are asynchronous or left out.
        slow_mbit: rate of their links, None where links are not limited.
    """

    speeds: tuple[float, ...]
    num_slow: int
    slow_mbit: float | None = None


CASES = {
    "equal_links": Case((4, 4, 2, 2, 2, 2), 4),
    "slow_link": Case((4, 4, 2, 2, 2, 2), 4, slow_mbit=50.0),
    "one_eighth": Case((8, 8, 8, 1), 1),
    "even": Case((4, 4, 4, 4), 1),
}


def advised(case: Case, noise_scale: float) -> str:
    """The mode that planning chooses for the true speeds and links."""
    from keras_het.planning import ClusterSpeeds, advise_roles

    fast = len(case.speeds) - case.num_slow
    rates = [FAST_MBIT] * fast + [case.slow_mbit or FAST_MBIT] * case.num_slow
    cluster = ClusterSpeeds(
        samples_per_second=tuple(1000 / SAMPLE_MILLISECONDS * speed for speed in case.speeds),
        link_bytes_per_second=tuple(rate * 1e6 / 8 for rate in rates),
        model_bytes=MODEL_BYTES,
        global_batch=BATCH,
        noise_scale=noise_scale,
    )
    return str(advise_roles(cluster).mode)


def train(options: argparse.Namespace) -> None:
    """What each worker runs."""
    import keras

    import keras_het

    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(options.seed)
    rate, momentum = (PLAIN_RATE, 0.0) if "easgd" in options.mode else (RATE, MOMENTUM)
    with strategy.scope():
        layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(NUM_CLASSES)]
        model = keras.Sequential([keras.Input((NUM_INPUTS,)), *layers])
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    task = NoisyTask(options.samples)
    first_weights = model.get_weights()

    class Clock(keras.callbacks.Callback):
        """Times of the steps from the first one on, and the weights every few steps."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []
            self.seen: list[tuple[float, list[Any]]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())
            steps = len(self.ends)
            if strategy.is_async_worker:
                options.result.with_suffix(".async").write_text(str(steps))
            elif strategy.is_chief and steps % STEPS_BETWEEN_LOOKS == 0:
                self.seen.append((self.ends[-1] - self.ends[0], self.model.get_weights()))

    class Meeting(keras.callbacks.Callback):
        """Lets the group go on after its first step when all async workers are there."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if strategy.is_async_worker:
                index = strategy.cluster_config.task_index
                options.result.with_suffix(f".joined{index}").touch()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while strategy.is_chief and batch == 0 and self.num_there < strategy.num_async_workers:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.num_there} async workers came")
                time.sleep(0.05)

        @property
        def num_there(self) -> int:
            return len(list(options.result.parent.glob("*.joined*")))

    clock = Clock()
    rule = options.mode.partition(":")[2] or "delta"
    callbacks: list[Any] = [
        keras_het.callbacks.HybridAggregation(rule, period=PERIOD, timeout_seconds=5)
    ]
    if options.mode == "balanced":
        callbacks.append(keras_het.callbacks.BatchBalancer())
    batches = task.batches(BATCH)
    model.fit(batches.take(WARM_UP_BATCHES), verbose=0, callbacks=[*callbacks, Meeting()])
    model.set_weights(first_weights)
    for variable in model.optimizer.variables:
        if variable.name not in ("iteration", "learning_rate"):
            variable.assign(variable * 0)
    model.fit(batches, verbose=0, callbacks=[*callbacks, clock])
    if strategy.is_chief:
        reached = [when for when, weights in clock.seen if task.accuracy(weights) >= TARGET]
        steps = [after - before for before, after in itertools.pairwise(clock.ends)]
        result = {
            "seconds": reached[0] if reached else None,
            "samples_per_s": options.samples / (clock.ends[-1] - clock.ends[0]),
            "last_accuracy": task.accuracy(model.get_weights()),
            "step_ms": 1e3 * statistics.median(steps),
        }
        temporary = options.result.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.replace(options.result)


@contextlib.contextmanager
def hosts_of(case: Case) -> Iterator[Any]:
    """Hosts with the case's links, or None for this machine's loopback."""
    if case.slow_mbit is None:
        yield None
        return
    from _namespaces import limited_hosts

    fast = len(case.speeds) - case.num_slow
    with limited_hosts([FAST_MBIT] * fast + [case.slow_mbit] * case.num_slow) as hosts:
        yield hosts


def run(case: Case, mode: str, seed: int, samples: int, hosts: Any) -> dict[str, Any]:
    """One training; what the chief measured."""
    from keras_het.launch.emulation import Emulation

    speeds = case.speeds[: -case.num_slow] if mode == "leave_out" else case.speeds
    num_async = case.num_slow if mode.startswith("hybrid") else 0
    emulation = Emulation(speeds, seconds_per_sample=SAMPLE_MILLISECONDS / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = ["--worker", "--mode", mode, "--seed", str(seed), "--samples", str(samples)]
        command = [sys.executable, __file__, *arguments, "--result", str(result)]
        start = _start_on_hosts if hosts is not None else _start_here
        if mode == STOPPED:
            start = functools.partial(_start_and_stop, result=result)
        with start(command, emulation, num_async, hosts) as wait:
            wait()
        return dict(json.loads(result.read_text()))


def _local_cluster(command: list[str], emulation: Any, num_async: int) -> Any:
    from keras_het.launch.local_cluster import LocalCluster

    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return LocalCluster(
        command, num_async_workers=num_async, emulation=emulation, env=environment, keep_lines=100
    )


@contextlib.contextmanager
def _start_here(command: list[str], emulation: Any, num_async: int, hosts: Any) -> Iterator[Any]:
    from keras_het.launch.failure_report import describe_failures

    def wait() -> None:
        cluster.wait(timeout=TIMEOUT_SECONDS)
        if cluster.failures:
            raise RuntimeError(describe_failures(cluster.failures, cluster.num_workers))

    cluster = _local_cluster(command, emulation, num_async)
    with cluster:
        yield wait


@contextlib.contextmanager
def _start_and_stop(
    command: list[str], emulation: Any, num_async: int, hosts: Any, result: Path
) -> Iterator[Any]:
    """Stops the async worker after two of its steps, and waits for the chief alone."""

    def wait_for(path: Path, least: int) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not path.exists() or (least and int(path.read_text() or 0) < least):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {path.name} after {TIMEOUT_SECONDS} s")
            time.sleep(0.05)

    def wait() -> None:
        wait_for(result.with_suffix(".async"), 2)
        cluster.kill(len(emulation.speeds) - 1, signal.SIGSTOP)
        wait_for(result, 0)

    cluster = _local_cluster(command, emulation, num_async)
    with cluster:
        yield wait


@contextlib.contextmanager
def _start_on_hosts(
    command: list[str], emulation: Any, num_async: int, hosts: Any
) -> Iterator[Any]:
    from keras_het.launch.worker_environment import service_environment, worker_environment

    addresses = [f"{hosts.address(index)}:4000" for index in range(len(emulation.speeds))]
    common = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "no_proxy": "*",
        **service_environment(f"{hosts.address(0)}:4100", os.environ),
    }
    workers = [
        subprocess.Popen(
            hosts.command(index, command),
            env=worker_environment(index, addresses, 1, common, emulation, num_async),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(len(addresses))
    ]

    def wait() -> None:
        for worker in workers:
            output, _ = worker.communicate(timeout=TIMEOUT_SECONDS)
            if worker.returncode:
                raise RuntimeError(f"a worker failed:\n{output[-3000:]}")

    try:
        yield wait
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def measure(name: str, modes: tuple[str, ...], seeds: int, samples: int) -> list[dict[str, Any]]:
    """All modes of one case, interleaved over the seeds."""
    case = CASES[name]
    if name == "one_eighth" and samples == SAMPLES:
        modes = (*modes, STOPPED)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with hosts_of(case) as hosts:
        for seed in range(seeds):
            for mode in modes:
                found[mode].append(run(case, mode, seed, samples, hosts))
                print(f"{name} {mode} {found[mode][-1]}", file=sys.stderr, flush=True)
    advice = advised(case, NoisyTask(samples).noise_scale(BATCH))
    rows = [_row(name, mode, found[mode], advice) for mode in modes]
    for row in rows:
        others = [o["time_to_target"] for o in rows if o is not row and o["time_to_target"]]
        own = row["time_to_target"]
        row["ratio_to_best_other"] = round(min(others) / own, 3) if own and others else None
    return rows


def _row(name: str, mode: str, runs: list[dict[str, Any]], advice: str) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
    reached_by_most = len(seconds) > len(runs) / 2
    return {
        "case": name,
        "mode": mode,
        "time_to_target": round(statistics.median(seconds), 3) if reached_by_most else None,
        "fastest": round(min(seconds), 3) if seconds else None,
        "slowest": round(max(seconds), 3) if seconds else None,
        "samples_per_s": round(statistics.median(run["samples_per_s"] for run in runs), 1),
        "step_ms": round(statistics.median(run["step_ms"] for run in runs), 2),
        "ratio_to_best_other": None,
        "advised": advice,
        "num_runs": len(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one short training: form, no numbers")
    parser.add_argument("--only", help="only this case")
    parser.add_argument("--seeds", type=int, default=3)
    for hidden in ("--worker", "--mode", "--result", "--seed", "--samples"):
        kind = {"action": "store_true"} if hidden == "--worker" else {}
        parser.add_argument(hidden, help=argparse.SUPPRESS, **kind)
    options = parser.parse_args()
    if options.worker:
        options.seed, options.samples = int(options.seed), int(options.samples)
        options.result = Path(options.result)
        train(options)
        return
    from _namespaces import why_not
    from _report import environment, print_table, write_report

    names = [options.only] if options.only else list(CASES)
    modes, seeds, samples = MODES, options.seeds, SAMPLES
    if options.quick:
        names, modes, seeds, samples = (
            ["one_eighth"],
            ("leave_out", "hybrid"),
            1,
            WARM_UP_BATCHES * BATCH,
        )
    rows: list[dict[str, Any]] = []
    for name in names:
        reason = why_not() if CASES[name].slow_mbit else None
        if reason:
            rows.append({"case": name, "mode": "", "skipped": reason})
            print(f"{name} skipped: {reason}", file=sys.stderr)
            continue
        rows += measure(name, modes, seeds, samples)
    print_table([row for row in rows if "skipped" not in row])
    write_report("hybrid", rows, options.json, environment())


if __name__ == "__main__":
    main()
