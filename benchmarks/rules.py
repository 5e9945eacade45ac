"""Time to a target accuracy of each update rule, on two tasks.

    python benchmarks/rules.py [--json FILE] [--quick] [--task TASK] [--rules RULE ...]

Four workers on EMULATED devices of speed 4:2:2:2 (8 ms a sample at speed 1), the slow ones behind
links of 100 Mbit/s, train the same perceptron on noisy labels and on digits (`_rules_training`).
Asynchronous rules run with async workers alone and a task that holds the center, beside the fast
worker; an exchange after every step. `sync_easgd` and `diloco` run in `LocalTraining`,
"synchronous" without a rule, all three with shares in proportion to speed. Each rule trains with
the learning rate (a tenth of it with momentum) that reached the target first with one seed, among
RATES and, where the best was at their end, half or twice of it; its row is the median of the other
seeds. The center is what counts, never a worker's own weights. `ratio_to_sgd` is the time of the
counterpart without elastic averaging over this one's. Limited links need root; without, all are
unlimited, and the rows say so.

Reference: You, Buluc and Demmel, SC 2017: Async EASGD, MEASGD and Hogwild EASGD are faster than
Async SGD, MSGD and Hogwild SGD.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _hybrid_clusters import async_cluster, cluster_on_hosts, local_cluster, wait_for_local
from _rules_training import COUNTERPARTS, SETTINGS, SPEEDS, TARGETS

SAMPLE_SECONDS = 8e-3  # of a device of speed 1
FAST_MBIT, SLOW_MBIT = 1000.0, 100.0
RATES = (0.1, 0.2, 0.4)
LARGEST_RATE = 0.8  # with a larger one, EASGD's rules refuse alpha = 0.9 / 4
SEARCH_SEED = 100


@contextlib.contextmanager
def all_hosts() -> Iterator[Any]:
    """Yield hosts with limited links, or None for this machine's loopback."""
    from _namespaces import limited_hosts, why_not

    if why_not():
        yield None
        return
    # jumbo frames, because packets cost time on the cores that all hosts share
    with limited_hosts([FAST_MBIT] + [SLOW_MBIT] * (len(SPEEDS) - 1), mtu=9000) as hosts:
        yield hosts


def run(
    rule: str, task: str, rate: float, seeds: Sequence[int], hosts: Any, quick: bool
) -> list[dict[str, Any]]:
    """Return the measurements of one training for each seed."""
    from keras_het.launch.local.worker_environment import Emulation

    emulation = Emulation(SPEEDS, seconds_per_sample=SAMPLE_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script = Path(__file__).with_name("_rules_training.py")
        command = [sys.executable, str(script), "--rule", rule, "--task", task]
        command += ["--rate", str(rate), "--result", str(result), "--seeds", *map(str, seeds)]
        command += ["--quick"] if quick else []
        if SETTINGS[rule].kind == "async":
            with async_cluster(command, emulation, hosts) as wait:
                wait()
        elif hosts is not None:
            with cluster_on_hosts(command, emulation, 0, hosts) as wait:
                wait()
        else:
            with local_cluster(command, emulation, 0) as cluster:
                wait_for_local(cluster)
        found: list[dict[str, Any]] = json.loads(result.read_text())
    print(task, rule, rate, found, file=sys.stderr, flush=True)
    return found


def row_of(
    rule: str, task: str, rates: Sequence[float], seeds: Sequence[int], hosts: Any, quick: bool
) -> dict[str, Any]:
    """Choose a rule's learning rate with one seed, and measure with the others."""
    rate = rates[0]
    if len(rates) > 1:
        tried = {each: run(rule, task, each, [SEARCH_SEED], hosts, quick)[0] for each in rates}
        while True:
            rate = min(tried, key=lambda each: _rank(tried[each]))
            untried = {rate / 2, min(rate * 2, LARGEST_RATE)} - tried.keys()
            if not untried:
                break
            tried |= {
                each: run(rule, task, each, [SEARCH_SEED], hosts, quick)[0] for each in untried
            }
    found = run(rule, task, rate, seeds, hosts, quick)
    # a training that misses the target stays in the median: leaving it out would reward it
    seconds = [math.inf if each["seconds"] is None else each["seconds"] for each in found]
    return {
        "case": task,
        "rule": rule,
        "rate": SETTINGS[rule].rate(rate),
        "time_to_target": _rounded(statistics.median(seconds)),
        "fastest": _rounded(min(seconds)),
        "slowest": _rounded(max(seconds)),
        "last_accuracy": round(statistics.median(each["last_accuracy"] for each in found), 4),
        "samples_per_s": round(statistics.median(each["samples_per_s"] for each in found), 1),
        "ratio_to_sgd": None,
        "mbit_per_s": None if hosts is None else SLOW_MBIT,
        "num_runs": len(found),
    }


def _rank(found: dict[str, Any]) -> tuple[float, float]:
    seconds = math.inf if found["seconds"] is None else found["seconds"]
    return seconds, -found["last_accuracy"]


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one short training: form, no numbers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=TARGETS, help="only this task")
    parser.add_argument("--rules", nargs="*", default=list(SETTINGS), help="only these rules")
    options = parser.parse_args()
    from _report import environment, print_table, write_report

    tasks, rules = [options.task] if options.task else list(TARGETS), options.rules
    rates, seeds = RATES, list(range(options.seeds))
    if options.quick:
        tasks, rules, rates, seeds = ["digits"], ["hogwild_sgd", "hogwild_easgd"], RATES[1:2], [0]
    rows: list[dict[str, Any]] = []
    with all_hosts() as hosts:
        for task in tasks:
            own = {rule: row_of(rule, task, rates, seeds, hosts, options.quick) for rule in rules}
            for rule, sgd in COUNTERPARTS.items():
                times = [own.get(each, {}).get("time_to_target") for each in (sgd, rule)]
                if all(times):
                    own[rule]["ratio_to_sgd"] = round(times[0] / times[1], 3)
            rows += own.values()
    print_table(rows)
    write_report("rules", rows, options.json, environment())


if __name__ == "__main__":
    main()
