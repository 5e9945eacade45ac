"""Local training on devices of different speed: throughput, loss, and the cost of a lost worker.

    python benchmarks/local_training.py [--json FILE] [--quick] [--seeds N] [--minutes N]

Three workers on EMULATED devices of speed 4:2:1 train the digits of scikit-learn. In turn:

* `plain`: DiLoCo with even shares, all wait at each exchange for the slowest;
* `balanced`: the same, with `LocalTraining(..., balance=True)`;
* `delayed_nesterov`: async workers alone, which exchange with a task of the job `ps` that burns no
  emulated time.

The case "undisturbed" trains for a number of epochs. `of_sum_of_speeds` is samples per second from
the moment at which all have taken ten steps until the first has ended, over the combined speed of
the three devices. `loss` is the center's final loss on the training data, and `loss_ratio` its mean
over the seeds, relative to `plain` after the same samples.

In the case "killed" a worker is killed every minute, the fast one first. In `plain` the others end
with it, all are started again at once, and continue from the backup of the last epoch; with
`delayed_nesterov` only the lost one is started again. `goodput` is the samples of the training that
is left over the time, over the sum of speeds. What a killed worker had not sent yet (at most a
period) is counted with `delayed_nesterov`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _local_training_task import LOCAL_BATCH, MODES, NUM_WORKERS, SAMPLES

SPEEDS, SAMPLE_SECONDS = (4.0, 2.0, 1.0), 8e-3
SUM_OF_SPEEDS = sum(SPEEDS) / SAMPLE_SECONDS
WARM_UP_STEPS, TIMEOUT_SECONDS = 10, 600
KILL_SECONDS = 60.0
TASK = Path(__file__).with_name("_local_training_task.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


class Training:
    """The processes of one training, and the steps that they have written down."""

    def __init__(self, mode: str, folder: Path, *arguments: str) -> None:
        from keras_het.launch.local.worker_environment import Emulation, service_environment

        self.mode, self.folder, self._arguments = mode, folder, arguments
        self._emulation = Emulation(SPEEDS, seconds_per_sample=SAMPLE_SECONDS)
        self._common = {**os.environ, **QUIET, **service_environment("", os.environ)}
        self._common.pop("KERAS_HET_SERVICE_ADDRESS", None)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.start_all()

    @property
    def _is_asynchronous(self) -> bool:
        return self.mode == "delayed_nesterov"

    def start_all(self) -> None:
        """Start all tasks, at new addresses."""
        from keras_het.launch.local.free_ports import ReservedPorts

        ports = ReservedPorts(NUM_WORKERS + self._is_asynchronous)
        ports.close()
        self._addresses = list(ports.addresses)
        for index in reversed(range(len(self._addresses))):
            self.start(index)

    def start(self, index: int) -> None:
        """Start a task; the one after the workers has the center."""
        from keras_het.launch.local.worker_environment import worker_environment

        emulation = self._emulation if index < NUM_WORKERS else None
        workers = self._addresses[:NUM_WORKERS]
        worker = min(index, NUM_WORKERS - 1)
        environment = worker_environment(worker, workers, 1, self._common, emulation)
        if self._is_asynchronous:
            is_center = index == NUM_WORKERS
            cluster = {"ps": self._addresses[NUM_WORKERS:], "async": workers}
            task = {"type": "ps" if is_center else "async", "index": 0 if is_center else index}
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        command = [sys.executable, str(TASK), "--mode", self.mode, "--folder", str(self.folder)]
        log = (self.folder / f"{index}.{time.time_ns()}.log").open("wb")
        self.processes[index] = subprocess.Popen(
            [*command, *self._arguments], env=environment, stdout=log, stderr=log
        )

    def kill(self, index: int) -> None:
        """Lose a task; in plain DiLoCo the others end with it, and all are started again."""
        if self._is_asynchronous:
            self._end(index)
            self.start(index)
            return
        for each in self.processes:
            self._end(each)
        self.start_all()

    def _end(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def end(self) -> None:
        """Kill what still runs."""
        for index in self.processes:
            self._end(index)

    def wait(self) -> None:
        """Wait until all have ended.

        Raises:
            RuntimeError: if one failed.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in self.processes.values()):
            self._check(deadline)
            time.sleep(0.1)
        self._check(deadline)

    def wait_for_steps(self, number: int) -> float:
        """Wait until each worker has taken some steps; return the time at which the last had."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            lines = [lines for lines in self.steps() if len(lines) >= number]
            if len(lines) >= NUM_WORKERS:
                return max(each[number - 1][0] for each in lines)
            self._check(deadline)
            time.sleep(0.1)

    def _check(self, deadline: float) -> None:
        failed = [index for index, process in self.processes.items() if process.poll()]
        if failed or time.monotonic() > deadline:
            logs = sorted(self.folder.glob(f"{failed[0] if failed else 0}.*.log"))
            raise RuntimeError(f"{self.mode}: task {failed}\n{logs[-1].read_text()[-3000:]}")

    def steps(self) -> list[list[tuple[float, ...]]]:
        """Return time, samples so far, epoch and step of each step of each process."""
        files = sorted(self.folder.glob("*.steps"))
        found = [[line.split() for line in path.read_text().splitlines()] for path in files]
        found = [[line for line in lines if len(line) == 4] for lines in found]
        return [[tuple(map(float, line)) for line in lines] for lines in found if lines]

    def samples_until(self, when: float) -> float:
        """Return the samples of all steps before some time."""
        done = [[line for line in lines if line[0] <= when] for lines in self.steps()]
        return sum(lines[-1][1] for lines in done if lines)

    def samples_kept_until(self, when: float) -> float:
        """Return the samples behind the weights that would be left if all ended now."""
        if self._is_asynchronous:
            return self.samples_until(when)
        per_step = LOCAL_BATCH * NUM_WORKERS
        lines = [line for lines in self.steps() for line in lines if line[0] <= when]
        _, _, epoch, step = max(lines, default=(0.0, 0.0, 0.0, -1.0))  # the latest
        return epoch * SAMPLES + (step + 1) * per_step


@contextlib.contextmanager
def training(mode: str, *arguments: str) -> Iterator[Training]:
    """Run a training in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        started = Training(mode, Path(folder), *arguments)
        try:
            yield started
        finally:
            started.end()


def undisturbed(mode: str, seed: int, epochs: int) -> dict[str, float]:
    """Return the speed and the loss of one training."""
    with training(mode, "--seed", str(seed), "--epochs", str(epochs)) as run:
        run.wait()
        steps = run.steps()
        begin = max(lines[:WARM_UP_STEPS][-1][0] for lines in steps)
        end = min(lines[-1][0] for lines in steps)
        speed = (run.samples_until(end) - run.samples_until(begin)) / (end - begin)
        loss = json.loads((run.folder / "loss.json").read_text())
    return {"of_sum_of_speeds": speed / SUM_OF_SPEEDS, "loss": loss}


def killed(mode: str, minutes: float) -> float:
    """Return the goodput of a training of which a worker is killed every minute."""
    with training(mode, "--epochs", "100000", "--backup") as run:
        began = run.wait_for_steps(WARM_UP_STEPS)
        before = run.samples_kept_until(began)
        for kill in range(1, int(minutes * 60 / KILL_SECONDS) + 1):
            time.sleep(max(0.0, began + (kill - 0.5) * KILL_SECONDS - time.monotonic()))
            run.kill((kill - 1) % NUM_WORKERS)
        seconds = minutes * 60
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        after = run.samples_kept_until(began + seconds)
    return (after - before) / seconds / SUM_OF_SPEEDS


def rows_of_undisturbed(seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Return a row for each mode, measured in turn."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        for mode in MODES:
            found[mode].append(undisturbed(mode, seed, epochs))
            print(mode, seed, found[mode][-1], file=sys.stderr, flush=True)
    plain = statistics.mean(each["loss"] for each in found["plain"])
    rows = []
    for mode, runs in found.items():
        losses = [each["loss"] for each in runs]
        speed = statistics.median(each["of_sum_of_speeds"] for each in runs)
        row = {"of_sum_of_speeds": round(speed, 3), "goodput": None}
        row["loss_ratio"] = round(statistics.mean(losses) / plain, 3)
        row["losses"] = " ".join(f"{loss:.4f}" for loss in losses)
        rows.append({"case": "undisturbed", "mode": mode, **row})
    return rows


def rows_of_killed(minutes: float) -> list[dict[str, Any]]:
    """Return a row for each mode that is started again."""
    empty = dict.fromkeys(("of_sum_of_speeds", "goodput", "loss_ratio", "losses"))
    rows = []
    for mode in ("plain", "delayed_nesterov"):
        goodput = round(killed(mode, minutes), 3)
        rows.append({"case": "killed", "mode": mode, **empty, "goodput": goodput})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="short: form, not numbers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the case killed; 0: without")
    options = parser.parse_args()
    from _report import environment, print_table, write_report

    rows = rows_of_undisturbed(1, 8) if options.quick else rows_of_undisturbed(options.seeds, 32)
    if options.minutes and not options.quick:
        rows += rows_of_killed(options.minutes)
    print_table(rows)
    write_report("local_training", rows, options.json, environment())


if __name__ == "__main__":
    main()
