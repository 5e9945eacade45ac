"""Time of the exact min-max plan against the number of replicas.

`mode` is `linear` for straight lines and `general` for a function of the shares that is only known
to be nondecreasing: here communication that overlaps with backward.

    python benchmarks/solver.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from keras_het.planning.balance.min_max import min_max_shares, min_max_shares_linear

REPLICAS = (10, 100, 1000, 10_000)
SAMPLES_PER_REPLICA = 128


def problem(replicas, mode, seed):
    """Return a solver without arguments, and its times, for devices up to 100:1 apart."""
    random = np.random.default_rng(seed)
    total = SAMPLES_PER_REPLICA * replicas
    fixed = random.uniform(0, 0.02, replicas)
    slope = 10.0 ** random.uniform(-4, -2, replicas)

    def overlapped(shares):
        backward = 0.6 * slope * shares
        return fixed + slope * shares + np.maximum(0, 0.01 - 0.8 * backward)

    def linear(shares):
        return fixed + slope * shares

    if mode == "linear":
        return lambda: min_max_shares_linear(fixed, slope, total), linear, total
    none = np.zeros(replicas, np.int64)
    return lambda: min_max_shares(overlapped, total, none), overlapped, total


def check(shares, times, total):
    """Check an optimum: within slightly less time there is no place for all samples."""
    longest = np.where(shares > 0, times(shares), 0.0).max() * (1 - 1e-9)
    low, high = np.zeros_like(shares), np.full_like(shares, total)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = times(middle) <= longest
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return int(shares.sum()) == total and int(low.sum()) < total


def measure(replicas, mode, repeats):
    milliseconds, optimal = [], True
    for seed in range(repeats + 1):
        solve, times, total = problem(replicas, mode, seed)
        start = time.perf_counter()
        shares = solve()
        milliseconds.append((time.perf_counter() - start) * 1e3)
        optimal = optimal and check(shares, times, total)
    milliseconds = milliseconds[1:]  # the first one includes numpy's startup
    return {
        "case": f"{replicas} replicas",
        "mode": mode,
        "replicas": replicas,
        "global_batch_size": SAMPLES_PER_REPLICA * replicas,
        "milliseconds": statistics.median(milliseconds),
        "milliseconds_min": min(milliseconds),
        "milliseconds_max": max(milliseconds),
        "optimal": optimal,
        "runs": repeats,
    }


def print_table(rows):
    table = Table()
    columns = [name for name in rows[0] if name not in ("case", "global_batch_size")]
    for name in columns:
        table.add_column(name.replace("milliseconds", "ms").replace("_", " "))
    for row in rows:
        values = [row[name] for name in columns]
        table.add_row(*[f"{v:.2f}" if isinstance(v, float) else str(v) for v in values])
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats = 5 if options.quick else 25
    rows = [measure(n, mode, repeats) for mode in ("linear", "general") for n in REPLICAS]
    print_table(rows)
    environment = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.system(),
    }
    if options.json:
        report = {"benchmark": "solver", "environment": environment, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
