"""Gain of each advice of `keras_het.loader.advise`: the same pipeline before and after it.

`before` and `after` are batches/s of whole epochs (medians of runs in turns), `advised_gain` is
the gain that `advise` predicted for the pipeline before. For the order of files it is the rank
correlation of the positions of the samples in two epochs: 1 is the same order, 0 another random
one.

    python benchmarks/loader_advice.py [--only CASE ...] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
from _advice_cases import ORDER, SPEED, write_images
from _report import environment, print_table, write_report

import keras_het

ADVISE_SECONDS = 0.5


def batches_per_second(dataset, seconds):
    """Run whole epochs in one iterator; the first one, which fills caches, does not count."""
    batches = sum(1 for _ in dataset)
    start = time.perf_counter()
    for read, _ in enumerate(dataset.repeat(), start=1):
        elapsed = time.perf_counter() - start
        if read % batches == 0 and elapsed > seconds:
            return read / elapsed
    raise RuntimeError("the pipeline is empty")


def advise(dataset):
    return keras_het.loader.advise(dataset, seconds=ADVISE_SECONDS, file=io.StringIO())


def compare_speed(case, builders, folder, rounds, seconds):
    kind = case.split(",")[0]
    report = keras_het.loader.advise(
        builders[0](folder), seconds=ADVISE_SECONDS, file=io.StringIO()
    )
    found = [advice for advice in report.advices if advice.kind == kind]
    still = advise(builders[1](folder))
    speeds = [[], []]
    for _ in range(rounds):
        for side, build in enumerate(builders):
            speeds[side].append(batches_per_second(build(folder), seconds))
    before, after = map(statistics.median, speeds)
    gains = sorted(new / old for old, new in zip(*speeds, strict=True))
    return {
        "case": case,
        "unit": "batches/s",
        "before": round(before, 2),
        "after": round(after, 2),
        "gain": round(statistics.median(gains), 2),
        "lowest_gain": round(gains[0], 2),
        "highest_gain": round(gains[-1], 2),
        "advised_gain": round(found[0].estimated_gain, 2) if found else None,
        "advised_memory_mb": round(found[0].memory_bytes / 1e6, 1)
        if found and found[0].memory_bytes
        else None,
        "advised_again": kind in still.kinds,
    }


def compare_order(kind, builders, folder, rounds):
    report = keras_het.loader.advise(
        builders[0](folder), seconds=ADVISE_SECONDS, file=io.StringIO()
    )
    still = advise(builders[1](folder))
    found = [statistics.median(same_place(b(folder)) for _ in range(rounds)) for b in builders]
    return {
        "case": kind if kind in report.kinds else f"{kind} (not found)",
        "unit": "rank correlation",
        "before": round(found[0], 3),
        "after": round(found[1], 3),
        **dict.fromkeys(("gain", "lowest_gain", "highest_gain", "advised_gain")),
        "advised_memory_mb": None,
        "advised_again": kind in still.kinds,
    }


def same_place(dataset):
    """Return the correlation of the positions of the samples in two epochs."""
    places = [np.argsort(np.concatenate(list(dataset.as_numpy_iterator()))) for _ in range(2)]
    return float(np.corrcoef(places)[0, 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SPEED, *ORDER], default=[*SPEED, *ORDER])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one short run, to try the program")
    arguments = parser.parse_args()
    rounds, seconds = (1, 0.3) if arguments.quick else (3, 2.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder)
        rows = [
            compare_speed(case, builders, folder, rounds, seconds)
            for case, builders in SPEED.items()
            if case in arguments.only
        ]
        rows += [
            compare_order(kind, builders, folder, max(rounds, 3))
            for kind, builders in ORDER.items()
            if kind in arguments.only
        ]
    print_table(rows)
    write_report("loader_advice", rows, arguments.json, environment())


if __name__ == "__main__":
    main()
