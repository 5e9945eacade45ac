"""Time to a target accuracy: synchronous groups, even, balanced or smaller, against hybrid.

    python benchmarks/hybrid.py [--json FILE] [--quick] [--only CASE] [--seeds N] [--mode MODE ...]

Emulated devices train in real processes (`_hybrid_training` describes what, and what is timed).
Cases: two fast and four slow workers (4:4:2:2:2:2) on equal links ("equal_links") and with the slow
ones behind 50 Mbit/s ("slow_link"); three fast ones and one at an eighth ("one_eighth"); an even
cluster ("even"). Modes: "even" and "balanced" (all in the sync group), "leave_out" (the sync group
without the slow ones), "hybrid" (the slow ones asynchronous, rule "delta", an exchange after every
step), "async" (all of them, plus a task that holds the center), "auto" (`roles="auto"`, which
chooses "balanced", "leave_out" or "hybrid" in a first `fit` that is not timed; `chosen` is the
choice for each seed); "hybrid:RULE" and "hybrid:RULE:PERIOD" are others. A row is the median of all
seeds. `ratio_to_best_other` is the best other mode's time over this one's ("auto" does not count as
another mode); `advised` is the mode that `keras_het.planning.advise_roles` names for the case's
true speeds and links and the gradient noise scale that `roles="auto"` expects from the steps in
which it measures (median of many trainings); `advised_late` is the same with the noise scale after
100 steps. `step_ms` is the median step of the sync group, or of the first async worker. Limited
links need root; without, "slow_link" is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _hybrid_clusters import async_cluster, cluster_on_hosts, local_cluster, wait_for_local
from _hybrid_training import BATCH, MOMENTUM, PERIOD, RATE, SAMPLES, WARM_UP_BATCHES, command
from _noisy_task import HIDDEN, NUM_CLASSES, NUM_INPUTS, NoisyTask

SAMPLE_MILLISECONDS = 8.0  # of a device of speed 1
MODEL_BYTES = 4 * (NUM_INPUTS * HIDDEN + HIDDEN + HIDDEN * NUM_CLASSES + NUM_CLASSES)
FAST_MBIT = 1000.0
# measured in trainings (benchmarks/results/hybrid.md); the latter fitted to synchronous groups
BUSY_SECONDS, HOP_SECONDS = 8e-3, 2.2e-3
NOISE_SCALES = 25  # one of sixteen steps says little
AUTO = "auto"
MODES = ("even", "balanced", "leave_out", "hybrid", "async", AUTO)


@dataclasses.dataclass(frozen=True)
class Case:
    """A cluster.

    Args:
        speeds: relative speed of each worker's device.
        num_slow: number of workers, the last ones, that are asynchronous or left out.
        slow_mbit: rate of their links, None if links are not limited.
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
    """Return the mode that planning chooses for the true speeds and links."""
    from keras_het.planning import ClusterSpeeds, ExchangeSettings, advise_roles

    fast = len(case.speeds) - case.num_slow
    rates = [FAST_MBIT] * fast + [case.slow_mbit or FAST_MBIT] * case.num_slow
    cluster = ClusterSpeeds(
        samples_per_second=tuple(1000 / SAMPLE_MILLISECONDS * speed for speed in case.speeds),
        link_bytes_per_second=tuple(rate * 1e6 / 8 for rate in rates),
        model_bytes=MODEL_BYTES,
        global_batch_size=BATCH,
        noise_scale=noise_scale,
        hop_seconds=HOP_SECONDS,
        exchange=ExchangeSettings(period=int(PERIOD), busy_seconds=BUSY_SECONDS),
    )
    return str(advise_roles(cluster).mode)


def measured_noise_scale(case: Case, task: NoisyTask) -> float:
    """Return what `roles="auto"` expects from its steps; median of many trainings."""
    from keras_het.asynchronous.exchange.role_choice import MEASURED_STEPS, WARM_UP_STEPS
    from keras_het.planning.noise_scale import EXPECTED_GROWTH

    num_workers = len(case.speeds)
    shares = [(BATCH + place) // num_workers for place in range(num_workers)]
    measured = (shares, WARM_UP_STEPS, MEASURED_STEPS, (RATE, MOMENTUM))
    found = (task.noise_scale_of_workers(*measured, seed) for seed in range(NOISE_SCALES))
    return EXPECTED_GROWTH * statistics.median(found)


def advices(case: Case, samples: int) -> dict[str, str]:
    """Return the modes that planning chooses with early and with later noise scales."""
    task = NoisyTask(max(samples, SAMPLES))  # enough for the steps that are measured
    return {
        "advised": advised(case, measured_noise_scale(case, task)),
        "advised_late": advised(case, task.noise_scale(BATCH)),
    }


@contextlib.contextmanager
def hosts_of(case: Case) -> Iterator[Any]:
    """Yield hosts with the case's links, or None for this machine's loopback."""
    if case.slow_mbit is None:
        yield None
        return
    from _namespaces import limited_hosts

    fast = len(case.speeds) - case.num_slow
    rates = [FAST_MBIT] * fast + [case.slow_mbit] * case.num_slow
    # jumbo frames, because packets cost time on the two cores that all hosts share
    with limited_hosts(rates, mtu=9000) as hosts:
        yield hosts


def run(case: Case, mode: str, seed: int, samples: int, hosts: Any) -> dict[str, Any]:
    """Run one training; return the measurements."""
    from keras_het.launch.local.worker_environment import Emulation

    speeds = case.speeds[: -case.num_slow] if mode == "leave_out" else case.speeds
    num_async = case.num_slow if mode.startswith("hybrid") else 0
    emulation = Emulation(speeds, seconds_per_sample=SAMPLE_MILLISECONDS / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        task = command(mode, seed, samples, result)
        if mode == "async":
            with async_cluster(task, emulation, hosts) as wait:
                wait()
        elif hosts is not None:
            with cluster_on_hosts(task, emulation, num_async, hosts) as wait:
                wait()
        else:
            with local_cluster(task, emulation, num_async) as cluster:
                wait_for_local(cluster)
        found = dict(json.loads(result.read_text()))
    steps = found.pop("steps")
    return {**found, "step_ms": 1e3 * statistics.median(steps)}


def measure(name: str, modes: tuple[str, ...], seeds: int, samples: int) -> list[dict[str, Any]]:
    """Return all modes of one case, interleaved over the seeds."""
    case = CASES[name]
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with hosts_of(case) as hosts:
        for seed in range(seeds):
            for mode in modes:
                found[mode].append(run(case, mode, seed, samples, hosts))
                print(f"{name} {mode} {found[mode][-1]}", file=sys.stderr, flush=True)
    advice = advices(case, samples)
    rows = [_row(name, mode, found[mode], advice) for mode in modes]
    for row in rows:
        apart = [o for o in rows if o is not row and o["mode"] != AUTO]
        others = [o["time_to_target"] for o in apart if o["time_to_target"]]
        own = row["time_to_target"]
        row["ratio_to_best_other"] = round(min(others) / own, 3) if own and others else None
    return rows


def _row(
    name: str, mode: str, runs: list[dict[str, Any]], advice: dict[str, str]
) -> dict[str, Any]:
    # a mode that misses the target stays in the median: leaving it out would reward it
    seconds = [math.inf if run["seconds"] is None else run["seconds"] for run in runs]
    return {
        "case": name,
        "mode": mode,
        "time_to_target": _rounded(statistics.median(seconds)),
        "fastest": _rounded(min(seconds)),
        "slowest": _rounded(max(seconds)),
        "samples_per_s": round(statistics.median(run["samples_per_s"] for run in runs), 1),
        "step_ms": round(statistics.median(run["step_ms"] for run in runs), 2),
        "ratio_to_best_other": None,
        "chosen": ", ".join(run["chosen"].split()[0] for run in runs) if mode == AUTO else None,
        **advice,
        "num_runs": len(runs),
    }


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one short training: form, no numbers")
    parser.add_argument("--only", help="only this case")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mode", nargs="*", default=MODES, help="only these modes")
    options = parser.parse_args()
    from _namespaces import why_not
    from _report import environment, print_table, write_report

    names = [options.only] if options.only else list(CASES)
    modes, seeds, samples = tuple(options.mode), options.seeds, SAMPLES
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
