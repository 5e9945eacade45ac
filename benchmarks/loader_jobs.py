"""Three unlike jobs that come and go on one host and share its reading threads.

    python benchmarks/loader_jobs.py [--json FILE] [--quick] [--rounds N]

Each sample is read in 10 ms (a wait), and all jobs together may use 24 reading threads. Job "wide"
needs about 20 of them to keep its device busy, "usual" about 8 and "small" 2; devices are EMULATED
by sleeps. They begin 5 seconds apart and end after a fixed number of steps. Policies take turns:

- "even": eight threads for each job, from its first to its last step;
- "autotune": `tf.data.AUTOTUNE`, which bounds threads by CPUs;
- "tuner": `LoaderTuner(max_reader_threads=24)` in each job, its ramp included.

`samples_per_s` is the sum over the jobs of what each has read while it ran, `makespan` the time
from the first job's start to the last one's end; ratios are medians over rounds.

Reference: A-Dloader (IPDPSW 2022) reports 23.5 to 28.9 % more throughput and a 10 % shorter
makespan than an even division, for trainings on GPUs that read from one server.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from _loader_cases import Case, Consumer, blocking_io
from _report import environment, print_table, write_report

import keras_het
from keras_het.loader import Knobs

THREADS = 24  # of all jobs
POLICIES = ("even", "autotune", "tuner")
AUTOTUNE = SimpleNamespace(num_parallel_calls=tf.data.AUTOTUNE, prefetch=tf.data.AUTOTUNE)
TIMEOUT_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Job:
    """A training: samples of a step, seconds of its device, and when it begins."""

    batch: int
    device_seconds: float
    begins: float
    steps: int


JOBS = {
    "small": Job(2, 0.010, 0.0, 2000),
    "wide": Job(8, 0.0025, 5.0, 3000),
    "usual": Job(8, 0.010, 10.0, 1500),
}
QUICK = {name: dataclasses.replace(job, begins=0.0, steps=40) for name, job in JOBS.items()}


def train(job, policy, barrier, pipe):
    """Train in a process of its own; send when it began and ended."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        build = blocking_io(job.steps, job.batch)
        own = THREADS // len(JOBS)
        knobs = Knobs(own, 2, own) if policy == "even" else Knobs(2, 2, 2)
        dataset = keras_het.loader.tunable_pipeline(build, knobs)
        if policy == "autotune":
            dataset = build(AUTOTUNE)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(build(Knobs(2, 2, 2)).take(2), verbose=0)  # traces the step
        callbacks = [Consumer(Case(None, job.device_seconds), TIMEOUT_SECONDS)]
        if policy == "tuner":
            callbacks.append(keras_het.callbacks.LoaderTuner(max_reader_threads=THREADS))
        barrier.wait(TIMEOUT_SECONDS)
        time.sleep(job.begins)
        start = time.monotonic()
        model.fit(dataset, verbose=0, callbacks=callbacks)
        pipe.send((start, time.monotonic()))
    except Exception as error:
        pipe.send(repr(error))


def measure(jobs, policy):
    """Return samples/s of each job, and the makespan."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(jobs))
    children = {}
    for name, job in jobs.items():
        ours, theirs = context.Pipe()
        child = context.Process(target=train, args=(job, policy, barrier, theirs), daemon=True)
        child.start()
        children[name] = child, ours
    times = {}
    try:
        for name, (_, pipe) in children.items():
            if not pipe.poll(TIMEOUT_SECONDS):
                raise TimeoutError(f"{name}, {policy}: no result after {TIMEOUT_SECONDS} s")
            times[name] = pipe.recv()
            if isinstance(times[name], str):
                raise RuntimeError(f"{name}, {policy}: {times[name]}")
    finally:
        for child, _ in children.values():
            child.kill()
            child.join()
    starts, ends = zip(*times.values(), strict=True)
    speeds = {
        name: job.steps * job.batch / (times[name][1] - times[name][0])
        for name, job in jobs.items()
    }
    return {**speeds, "samples_per_s": sum(speeds.values()), "makespan": max(ends) - min(starts)}


def row_of(policy, runs):
    """Return the medians of a policy, and its ratios to an even division in the same round."""

    def median(field):
        return round(statistics.median(run[field] for run in runs[policy]), 2)

    def ratios(field):
        pairs = zip(runs[policy], runs["even"], strict=True)
        return sorted(own[field] / even[field] for own, even in pairs)

    throughput, makespan = ratios("samples_per_s"), ratios("makespan")
    return {
        "case": "three jobs",
        "policy": policy,
        "samples_per_s": median("samples_per_s"),
        "throughput_ratio_to_even": round(statistics.median(throughput), 3),
        "lowest_throughput_ratio": round(throughput[0], 3),
        "makespan": median("makespan"),
        "makespan_ratio_to_even": round(statistics.median(makespan), 3),
        "highest_makespan_ratio": round(makespan[-1], 3),
        **{f"{name}_per_s": median(name) for name in JOBS},
        "num_runs": len(runs[policy]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: form, not numbers")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    jobs, rounds = (QUICK, 1) if options.quick else (JOBS, options.rounds)
    runs = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy in POLICIES[turn % 3 :] + POLICIES[: turn % 3]:
            runs[policy].append(measure(jobs, policy))
            print(policy, runs[policy][-1], file=sys.stderr, flush=True)
    rows = [row_of(policy, runs) for policy in POLICIES]
    print_table(rows)
    # TensorFlow starts threads when it is asked for devices: after the last fork
    write_report("loader_jobs", rows, options.json, environment())


if __name__ == "__main__":
    main()
