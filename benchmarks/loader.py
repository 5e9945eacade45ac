"""Steps/s of `fit` with the loader controller against AUTOTUNE and the best fixed setting.

The device is a sleep, so only the input pipeline is measured: no GPU is needed. Each run is a
separate process; policies take turns. Policies:

- "autotune": `tf.data.AUTOTUNE` everywhere, nothing of keras_het;
- "fixed": two threads for two CPUs, and so on: the controller's initial setting;
- "oracle": the best of a grid of fixed settings, found in advance;
- "tuner": `LoaderTuner`, from the same start as "fixed", its ramp included.

`idle_fraction` is the part of the time in which the device had no batch: 1 - steps/s times the time
of a step whose batch is ready; in (l), whose device works ahead of the host, the part in which the
device itself computed nothing. Ratios are medians over rounds.

    python benchmarks/loader.py [--case a ...] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from _loader_cases import CASES, in_child
from _report import environment, print_table, write_report

POLICIES = ("autotune", "fixed", "oracle", "tuner")
# The best number of threads with a buffer of 2, then the best buffer for it.
THREADS, PREFETCHES = (1, 2, 4, 8, 16, 32), (4, 16)
QUICK_CASES = "cdf"
STEPS = 900
# Policies without a ramp do not need 900 steps.
MOST_SECONDS = {"autotune": 6.0, "fixed": 6.0}
TIMEOUT_SECONDS = 120


def measure(name, policy, steps, most_seconds, settings=None):
    """Run once; return the sum over its workers, each forked before TensorFlow has started."""
    with others(CASES[name].other_programs):
        return measure_beside(name, policy, steps, most_seconds, settings)


@contextlib.contextmanager
def others(count):
    """Run programs that compute without end, at this one's priority."""
    endless = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(endless) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure_beside(name, policy, steps, most_seconds, settings):
    """Measure the same while other programs run."""
    context = multiprocessing.get_context("fork")
    workers = CASES[name].workers
    barrier = context.Barrier(workers) if workers > 1 else None
    children = []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        arguments = (name, policy, steps, most_seconds, settings)
        child = context.Process(target=in_child, args=(theirs, arguments, barrier))
        child.start()
        children.append((child, ours))
    results = []
    for child, connection in children:
        if not connection.poll(TIMEOUT_SECONDS):
            child.kill()
            raise RuntimeError(f"{name}, {policy}: no result after {TIMEOUT_SECONDS} s")
        results.append(connection.recv())
        child.join(10)
        if child.is_alive():
            child.kill()
    if errors := [result for result in results if isinstance(result, str)]:
        raise RuntimeError(f"{name}, {policy}: {errors}")
    total = dict(results[0])
    total["steps_per_s"] = sum(result["steps_per_s"] for result in results)
    total["peak_rss_mb"] = sum(result["peak_rss_mb"] for result in results)
    return total


def best_setting(name, quick):
    """Return the fastest fixed setting of the grid."""
    threads, prefetches = ((2, 16), ()) if quick else (THREADS, PREFETCHES)
    steps, seconds = (16, 1.0) if quick else (240, 1.2)
    if name.startswith("c"):
        seconds = 20.0  # both halves, however long
        steps = 16 if quick else 120
    found = {}

    def speed(settings):
        found[settings] = measure(name, "oracle", steps, seconds, settings)["steps_per_s"]

    for count in threads:
        speed((2 * count, 2, count))
    best = max(found, key=found.get)
    for prefetch in prefetches:
        speed((best[0], prefetch, best[2]))
    return max(found, key=found.get)


def most_seconds(name, policy):
    # the second half of (c) must count in every policy
    return 60.0 if name.startswith("c") else MOST_SECONDS.get(policy, 60.0)


def compare(name, rounds, steps, quick):
    settings = best_setting(name, quick)
    ready = measure(name, "ready", min(steps, 300), 3.0)["steps_per_s"]
    runs = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        order = POLICIES[turn % 2 :] + POLICIES[: turn % 2]
        for policy in order:
            chosen = settings if policy == "oracle" else None
            runs[policy].append(measure(name, policy, steps, most_seconds(name, policy), chosen))
    return [row_of(name, policy, runs, ready, settings) for policy in POLICIES]


def row_of(name, policy, runs, ready, settings):
    def median(field):
        values = [run[field] for run in runs[policy] if run[field] is not None]
        return round(statistics.median(values), 2) if values else None

    def ratios(peer):
        pairs = zip(runs[policy], runs[peer], strict=True)
        return sorted(ours["steps_per_s"] / theirs["steps_per_s"] for ours, theirs in pairs)

    speeds = sorted(run["steps_per_s"] for run in runs[policy])
    stalls = [run["longest_stall_ms"] for run in runs[policy] if run["longest_stall_ms"]]
    to_autotune, to_oracle = ratios("autotune"), ratios("oracle")
    idle = max(1.0 - median("steps_per_s") / ready, 0.0)
    return {
        "case": name,
        "policy": policy,
        "steps_per_s": median("steps_per_s"),
        "lowest_steps_per_s": round(speeds[0], 2),
        "highest_steps_per_s": round(speeds[-1], 2),
        "idle_fraction": round(idle, 3) if median("idle") is None else median("idle"),
        "ratio_to_autotune": round(statistics.median(to_autotune), 3),
        "ratio_to_oracle": round(statistics.median(to_oracle), 3),
        "lowest_ratio_to_oracle": round(to_oracle[0], 3),
        "peak_rss_mb": median("peak_rss_mb"),
        "longest_stall_ms": round(max(stalls), 1) if stalls else None,
        "moves": median("moves"),
        "setting": {
            "autotune": "AUTOTUNE",
            "fixed": "one thread a CPU",
            "oracle": str(settings),
            "tuner": runs["tuner"][-1]["settings"],
        }[policy],
        "num_runs": len(speeds),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs="*", help="letters of the cases, all by default")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    letters = arguments.case or (QUICK_CASES if arguments.quick else [name[0] for name in CASES])
    rounds, steps = (1, 24) if arguments.quick else (arguments.rounds, STEPS)
    rows = []
    for name in CASES:
        if name[0] in letters:
            rows += compare(name, rounds, steps, arguments.quick)
            print(f"{name}: done", file=sys.stderr, flush=True)
    columns = ["case", "policy", "steps_per_s", "idle_fraction", "ratio_to_autotune"]
    columns += ["ratio_to_oracle", "peak_rss_mb", "longest_stall_ms", "setting"]
    print_table(rows, columns)
    # TensorFlow starts threads when it is asked for devices: after the last fork
    write_report("loader", rows, arguments.json, environment())


if __name__ == "__main__":
    main()
