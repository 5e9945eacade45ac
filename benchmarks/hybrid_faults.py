"""Does a lost, stopped, late or unreachable async worker, or service, change the group's step?

    python benchmarks/hybrid_faults.py [--json FILE] [--quick] [--runs N]

Three workers of speed 8 train synchronously, one of speed 1 asynchronously (`_hybrid_training`
describes what). Cases: "undisturbed"; "killed" (SIGKILL) and "stopped" (SIGSTOP) soon after it
began; "late" (it joins when the group is at its 200th step); "stalled" (its cable is unplugged for
30 seconds, on hosts in network namespaces; skipped without root), and "on hosts", the same
undisturbed; "service lost" (`keras-het parameter-server` on a separate task is stopped soon after
it began, until the end, with `on_service_loss="continue"`), and "served", the same undisturbed.
`step_ms` is the median of all steps of the group in all runs, `step_ms_p99` their 99th percentile,
`ratio` the median over that of the undisturbed case, in the same run. `long_steps` is how many took
longer than a second, in all runs together: for a lost service one per run, that of the loss, which
lasts `timeout_seconds`."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _hybrid_clusters import cluster_on_hosts, local_cluster, served_cluster
from _hybrid_training import SAMPLES, WARM_UP_BATCHES, command, wait_for

SPEEDS, SAMPLE_MILLISECONDS = (8.0, 8.0, 8.0, 1.0), 8.0
STALL_SECONDS, LINK_MBIT = 30.0, 1000.0
LATE_STEP = 200
# The group alone needs a little longer than the stall.
LONG = 4 * SAMPLES
HERE = ("undisturbed", "killed", "stopped", "late")
ON_HOSTS = ("on hosts", "stalled")
SERVED = ("served", "service lost")
LONG_STEP_MS = 1e3
WORKER = len(SPEEDS) - 1


def run_here(case: str, samples: int) -> list[float]:
    """Return the seconds of the group's steps on this machine's loopback."""
    with _training(samples, *([f"--late={LATE_STEP}"] if case == "late" else [])) as (task, result):
        with local_cluster(task, _emulation(), 1) as cluster:
            if case in ("killed", "stopped"):
                wait_for(result.with_suffix(".async"), 2)
                kind = signal.SIGKILL if case == "killed" else signal.SIGSTOP
                cluster.kill(WORKER, kind)
            wait_for(result)
        return list(json.loads(result.read_text())["steps"])


def run_on_hosts(case: str, samples: int) -> list[float]:
    """Return the seconds of the group's steps on hosts with links."""
    from _namespaces import limited_hosts

    with (
        limited_hosts([LINK_MBIT] * len(SPEEDS)) as hosts,
        _training(samples) as (task, result),
        cluster_on_hosts(task, _emulation(), 1, hosts),
    ):
        if case == "stalled":
            wait_for(result.with_suffix(".async"), 2)
            hosts.set_link(WORKER, up=False)
            until = time.monotonic() + STALL_SECONDS
            while time.monotonic() < until and not result.exists():
                time.sleep(0.05)
            hosts.set_link(WORKER, up=True)
        wait_for(result)
        return list(json.loads(result.read_text())["steps"])


def run_served(case: str, samples: int) -> list[float]:
    """Return the seconds of the group's steps with a service on a separate task."""
    with (
        _training(samples, "--alone") as (task, result),
        served_cluster(task, _emulation(), 1) as service,
    ):
        if case == "service lost":
            wait_for(result.with_suffix(".async"), 2)
            service.send_signal(signal.SIGSTOP)
        wait_for(result)
        return list(json.loads(result.read_text())["steps"])


@contextlib.contextmanager
def _training(samples: int, *more: str) -> Iterator[tuple[list[str], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        yield command("hybrid", 0, samples, result, *more), result


def _emulation() -> Any:
    from keras_het.launch.local.worker_environment import Emulation

    return Emulation(SPEEDS, seconds_per_sample=SAMPLE_MILLISECONDS / 1e3)


def _row(case: str, runs: list[list[float]], undisturbed: float | None) -> dict[str, Any]:
    import numpy as np

    milliseconds = 1e3 * np.concatenate(runs)
    median = float(np.median(milliseconds))
    return {
        "case": case,
        "step_ms": round(median, 2),
        "step_ms_p99": round(float(np.percentile(milliseconds, 99)), 2),
        "longest_step_ms": round(float(milliseconds.max()), 2),
        "long_steps": int((milliseconds > LONG_STEP_MS).sum()),
        "ratio": None if undisturbed is None else round(median / undisturbed, 3),
        "num_steps": len(milliseconds),
        "num_runs": len(runs),
    }


def measure(cases: tuple[str, ...], run: Any, samples: int, num_runs: int) -> list[dict[str, Any]]:
    """Return all cases, the first of which is undisturbed, interleaved over the runs."""
    found: dict[str, list[list[float]]] = {case: [] for case in cases}
    for _ in range(num_runs):
        for case in cases:
            found[case].append(run(case, samples))
            last = _row(case, found[case][-1:], None)
            print(last, file=sys.stderr, flush=True)
    undisturbed = _row(cases[0], found[cases[0]], None)["step_ms"]
    return [_row(case, found[case], undisturbed) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one short training: form, no numbers")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    from _namespaces import why_not
    from _report import environment, print_table, write_report

    if options.quick:
        rows = measure(("undisturbed",), run_here, WARM_UP_BATCHES * 48, 1)
        rows += measure(("service lost",), run_served, WARM_UP_BATCHES * 48, 1)
    else:
        rows = measure(HERE, run_here, LONG, options.runs)
        rows += measure(SERVED, run_served, LONG, options.runs)
        reason = why_not()
        if reason:
            print(f"stalled skipped: {reason}", file=sys.stderr)
        else:
            rows += measure(ON_HOSTS, run_on_hosts, LONG, options.runs)
    print_table(rows)
    write_report("hybrid_faults", rows, options.json, environment())


if __name__ == "__main__":
    main()
