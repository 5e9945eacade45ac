"""Train on three devices of speed 4:2:1, split evenly and balanced by measurement, and compare.

    python recipes/quickstart.py

The devices are EMULATED: each waits until a device of its speed would have finished. Everything
else is real: three processes, their collectives, the data, the model and its accuracy. The balancer
is not told the speeds; it starts from the even split and measures.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from quickstart_figure import SplitTimes, draw
from rich.console import Console
from rich.table import Table
from workers import largest_difference, run_workers

from keras_het.launch.local.worker_environment import Emulation

SPEEDS = (4, 2, 1)
BATCH_SIZE = 56  # Over all workers, the same in every run.
WORKER = Path(__file__).with_name("quickstart_worker.py")
NEXT = """
[bold]What to try next[/bold] (activate the environment first: source .venv/bin/activate)
  python recipes/straggler.py                                  a worker slows down and recovers
  python recipes/resume.py                                     killed and resumed
  keras-het run --emulate-speeds 4,2,1 recipes/static_split.py shares by hand
  keras-het run --workers 2 recipes/custom_training_loop.py    without model.fit
  docs/concepts/exact_step.md                                  what is exact, and why"""


@dataclass(frozen=True)
class Run:
    """Results of a run, as the chief measured them.

    Args:
        step_seconds: median time of a step with a full global batch, in seconds.
        samples_per_second: over all workers, without the first steps.
        test_accuracy: fraction of the test images that were classified correctly.
        weights: the trained weights.
        shares: samples of each worker in the last full step; empty on one device.
        compute_seconds: median compute time of each worker for these samples, in seconds.
    """

    step_seconds: float
    samples_per_second: float
    test_accuracy: float
    weights: list[np.ndarray]
    shares: tuple[int, ...] = ()
    compute_seconds: tuple[float, ...] = ()


def train(console: Console, epochs: int, emulation: Emulation) -> list[Run]:
    """Return the runs of the even split, of the balanced one and of one device."""
    arguments = ["--epochs", str(epochs), "--batch-size", str(BATCH_SIZE)]
    several = run_workers(console, WORKER, arguments, emulation, ["even", "balanced"])
    alone = run_workers(console, WORKER, [*arguments, "--alone"], None, ["one"])
    return [Run(weights=weights, **numbers) for numbers, weights in [*several, *alone]]


def print_table(console: Console, even: Run, balanced: Run, one: Run, limit: float) -> None:
    """Print the results of each run."""
    table = Table(title="Device speeds 4:2:1 are EMULATED; accuracy and weights are real")
    table.add_column()
    for heading in ("samples a step", "step time", "samples/s", "test accuracy", "differs by"):
        table.add_column(heading, justify="right")
    for title, run in ("even split", even), ("balanced", balanced):
        table.add_row(
            title,
            " + ".join(map(str, run.shares)),
            f"{1000 * run.step_seconds:.0f} ms",
            f"{run.samples_per_second:.0f}",
            f"{run.test_accuracy:.2%}",
            f"{largest_difference(run.weights, one.weights):.1e}",
        )
    alone = limit * max(SPEEDS) / sum(SPEEDS)
    for title, best in (("all devices, at best", limit), ("the fastest alone, at best", alone)):
        table.add_row(title, "", f"{1000 * BATCH_SIZE / best:.0f} ms", f"{best:.0f}", "", "")
    table.add_row(
        "one device, plain Keras", str(BATCH_SIZE), "", "", f"{one.test_accuracy:.2%}", ""
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("quickstart.png"), help="the picture")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--emulate-ms-per-sample",
        type=float,
        default=16.0,
        help="emulated time of one sample at speed 1 (default: 16); larger is closer to the limit, "
        "because this machine's own work matters less",
    )
    options = parser.parse_args()
    # Even if the output is a file, it needs the table's columns.
    console = Console(width=None if sys.stdout.isatty() else 110)
    emulation = Emulation(SPEEDS, options.emulate_ms_per_sample / 1000)
    console.print(emulation.describe(), style="yellow", highlight=False)
    even, balanced, one = train(console, options.epochs, emulation)

    limit = sum(1 / each["seconds_per_sample"] for each in emulation.devices())
    print_table(console, even, balanced, one, limit)
    splits = [
        SplitTimes(title, run.shares, run.compute_seconds, run.samples_per_second)
        for title, run in (("even split", even), ("balanced", balanced))
    ]
    draw(splits, SPEEDS, limit, options.output)
    console.print(
        "'samples a step': of the last full step. 'samples/s': without the first 5 steps.\n"
        "'differs by': largest absolute difference of a trained weight from one device's.\n"
        "Speed-up of the balanced split over the even split (EMULATED devices): "
        f"{balanced.samples_per_second / even.samples_per_second:.2f} x, "
        f"{balanced.samples_per_second / limit:.0%} of what all devices together can do.\n"
        f"Picture: {options.output}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(NEXT, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # LocalCluster has ended all workers by now.
        sys.exit("Interrupted; all workers have been ended.")
