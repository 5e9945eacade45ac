"""Train on three devices of speed 4:2:1, split evenly and split 4:2:1, and compare.

    python recipes/quickstart.py

The devices are EMULATED: each waits until a device of its speed would have finished. Everything
else is real: three processes, their collectives, the data, the model and its accuracy.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from quickstart_figure import SplitTimes, draw
from rich.console import Console
from rich.table import Table

from keras_het.launch.emulation import Emulation
from keras_het.launch.failure_report import describe_failures
from keras_het.launch.line_splitter import OutputLine
from keras_het.launch.local_cluster import LocalCluster
from keras_het.planning import apportion

SPEEDS = (4, 2, 1)
BATCH_SIZE = 56  # Of all workers together, the same in every run; 4:2:1 divides it exactly.
WORKER = Path(__file__).with_name("quickstart_worker.py")
WORKER_ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Emulated devices are slower than this machine's processor; a GPU would only start slowly.
    "CUDA_VISIBLE_DEVICES": "",
}
TIMEOUT_SECONDS = 300
NEXT = """
[bold]What to try next[/bold] (activate the environment first: source .venv/bin/activate)
  keras-het run --speeds 4,2,1 recipes/static_split.py               a script of your own
  keras-het run --speeds 3,1 recipes/static_split.py --shares 3,1    other speeds, two workers
  keras-het run --workers 2 recipes/custom_training_loop.py          without model.fit
  python recipes/resume.py                                           killed and resumed
  docs/strategy.md                                                   what is exact, and why"""


@dataclass(frozen=True)
class Run:
    """What the chief found.

    Args:
        step_seconds: median time of a step with a full global batch, in seconds.
        samples_per_second: of all workers together, without the first steps.
        test_accuracy: share of the test images that were classified rightly.
        weights: the trained weights.
    """

    step_seconds: float
    samples_per_second: float
    test_accuracy: float
    weights: list[np.ndarray]


def train(
    console: Console, arguments: Sequence[str], emulation: Emulation | None, names: Sequence[str]
) -> list[Run]:
    """Starts the workers, shows the chief's output and returns the runs of these names."""

    def show(worker_index: int, stream: str, line: OutputLine) -> None:
        if worker_index == 0 and stream == "stdout" and line.is_final:
            console.print(line.text, highlight=False, markup=False)

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(WORKER), "--directory", directory]
        command += ["--batch-size", str(BATCH_SIZE), *arguments]
        cluster = LocalCluster(
            command, emulation=emulation, env=WORKER_ENVIRONMENT, on_line=show, keep_lines=200
        )
        # Leaving the block ends all workers, also after Ctrl-C.
        with cluster:
            cluster.wait(timeout=TIMEOUT_SECONDS)
        if cluster.failures:
            sys.exit(describe_failures(cluster.failures, cluster.num_workers))
        return [_read(Path(directory), name) for name in names]


def _read(directory: Path, name: str) -> Run:
    numbers = json.loads((directory / f"{name}.json").read_text())
    with np.load(directory / f"{name}.npz") as arrays:
        return Run(weights=[arrays[key] for key in arrays.files], **numbers)


def largest_difference(run: Run, reference: Run) -> float:
    """Returns the largest absolute difference between two runs' weights."""
    pairs = zip(run.weights, reference.weights, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def split_times(title: str, weights: Sequence[float], run: Run, emulation: Emulation) -> SplitTimes:
    """Returns what the picture shows of a run."""
    samples = apportion(BATCH_SIZE, weights)
    models = emulation.time_models()
    computes = [model.seconds(n) for model, n in zip(models, samples, strict=True)]
    return SplitTimes(title, samples, computes, run.step_seconds, run.samples_per_second)


def print_table(
    console: Console, runs: dict[str, Run], one: Run, splits: dict[str, SplitTimes], limit: float
) -> None:
    """Prints what each run reached."""
    table = Table(title="Device speeds 4:2:1 are EMULATED; accuracy and weights are real")
    table.add_column()
    for heading in ("samples a step", "time", "samples/s", "test accuracy", "weights differ by"):
        table.add_column(heading, justify="right")
    for title, run in runs.items():
        table.add_row(
            title,
            " + ".join(map(str, splits[title].samples)),
            f"{1000 * run.step_seconds:.0f} ms",
            f"{run.samples_per_second:.0f}",
            f"{run.test_accuracy:.2%}",
            f"{largest_difference(run, one):.1e}",
        )
    table.add_row("limit: sum of the speeds", "", "", f"{limit:.0f}", "", "")
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
        "--sample-milliseconds",
        type=float,
        default=16.0,
        help="emulated time of one sample at speed 1 (default: 16); larger is closer to the limit, "
        "because this machine's own work matters less",
    )
    options = parser.parse_args()
    # Where the output is a file, it still needs the table's columns.
    console = Console(width=None if sys.stdout.isatty() else 110)
    emulation = Emulation(SPEEDS, options.sample_milliseconds / 1000)
    console.print(emulation.describe(), style="yellow", highlight=False)
    epochs = ["--epochs", str(options.epochs)]
    shares = ["--shares", *map(str, SPEEDS)]
    uneven, even = train(console, [*epochs, *shares], emulation, ["uneven", "even"])
    (one,) = train(console, epochs, None, ["one"])

    runs = {"even split": even, "4:2:1 split": uneven}
    splits = {
        title: split_times(title, weights, runs[title], emulation)
        for title, weights in (("even split", (1, 1, 1)), ("4:2:1 split", SPEEDS))
    }
    limit = sum(1 / model.seconds_per_sample for model in emulation.time_models())
    print_table(console, runs, one, splits, limit)
    draw(list(splits.values()), SPEEDS, limit, options.output)
    console.print(
        "'weights differ by': largest absolute difference of a trained weight from one device's.\n"
        "Speed-up of the 4:2:1 split over the even split (EMULATED devices): "
        f"{uneven.samples_per_second / even.samples_per_second:.2f} x, "
        f"{uneven.samples_per_second / limit:.0%} of the limit.\n"
        f"Picture: {options.output}",
        highlight=False,
    )
    console.print(NEXT, highlight=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # LocalCluster has ended all workers on the way here.
        sys.exit("Interrupted; all workers have been ended.")
