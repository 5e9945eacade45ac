"""Two workers that really compute, throttled by CPU quotas of their cgroups or on one core."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_het.launch.local.failure_report import describe_failures
from keras_het.launch.local.local_cluster import LocalCluster

EMULATED = "KERAS_HET_EMULATED_DEVICES"  # not here
CGROUPS = Path("/sys/fs/cgroup")
# Quota of each worker, in cores, and whether both run on one and the same core.
CASES = {
    "cpu quotas 1:0.35": ((1.0, 0.35), False),
    "one shared core": ((1.0, 1.0), True),
    "one shared core, quotas 0.6:0.25": ((0.6, 0.25), True),
}
PERIOD_MICROSECONDS = 5_000  # short compared to a step, so a step does not see single periods
BATCH = 8192  # makes computing take longer than exchanging gradients
TIMEOUT_SECONDS = 400


def measure_with_quotas(quick: bool) -> list[dict[str, Any]]:
    """Return one row per case and policy, or a single row with the reason for skipping them."""
    reason = why_not()
    if reason:
        return [{"case": "cpu quotas", "policy": "min_max", "skipped": reason}]
    cases = list(CASES)[:1] if quick else list(CASES)
    return [row for case in cases for row in measure_case(case, quick)]


def measure_case(case: str, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each policy."""
    quotas, is_shared = CASES[case]
    steps, rounds = (12, 1) if quick else (60, 5)
    with cpu_quotas(quotas) as groups, tempfile.TemporaryDirectory() as folder:
        core = str(min(os.sched_getaffinity(0))) if is_shared else ""
        arguments = [str(steps), str(rounds), folder, core, *map(str, groups)]
        command = [sys.executable, str(Path(__file__)), *arguments]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", EMULATED: ""}
        with LocalCluster(command, 2, env=environment) as cluster:
            results = cluster.wait(timeout=TIMEOUT_SECONDS)
        if cluster.failures:
            raise RuntimeError(describe_failures(results))
        runs = json.loads((Path(folder) / "runs.json").read_text())
    return [row_of(case, policy, runs) for policy in runs]


def row_of(case: str, policy: str, runs: dict[str, list[float]]) -> dict[str, Any]:
    ratios = sorted(ours / even for ours, even in zip(runs[policy], runs["even"], strict=True))
    return {
        "case": case,
        "policy": policy,
        "speedup_over_even": round(statistics.median(ratios), 3),
        "lowest_ratio": round(ratios[0], 3),
        "highest_ratio": round(ratios[-1], 3),
        "num_runs": len(ratios),
    }


def why_not() -> str | None:
    """Return why CPU quotas cannot be set here, or None."""
    if len(os.sched_getaffinity(0)) < 2:
        return "fewer than two cores"
    try:
        with cpu_quotas((0.5, 0.5)):
            return None
    except OSError as error:
        return f"CPU quotas are not permitted: {error}"


@contextlib.contextmanager
def cpu_quotas(quotas: tuple[float, ...]) -> Iterator[list[Path]]:
    """Make one cgroup per worker; yield the files that take their process ids."""
    version_1 = (CGROUPS / "cpu" / "cpu.cfs_period_us").exists()
    root = CGROUPS / "cpu" if version_1 else CGROUPS
    made: list[Path] = []
    try:
        for index, quota in enumerate(quotas):
            group = root / f"keras_het_{os.getpid()}_{index}"
            group.mkdir()
            made.append(group)
            microseconds = int(quota * PERIOD_MICROSECONDS)
            if version_1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(microseconds))
            else:
                (group / "cpu.max").write_text(f"{microseconds} {PERIOD_MICROSECONDS}")
        yield [group / "cgroup.procs" for group in made]
    finally:
        for group in made:
            group.rmdir()


def worker() -> None:
    """Run one of the two workers."""
    steps, rounds, folder, core, *groups = sys.argv[1:]
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    import time

    import keras
    import numpy as np
    import tensorflow as tf
    from _peer_policies import PEERS

    import keras_het

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    rows = tf.zeros([BATCH, 256]), tf.zeros([BATCH, 10])
    data = strategy.distribute(tf.data.Dataset.from_tensors(rows).repeat(int(steps)))
    model.fit(data, verbose=0)  # Traces the step before this process becomes slow.
    Path(groups[index]).write_text(str(os.getpid()))
    if core:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {int(core)})

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    runs: dict[str, list[float]] = {"even": [], "proportional": [], "min_max": []}
    for _ in range(int(rounds)):
        for policy, done in runs.items():
            strategy.set_share_weights([1, 1])
            clock = Clock()
            given: Any = PEERS[policy](2, BATCH) if policy in PEERS else policy
            model.fit(data, verbose=0, callbacks=[keras_het.callbacks.BatchBalancer(given), clock])
            half = np.diff(clock.ends)[len(clock.ends) // 2 :]
            done.append(BATCH / float(np.median(half)))
    if strategy.is_chief:
        (Path(folder) / "runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    worker()
