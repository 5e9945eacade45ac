"""What `steps_per_execution` saves under HeterogeneousStrategy, against what it saves in Keras.

    python benchmarks/steps_per_execution.py [--json FILE] [--quick]

`fit` with 16 steps in an execution against `fit` with one: the gain is the ratio of their step
times. Each case has a model with which a step from Python takes about 1 ms; all are compared with
Keras without a strategy and such a step. (In Keras 3.15 MirroredStrategy on two CPUs fails with
more than one step in an execution, and MultiWorkerMirroredStrategy in any `fit`.)

All processes are alive for the whole case and take turns in short blocks; a row has the medians of
the ratios of neighbouring blocks, and the machine's load, as other programs lower every gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from _report import environment, print_table, write_report
from overhead import Group

STEPS = 16
CASES = {"one_device": "dense_512", "two_devices": "dense_256", "two_processes": "dense"}
STOCK = ("one_device", "none", "dense_512")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few short blocks: form, not numbers")
    arguments = parser.parse_args()
    blocks, executions = (1, 1) if arguments.quick else (11, 25)
    rows = [measure(case, model, blocks, executions) for case, model in CASES.items()]
    print_table(rows)
    write_report("steps_per_execution", rows, arguments.json, environment())


def measure(case: str, model: str, blocks: int, executions: int) -> dict[str, Any]:
    """Run one and several steps in an execution in turn, ours and Keras's; return one row."""
    fits = [(case, "ours", model), STOCK]
    drivers = [(*fit, loop) for fit in fits for loop in ("fit", "fit_of_16")]
    groups = [Group(topology, f"{name}:{loop}", kind) for topology, name, kind, loop in drivers]
    try:
        for group in groups:
            group.run(STEPS * executions)  # Traces the step and warms up.
        times = [[group.run(STEPS * executions) for group in groups] for _ in range(blocks)]
    finally:
        for group in groups:
            group.close()
    ratios = sorted(one / many * of_stock / stock for one, many, stock, of_stock in times)
    medians = [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "case": case,
        "gain": round(statistics.median(one / many for one, many, *_ in times), 3),
        "stock_gain": round(statistics.median(one / many for *_, one, many in times), 3),
        "gain_ratio": round(statistics.median(ratios), 3),
        "lowest_ratio": round(ratios[0], 3),
        "highest_ratio": round(ratios[-1], 3),
        "saved_milliseconds": round(medians[0] - medians[1], 3),
        "stock_saved_milliseconds": round(medians[2] - medians[3], 3),
        "step_milliseconds": round(medians[0], 3),
        "stock_step_milliseconds": round(medians[2], 3),
        "num_blocks": blocks,
        "steps_per_block": STEPS * executions,
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
