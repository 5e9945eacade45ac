"""Samples/s of the balance policies on clusters of emulated devices, against the best split.

    python benchmarks/balance.py [--json FILE] [--quick]

All replicas are logical devices of one process; a device is emulated by a delay that burns no CPU.
Everything else is real: the data path, the step, its collective, the measurement in it, the policy.

The limit is the same training with the shares that the solver finds for the true speeds, in the
same run; in dynamic cases it changes them in the very steps in which the speed changes. Policies
take turns in every round. `samples_per_s` is that of the second half of a static run (the median
step) and of the whole of a dynamic one or one with noise; `whole_run_ratio_to_limit` counts every
step but the first.

Devices that "work ahead" are asynchronous, as GPUs are: only some steps are measured there, and the
limit is a training that measures nothing. Time is taken when devices have computed, after the first
step, in the middle and at the end.

Five more parts: "simulated", see `_simulated_balance`; "memory", in which the memory of the fastest
device holds 50 samples: without that bound, with shares of at most 50, and with larger ones in
micro-batches of 50, each of which has the device's fixed time; "reaction", in which a device
becomes three times slower at twenty different steps of a run, in one process with three devices and
in two workers with one each; "cpu quotas", in which two worker processes really compute and one is
throttled by a cgroup; and "accuracy", the digits of scikit-learn under the even split and under
"min_max".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _cpu_quota import TIMEOUT_SECONDS, measure_with_quotas
from _peer_policies import PEERS
from _report import environment, print_table, write_report
from _simulated_balance import best_shares, simulated_rows
from digits import global_batches, load_digits, make_model

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BatchBalancer
from keras_het.launch.local.failure_report import describe_failures
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.planning import (
    BalancePlan,
    BalancePolicy,
    LinearTimeModel,
    MicroBatchTimeModel,
)
from keras_het.strategy.measure import emulated_device
from keras_het.strategy.measure.emulated_device import KERAS_HET_EMULATED_DEVICES

MOST_REPLICAS = 6
POLICIES = ("even", *PEERS, "min_max")
WITHIN = 1.05  # a step this close to the best one is balanced


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices, and the changes to them.

    Args:
        speeds: relative speed of each device.
        batch: samples of a step.
        milliseconds: time per sample on a device of speed 1.
        fixed_milliseconds: fixed time of every step of a device.
        upper: largest share of each device, None for no bound.
        slow_steps: ranges of steps in which the first device is three times slower.
        noise: standard deviation of the logarithm of each time of a device.
        asynchronous: whether devices work ahead of their host.
        micro_batch_size: most samples that each device computes on at a time, None for any number.
    """

    speeds: tuple[float, ...]
    batch: int
    milliseconds: float
    fixed_milliseconds: float = 0.0
    upper: tuple[int | None, ...] | None = None
    slow_steps: tuple[tuple[int, int], ...] = ()
    noise: float = 0.0
    asynchronous: bool = False
    micro_batch_size: tuple[int | None, ...] | None = None

    @property
    def upper_bounds(self) -> list[int] | None:
        """The largest share of each device, None if none is bound."""
        if self.upper is None:
            return None
        return [self.batch if most is None else most for most in self.upper]

    def is_slow(self, step: int) -> bool:
        """Whether the first device is three times slower in a step."""
        return any(start <= step < end for start, end in self.slow_steps)

    def models(self, step: int = 0) -> list[LinearTimeModel]:
        """Return the true time models in a step."""
        factors = [3.0 if self.is_slow(step) else 1.0] + [1.0] * (len(self.speeds) - 1)
        lines = [
            LinearTimeModel(
                factor * self.fixed_milliseconds / 1e3, factor * self.milliseconds / speed / 1e3
            )
            for factor, speed in zip(factors, self.speeds, strict=True)
        ]
        sizes = self.micro_batch_size or [None] * len(lines)
        return [
            line
            if most is None
            else MicroBatchTimeModel(*dataclasses.astuple(line), line.fixed_seconds, most)
            for line, most in zip(lines, sizes, strict=True)
        ]

    def slow_downs(self, step: int) -> list[float]:
        """Return how many times slower than its speed each device is in a step, noise included."""
        noise = np.random.default_rng(step).standard_normal(len(self.speeds))
        factors = np.exp(self.noise * noise)
        factors[0] *= 3.0 if self.is_slow(step) else 1.0
        return [float(factor) for factor in factors]

    def best_shares(self, step: int = 0) -> tuple[int, ...]:
        """Return the solver's shares for the true speeds."""
        shares = best_shares(self.models(step), self.batch, self.upper_bounds)
        return tuple(int(share) for share in shares)

    def seconds(self, shares: Sequence[int], step: int = 0) -> float:
        """Return the true compute time of a step."""
        used = zip(self.models(step), shares, strict=True)
        return max(model.seconds(share) if share else 0.0 for model, share in used)


CLUSTERS = {
    "1:1": Cluster((1, 1), 40, 2.0),
    "2:1": Cluster((2, 1), 60, 2.0),
    "4:2:1": Cluster((4, 2, 1), 140, 2.0),
    "4:2:1:1": Cluster((4, 2, 1, 1), 160, 2.0),
    "8:1": Cluster((8, 1), 180, 2.0),
    "4:2:1 + 20 ms": Cluster((4, 2, 1), 140, 2.0, fixed_milliseconds=20.0),
    "4:2:1, memory bound": Cluster((4, 2, 1), 140, 2.0, upper=(50, None, None)),
    "4:2:1:1, working ahead": Cluster((4, 2, 1, 1), 160, 2.0, asynchronous=True),
    "4:2:1, one slows down, working ahead": Cluster(
        (4, 2, 1), 140, 2.0, slow_steps=((50, 100),), asynchronous=True
    ),
    "4:2:1, one comes and goes": Cluster(
        (4, 2, 1), 140, 2.0, slow_steps=((30, 50), (70, 90), (110, 130))
    ),
    "4:4:2:2:1:1, one slows down": Cluster((4, 4, 2, 2, 1, 1), 280, 2.0, slow_steps=((50, 100),)),
    "4:2:1, noise of 20 %": Cluster((4, 2, 1), 140, 2.0, noise=0.2),
    "4:2:1, one slows down, noise of 20 %": Cluster(
        (4, 2, 1), 140, 2.0, slow_steps=((50, 100),), noise=0.2
    ),
    "4:2:1, one slows down": Cluster((4, 2, 1), 140, 2.0, slow_steps=((50, 100),)),
}


class Limit(BalancePolicy):
    """The policy that knows the true speeds."""

    name = "limit"
    shares: tuple[int, ...] = ()

    def __init__(self, cluster: Cluster, lookahead: int) -> None:
        self._cluster = cluster
        self._lookahead = lookahead

    def observe(self, step: int, shares: Any, seconds: Any) -> None:
        """Ignore measurements: the speeds are known."""

    def propose(self, step: int) -> BalancePlan | None:
        """Return the shares for the step in which they will be in effect."""
        shares = self._cluster.best_shares(step + self._lookahead + 1)
        if shares == self.shares:
            return None
        self.shares = shares
        return BalancePlan(step, self.name, shares, "true speeds")

    def set_upper(self, replica: int, samples: int) -> None:
        """Not needed: the cluster has the bounds."""

    def set_global_batch_size(self, samples: int) -> None:
        """Not needed: the cluster has the size."""


class Clock(keras.callbacks.Callback):
    """Timer of steps, which also slows devices down."""

    def __init__(self, cluster: Cluster, num_steps: int) -> None:
        super().__init__()
        self._cluster = cluster
        self._changes = bool(cluster.slow_steps or cluster.noise)
        # At each end of a step a host that works ahead would have to wait.
        self._timed = (1, num_steps // 2, num_steps) if cluster.asynchronous else ()
        self.ends: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = batch + 1
        if not self._timed or step in self._timed:
            emulated_device.until_computed()()
            self.ends[step] = time.perf_counter()
        if self._changes:
            for replica, factor in enumerate(self._cluster.slow_downs(step)):
                emulated_device.slow_down(replica, factor)

    def step_seconds(self) -> list[float]:
        """Seconds of each step but the first; of those between two times, their mean."""
        steps, seconds = np.diff(list(self.ends)), np.diff(list(self.ends.values()))
        return np.repeat(seconds / steps, steps).tolist()


class KnownSpeeds(keras.callbacks.Callback):
    """The limit where few steps are measured: shares for the true speeds, set in each step."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        coming = batch + self._bench.lookahead + 1
        self._bench.strategy.set_share_weights(self._bench.cluster.best_shares(coming))


class Bench:
    """One cluster: a strategy with emulated devices, retrained under every policy."""

    def __init__(self, cluster: Cluster, num_steps: int) -> None:
        self.cluster = cluster
        self.num_steps = num_steps
        devices = [
            {
                "speed": speed,
                "fixed_seconds": cluster.fixed_milliseconds / 1e3,
                "seconds_per_sample": cluster.milliseconds / speed / 1e3,
                "asynchronous": cluster.asynchronous,
            }
            for speed in cluster.speeds
        ]
        if "TF_CONFIG" in os.environ:  # one of them for each worker
            devices = [devices[json.loads(os.environ["TF_CONFIG"])["task"]["index"]]]
        os.environ[KERAS_HET_EMULATED_DEVICES] = json.dumps(devices)
        names = [f"CPU:{index}" for index in range(len(devices))]
        self.strategy = HeterogeneousStrategy(
            devices=names, micro_batch_size=cluster.micro_batch_size
        )
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            self.model.compile("sgd", "mse")
        rows = tf.zeros([cluster.batch, 8]), tf.zeros([cluster.batch, 1])
        self.lookahead = 2
        self.data = self.strategy.distribute(
            tf.data.Dataset.from_tensors(rows).repeat(num_steps), lookahead=self.lookahead
        )

    def balancer(self, policy: str) -> BatchBalancer:
        """Return the callback with a policy of ours or of a peer."""
        if policy == "limit":
            return BatchBalancer(Limit(self.cluster, self.lookahead))
        if policy in PEERS:
            speeds, batch = self.cluster.speeds, self.cluster.batch
            upper = self.cluster.upper_bounds
            return BatchBalancer(PEERS[policy](len(speeds), batch, upper=upper))
        return BatchBalancer(policy, max_share=self.cluster.upper)

    def run(self, policy: str) -> dict[str, Any]:
        """Train under a policy; return the results of one run."""
        for replica in range(len(self.cluster.speeds)):
            emulated_device.slow_down(replica, 1.0)
        self.strategy.set_share_weights([1] * len(self.cluster.speeds))
        if policy == "limit":
            self.strategy.set_share_weights(self.cluster.best_shares())
        balancer = self.balancer(policy)
        is_known = policy == "limit" and self.cluster.asynchronous
        callbacks = [
            KnownSpeeds(self) if is_known else balancer,
            Clock(self.cluster, self.num_steps),
        ]
        self.model.fit(self.data, epochs=1, verbose=0, callbacks=callbacks)
        seconds = callbacks[-1].step_seconds()
        shares = shares_of_steps(balancer, self.num_steps)
        is_steady = not self.cluster.slow_steps
        steady = seconds[len(seconds) // 2 :] if is_steady else seconds
        # Noise belongs to a step's time; what else disturbs single ones does not.
        middle = statistics.median if is_steady and not self.cluster.noise else statistics.mean
        balanced = steps_to_balance(self.cluster, shares) if shares else 0
        return {
            "samples_per_s": self.cluster.batch / middle(steady),
            "whole_run_samples_per_s": self.cluster.batch / statistics.mean(seconds),
            "steps_to_balance": balanced,
            "plan_changes": len(balancer.plans) - 1,
            "plan_changes_after_balance": sum(
                plan.step >= max(balanced, 0) for plan in balancer.plans
            )
            if balanced is not None
            else None,
        }


def shares_of_steps(balancer: BatchBalancer, num_steps: int) -> list[tuple[int, ...]]:
    """Return each step's shares; a step that was not measured has the next measured step's."""
    if not (rows := list(balancer.measurements)):
        return []
    measured = np.subtract([row["step"] for row in rows], rows[0]["step"])
    following = np.searchsorted(measured, np.arange(num_steps)).clip(max=len(rows) - 1)
    return [tuple(rows[index]["shares"]) for index in following]


def steps_to_balance(cluster: Cluster, shares: Sequence[tuple[int, ...]]) -> int | None:
    """First step from which on all are near the best one; steps after the last change of speed."""
    start = cluster.slow_steps[-1][1] if cluster.slow_steps else 0
    best = cluster.seconds(cluster.best_shares(start), start)
    far = [
        step
        for step in range(start, len(shares))
        if cluster.seconds(shares[step], step) > WITHIN * best
    ]
    if far and far[-1] == len(shares) - 1:
        return None
    return far[-1] + 1 - start if far else 0


def compare(name: str, num_steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return one row for every policy on one cluster."""
    bench = Bench(CLUSTERS[name], num_steps)
    bench.run("even")  # Traces the step.
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in ("limit", *POLICIES)}
    for _ in range(rounds):
        for policy, done in runs.items():
            done.append(bench.run(policy))
    return [row_of(name, policy, runs, num_steps) for policy in runs]


def row_of(
    name: str, policy: str, runs: dict[str, list[dict[str, Any]]], num_steps: int
) -> dict[str, Any]:
    def ratios(field: str, peer: str) -> list[float]:
        pairs = zip(runs[policy], runs[peer], strict=True)
        return sorted(ours[field] / theirs[field] for ours, theirs in pairs)

    def middle(field: str) -> float | None:
        values = [run[field] for run in runs[policy]]
        return None if None in values else statistics.median(values)

    to_limit = ratios("samples_per_s", "limit")
    whole = ratios("whole_run_samples_per_s", "limit")
    return {
        "case": name,
        "policy": policy,
        "samples_per_s": round(middle("samples_per_s") or 0.0, 1),
        "ratio_to_limit": round(statistics.median(to_limit), 4),
        "lowest_ratio": round(to_limit[0], 4),
        "highest_ratio": round(to_limit[-1], 4),
        "whole_run_ratio_to_limit": round(statistics.median(whole), 4),
        "speedup_over_even": round(statistics.median(ratios("samples_per_s", "even")), 3),
        "steps_to_balance": middle("steps_to_balance"),
        "plan_changes": middle("plan_changes"),
        "plan_changes_after_balance": middle("plan_changes_after_balance"),
        "num_steps": num_steps,
        "num_runs": len(to_limit),
    }


def memory_rows(
    fixed_milliseconds: float, num_steps: int, rounds: int, most: int = 50
) -> list[dict[str, Any]]:
    """Samples/s of "min_max" if the memory of the fastest device holds few samples."""
    fits = Cluster((4, 2, 1), 140, 2.0, fixed_milliseconds=fixed_milliseconds)
    bound = (most, None, None)
    clusters = {
        "fits": fits,
        "max_share": dataclasses.replace(fits, upper=bound),
        "micro_batch_size": dataclasses.replace(fits, micro_batch_size=bound),
    }
    benches = {kind: Bench(cluster, num_steps) for kind, cluster in clusters.items()}
    for bench in benches.values():
        bench.run("even")  # Traces the step.
    speeds: dict[str, list[float]] = {kind: [] for kind in benches}
    for _ in range(rounds):
        for kind, bench in benches.items():
            speeds[kind].append(bench.run("min_max")["samples_per_s"])
    true = {kind: each.seconds(each.best_shares()) for kind, each in clusters.items()}
    rows = []
    for kind, bench in benches.items():
        row: dict[str, Any] = {
            "case": f"memory, {fixed_milliseconds:g} ms a part",
            "memory": kind,
            "samples_per_s": round(statistics.median(speeds[kind]), 1),
            "shares": " ".join(map(str, bench.strategy.current_shares)),
        }
        for other in ("fits", "max_share"):
            ratios = [a / b for a, b in zip(speeds[kind], speeds[other], strict=True)]
            row[f"ratio_to_{other}"] = round(statistics.median(ratios), 3)
            row[f"lowest_to_{other}"] = round(min(ratios), 3)
            row[f"possible_to_{other}"] = round(true[other] / true[kind], 3)
        rows.append({**row, "num_runs": rounds})
    return rows


class Reaction(keras.callbacks.Callback):
    """Slows the first device down in a step, and notes when shares follow."""

    def __init__(self, bench: Bench, slow_step: int) -> None:
        super().__init__()
        self._bench, self._slow_step = bench, slow_step
        self.shares: list[tuple[int, ...]] = []
        self.starts: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self._slow_step:
            emulated_device.slow_down(0, 3.0)
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.shares.append(self._bench.strategy.current_shares)

    def found(self) -> tuple[int, float] | None:
        """Steps and seconds until the first one with other shares."""
        slow = self._slow_step
        for step in range(slow, len(self.shares)):
            if self.shares[step] != self.shares[slow - 1]:
                return step - slow, self.starts[step] - self.starts[slow]
        return None


def reactions_of_two_workers(num_phases: int) -> list[dict[str, Any]]:
    """The same for two workers, whose chief writes its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--reaction", str(num_phases), "--json", str(path)]
        with LocalCluster(command, 2) as cluster:
            results = cluster.wait(timeout=TIMEOUT_SECONDS)
        if cluster.failures:
            raise RuntimeError(describe_failures(results))
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def reaction_rows(num_phases: int, speeds: tuple[int, ...] = (4, 2, 1)) -> list[dict[str, Any]]:
    """How late shares follow a device that becomes three times slower, at each phase of a run."""
    rows = []
    where = ", two workers" if "TF_CONFIG" in os.environ else ""
    for asynchronous in (False, True):
        cluster = Cluster(speeds, 20 * sum(speeds), 0.5, asynchronous=asynchronous)
        bench = Bench(cluster, 40 + num_phases + 40)
        bench.run("even")
        found = []
        for phase in range(num_phases):
            emulated_device.slow_down(0, 1.0)
            bench.strategy.set_share_weights([1] * len(cluster.speeds))
            reaction = Reaction(bench, 40 + phase)
            callbacks = [BatchBalancer(), reaction]
            bench.model.fit(bench.data, epochs=1, verbose=0, callbacks=callbacks)
            found.append(reaction.found())
        seen = [each for each in found if each is not None]
        row: dict[str, Any] = {
            "case": f"reaction, {'working ahead' if asynchronous else 'all steps measured'}{where}",
            "num_phases": num_phases,
            "num_without": len(found) - len(seen),
        }
        for index, unit in enumerate(("steps", "seconds")):
            values = sorted(each[index] for each in seen)
            row[f"median_{unit}"] = round(statistics.median(values), 3) if values else None
            row[f"most_{unit}"] = round(values[-1], 3) if values else None
        rows.append(row)
    return rows


def accuracy_rows(seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Test accuracy of the digits after training under the even split and under "min_max"."""
    devices = [
        {"speed": s, "fixed_seconds": 0.0, "seconds_per_sample": 5e-4 / s} for s in (4, 2, 1)
    ]
    os.environ[KERAS_HET_EMULATED_DEVICES] = json.dumps(devices)
    train, test = load_digits()
    rows = []
    for seed in range(seeds):
        for policy in ("even", "min_max"):
            keras.utils.set_random_seed(seed)
            strategy = HeterogeneousStrategy(devices=["CPU:0", "CPU:1", "CPU:2"])
            with strategy.scope():
                model = make_model()
            balancer = BatchBalancer(policy)
            model.fit(global_batches(*train, 56), epochs=epochs, verbose=0, callbacks=[balancer])
            result = model.evaluate(global_batches(*test, 56), verbose=0, return_dict=True)
            rows.append(
                {
                    "case": f"accuracy, seed {seed}",
                    "policy": policy,
                    "test_accuracy": round(float(result["accuracy"]), 5),
                    "plan_changes": len(balancer.plans) - 1,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few steps: form, not numbers")
    parser.add_argument("--only", help="only clusters whose names contain this, or one part")
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each policy")
    parser.add_argument("--reaction", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * MOST_REPLICAS
    )
    # A sleeping device occupies a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * MOST_REPLICAS)
    if options.reaction:
        reactions = reaction_rows(options.reaction, speeds=(4, 1))
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            options.json.write_text(json.dumps(reactions))
        return
    names = [name for name in CLUSTERS if options.only is None or options.only in name]
    if options.quick:
        names = names[1:2] + names[-1:]
    rows: list[dict[str, Any]] = []
    for name in names:
        dynamic = bool(CLUSTERS[name].slow_steps or CLUSTERS[name].noise)
        num_steps = (150 if dynamic else 60) if not options.quick else 16
        rows += compare(name, num_steps, 1 if options.quick else options.rounds)
        print(f"{name} done", file=sys.stderr, flush=True)
    columns = ["samples_per_s", "ratio_to_limit", "whole_run_ratio_to_limit", "speedup_over_even"]
    columns += ["steps_to_balance", "plan_changes", "plan_changes_after_balance"]
    if rows:
        print_table(rows, ["case", "policy", *columns])
    for part, measure in PARTS.items():
        if options.only in (None, part):
            found = measure(options.quick)
            print_table(found)
            rows += found
    write_report("balance", rows, options.json, environment())


def _memory(quick: bool) -> list[dict[str, Any]]:
    num_steps, rounds = (16, 1) if quick else (60, 5)
    return [row for fixed in (2.0, 20.0) for row in memory_rows(fixed, num_steps, rounds)]


def _reaction(quick: bool) -> list[dict[str, Any]]:
    num_phases = 2 if quick else 20
    return reaction_rows(num_phases) + reactions_of_two_workers(num_phases)


def _accuracy(quick: bool) -> list[dict[str, Any]]:
    return accuracy_rows(1 if quick else 3, 1 if quick else 5)


def _cpu_quotas(quick: bool) -> list[dict[str, Any]]:
    return list(measure_with_quotas(quick=quick))


PARTS = {
    "memory": _memory,
    "cpu quotas": _cpu_quotas,
    "accuracy": _accuracy,
    "reaction": _reaction,
    "simulated": simulated_rows,
}


if __name__ == "__main__":
    main()
