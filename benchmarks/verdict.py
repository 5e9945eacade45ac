"""Does the verdict name what slows a real training, and nothing where nothing does?

    python benchmarks/verdict.py [--json FILE] [--quick] [--only KIND] [--logs FOLDER]

Twelve faults: a slow device, a slow input pipeline, a CPU quota and a slow link, each of them from
the first step on ("static"), for 60 steps ("temporary") and growing for 40 steps ("creeping").
Telemetry records the training; afterwards the chief's recording as it was after every 5 steps is
diagnosed, so that the diagnosis itself disturbs no step. A fault is `named` if the first cause of
the verdict is its kind and its device or worker within 50 steps of its beginning, and from then to
the 50th step in every diagnosis; `steps_needed` is the step of the first of them. `kind_said` and
`said` are those of the 50th step. `alarms_before` counts diagnoses that named a cause before the
fault began. Five trainings of each kind have no fault: `false_alarms` counts the diagnoses that
named a cause, and `said` is the first of these. Before each training the benchmark waits for a
quiet machine, 20 s at most; `other_cpus` is how many CPUs other programs used meanwhile: where they
use many, a training is not undisturbed.

"compute": three devices of a process, EMULATED (they wait for 25 ms without computing), of which
one becomes 2 times slower. "input": two worker processes whose devices wait likewise; in one, each
batch takes 60 ms in a map of tf.data. "host": two that really compute, a quota of its cgroup leaves
one of them 0.4 CPUs. "link": two on hosts in network namespaces (see `_namespaces`), EMULATED
devices of 25 ms; one link falls from 1000 to 100 Mbit/s. The last two need root.

"all input", "all callbacks" and "all compute" are slow on all workers alike: a map and a callback
that sleep 60 ms and use no CPU, EMULATED devices that take twice as long. Each of them in one
process and in two, on a quiet machine and on one that other programs keep busy.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _cpu_quota
import _namespaces
import tensorflow as tf
from _hybrid_clusters import cluster_on_hosts
from _report import environment, print_table, write_report
from _verdict_faults import EXPECTED, Training, rows_of, trainings
from _verdict_training import OF_ALL, STEP_SECONDS, arguments_of, slow_device, train

import keras_het
from keras_het.launch.local.failure_report import describe_failures
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_environment import Emulation
from keras_het.strategy.measure.emulated_device import KERAS_HET_EMULATED_DEVICES

REPLICAS = 3
FAST_MBIT, SLOW_MBIT = 1000.0, 100.0
POLL_SECONDS = 0.005
TIMEOUT_SECONDS = 900
PATIENCE_SECONDS = 20.0


def in_this_process(
    given: list[Training], logs: Path | None, patience: float
) -> list[dict[str, Any]]:
    """Return the results of trainings on three emulated devices of this process."""
    device = {"speed": 1.0, "fixed_seconds": STEP_SECONDS, "seconds_per_sample": 0.0}
    os.environ[KERAS_HET_EMULATED_DEVICES] = json.dumps([device] * REPLICAS)
    strategy = keras_het.HeterogeneousStrategy(devices=[f"CPU:{i}" for i in range(REPLICAS)])
    os.environ[KERAS_HET_EMULATED_DEVICES] = ""
    places = [logs / f"{i} {each.case}" if logs else None for i, each in enumerate(given)]
    return [
        train(strategy, training, OF_ALL.get(training.kind, slow_device), place, patience)
        for training, place in zip(given, places, strict=True)
    ]


def on_this_machine(
    given: list[Training], logs: Path | None, patience: float
) -> list[dict[str, Any]]:
    """Return the results of trainings on two worker processes."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        more = [f"--patience={patience}", *([f"--logs={logs}"] if logs else [])]
        if not any(training.kind == "host" for training in given):
            return _results(arguments_of(given, results, *more), results)
        with _cpu_quota.cpu_quotas((1.0, 1.0)) as groups:
            more += ["--groups", *(str(group.parent) for group in groups)]
            return _results(arguments_of(given, results, *more), results)


def _results(command: list[str], path: Path) -> list[dict[str, Any]]:
    own = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        KERAS_HET_EMULATED_DEVICES: "",
        # A map and a device that wait occupy a thread each.
        "TF_NUM_INTEROP_THREADS": "6",
    }
    with LocalCluster(command, 2, env=own, keep_lines=100) as cluster:
        results = cluster.wait(timeout=TIMEOUT_SECONDS)
    if cluster.failures:
        raise RuntimeError(describe_failures(results))
    return list(json.loads(path.read_text()))


def on_hosts(given: list[Training], logs: Path | None, patience: float) -> list[dict[str, Any]]:
    """Return the results of trainings on two hosts, of which the second one's link fails."""
    emulation = Emulation((1.0, 1.0), 0.0, STEP_SECONDS)
    with (
        _namespaces.limited_hosts([FAST_MBIT, FAST_MBIT], mtu=9000) as hosts,
        tempfile.TemporaryDirectory() as folder,
    ):
        results, strength = Path(folder) / "results.json", Path(folder) / "strength"
        more = [f"--patience={patience}", *([f"--logs={logs}"] if logs else [])]
        more.append(f"--strength={strength}")
        command = arguments_of(given, results, *more)
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(strength, hosts, ended))
        follower.start()
        try:
            with cluster_on_hosts(command, emulation, 0, hosts) as wait:
                wait()
        finally:
            ended.set()
            follower.join()
        return list(json.loads(results.read_text()))


def _follow(path: Path, hosts: _namespaces.Hosts, ended: threading.Event) -> None:
    """Change the rate of a link as a worker tells."""
    set_to = 0.0
    while not ended.wait(POLL_SECONDS):
        wanted = float(path.read_text()) if path.exists() else 0.0
        if wanted != set_to:
            seconds = (1.0 - wanted) / FAST_MBIT + wanted / SLOW_MBIT
            hosts.set_rate(1, 1.0 / seconds)
            set_to = wanted


def measure(kinds: list[str], quick: bool, logs: Path | None) -> list[dict[str, Any]]:
    """Return the rows of some kinds of faults."""
    patience = 0.0 if quick else PATIENCE_SECONDS
    reasons = {"host": _cpu_quota.why_not(), "link": _namespaces.why_not()}
    given = [each for kind in kinds for each in trainings(kind, quick)]
    done: list[tuple[Training, dict[str, Any]]] = []
    # The same processes do all that they can, one training after the other.
    for way in (in_this_process, on_this_machine, on_hosts):
        chosen = [each for each in given if way is way_of(each) and not reasons.get(each.kind)]
        if chosen:
            done += zip(chosen, way(chosen, logs, patience), strict=True)
    done.sort(key=lambda each: kinds.index(each[0].kind))
    rows = rows_of([training for training, _ in done], [result for _, result in done])
    skipped = dict.fromkeys((each.case, reasons.get(each.kind)) for each in given)
    return rows + [{"case": case, "skipped": reason} for case, reason in skipped if reason]


def way_of(training: Training) -> Callable[..., list[dict[str, Any]]]:
    """Return where a training takes place."""
    if training.kind == "link":
        return on_hosts
    return in_this_process if training.processes == 1 else on_this_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few steps: form, not numbers")
    parser.add_argument(
        "--only", choices=EXPECTED, action="append", help="only faults of this kind"
    )
    parser.add_argument("--logs", type=Path, help="keep the telemetry's logs in this folder")
    options = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    # A sleeping device occupies a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * REPLICAS)
    rows = measure(options.only or list(EXPECTED), options.quick, options.logs)
    faults = [row for row in rows if "named" in row]
    quiet = [row for row in rows if "false_alarms" in row]
    skipped = [row for row in rows if "skipped" in row]
    if faults:
        columns = ["case", "named", "kind_said", "steps_needed", "alarms_before", "other_cpus"]
        print_table(faults, columns)
        print_table(quiet, ["case", "false_alarms", "diagnoses", "other_cpus", "said"])
        print(f"named {sum(row['named'] for row in faults)} of {len(faults)} faults")
        alarms = sum(bool(row["false_alarms"]) for row in quiet)
        print(f"alarms in {alarms} of {len(quiet)} undisturbed trainings")
    if skipped:
        print_table(skipped)
    write_report("verdict", rows, options.json, environment())


if __name__ == "__main__":
    main()
