"""A worker slows down in the middle of training and recovers; the balancer follows.

    python recipes/straggler.py

Three workers of equal speed, EMULATED. In the middle third of training worker 1 is three times
slower, like a device that shares its host or overheats. For comparison, the same training runs with
the even split, which waits for it in every step.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workers import largest_difference, run_workers, save

from keras_het.launch.local.worker_environment import Emulation
from keras_het.planning import min_max_shares_linear

SPEEDS = (1, 1, 1)
STRAGGLER = 1
SLOW_DOWN = 3
BATCH_SIZE = 60
SECONDS_PER_SAMPLE = 0.005
# Shares count as balanced if the slowest worker needs at most this much more than the optimum.
TOLERANCE = 1.10
PHASES = ("before", "slow", "recovered")


def train(directory: Path, steps_per_phase: int) -> None:
    """Train; every worker runs this."""
    import keras
    import numpy as np
    from digits import global_batches, load_digits, make_model
    from stopwatch import Stopwatch

    import keras_het
    from keras_het.strategy.measure import emulated_device

    class Weather(keras.callbacks.Callback):
        """Change of the emulated device's speed; on real machines this is unnecessary."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch % steps_per_phase == 0:
                slow = batch // steps_per_phase == PHASES.index("slow")
                # Every worker calls this; only the one with this replica changes.
                emulated_device.slow_down(STRAGGLER, SLOW_DOWN if slow else 1)

    strategy = keras_het.HeterogeneousStrategy()
    num_steps = len(PHASES) * steps_per_phase
    (images, labels), _ = load_digits()
    # One long epoch without a smaller last batch makes a plain plot.
    order = np.arange(num_steps * BATCH_SIZE) % len(labels)
    for name, policy in ("even", "even"), ("balanced", "min_max"):
        if strategy.is_chief:
            print(f'Three workers, BatchBalancer("{policy}"):', flush=True)
        strategy.set_share_weights([1.0] * strategy.num_workers)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = make_model()
        balancer = keras_het.callbacks.BatchBalancer(policy, verbose=1)
        stopwatch = Stopwatch()
        model.fit(
            global_batches(images[order], labels[order], BATCH_SIZE),
            verbose=0,
            callbacks=[Weather(), balancer, stopwatch],
        )
        if strategy.is_chief:
            numbers = {
                "shares": [row["shares"] for row in balancer.measurements],
                "steps": [batch for _, batch in stopwatch.seconds],
                "seconds": list(stopwatch.seconds.values()),
            }
            save(directory, name, numbers, model.get_weights())


def optimum(phase: int) -> float:
    """Return the slowest worker's seconds of compute with the best shares, at known speeds."""
    samples = min_max_shares_linear([0.0] * len(SPEEDS), seconds_per_sample(phase), BATCH_SIZE)
    return slowest(samples.tolist(), phase)


def seconds_per_sample(phase: int) -> list[float]:
    """Return the emulated time per sample on each worker."""
    slow = phase == PHASES.index("slow")
    factors = [SLOW_DOWN if slow and i == STRAGGLER else 1 for i in range(len(SPEEDS))]
    return [
        SECONDS_PER_SAMPLE * factor / speed for factor, speed in zip(factors, SPEEDS, strict=True)
    ]


def slowest(shares: list[int], phase: int) -> float:
    """Return the slowest worker's compute time with these shares, in seconds."""
    return max(n * each for n, each in zip(shares, seconds_per_sample(phase), strict=True))


def reaction(shares: list[list[int]], phase: int) -> int | None:
    """Return a phase's steps before the shares suited it; None if they never did."""
    steps = len(shares) // len(PHASES)
    for step, each in enumerate(shares[phase * steps : (phase + 1) * steps]):
        if slowest(each, phase) <= TOLERANCE * optimum(phase):
            return step
    return None


def mean_seconds(numbers: dict[str, Any], phase: int) -> float:
    """Return the mean time of a phase's steps, including the reaction."""
    steps = len(numbers["shares"]) // len(PHASES)
    pairs = zip(numbers["steps"], numbers["seconds"], strict=True)
    times = [seconds for step, seconds in pairs if step // steps == phase]
    return sum(times) / len(times)


def print_table(console: Console, even: dict[str, Any], balanced: dict[str, Any]) -> None:
    """Print the step times of each phase."""
    table = Table(title="Device speeds are EMULATED")
    for heading in ("mean step time", "even", "balanced", "optimum", "last shares"):
        table.add_column(heading, justify="left" if heading == "mean step time" else "right")
    steps = len(balanced["shares"]) // len(PHASES)
    for phase, title in enumerate(PHASES):
        table.add_row(
            title,
            f"{1000 * mean_seconds(even, phase):.0f} ms",
            f"{1000 * mean_seconds(balanced, phase):.0f} ms",
            f"{1000 * optimum(phase):.0f} ms",
            " + ".join(map(str, balanced["shares"][(phase + 1) * steps - 1])),
        )
    console.print(table)


def compare(console: Console, steps_per_phase: int, output: Path) -> None:
    """Train both, print the table and the reactions, draw the picture."""
    from straggler_figure import draw

    emulation = Emulation(SPEEDS, SECONDS_PER_SAMPLE)
    console.print(emulation.describe(), style="yellow", highlight=False, soft_wrap=True)
    first, end = steps_per_phase, 2 * steps_per_phase
    console.print(
        f"Worker {STRAGGLER} is {SLOW_DOWN} times slower from step {first} to {end - 1} (EMULATED)."
    )
    arguments = ["--worker", "--steps-per-phase", str(steps_per_phase)]
    (even, even_weights), (balanced, balanced_weights) = run_workers(
        console, Path(__file__), arguments, emulation, ["even", "balanced"]
    )
    print_table(console, even, balanced)
    for phase in PHASES.index("slow"), PHASES.index("recovered"):
        steps = reaction(balanced["shares"], phase)
        took = "did not balance" if steps is None else f"balanced after {steps} steps"
        console.print(f"{PHASES[phase]}: {took}", highlight=False)
    difference = largest_difference(balanced_weights, even_weights)
    console.print(
        f"balanced: within {TOLERANCE - 1:.0%} of the optimum for speeds known beforehand.\n"
        f"Largest difference of a weight from the even split's: {difference:.1e}\n"
        f"Picture: {output}",
        highlight=False,
    )
    optima = [optimum(phase) for phase in range(len(PHASES))]
    draw(even, balanced, optima, (first, end), f"worker {STRAGGLER} {SLOW_DOWN}x slower", output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("straggler.png"), help="the picture")
    parser.add_argument("--steps-per-phase", type=int, default=40)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.directory, options.steps_per_phase)
        return
    console = Console(width=None if sys.stdout.isatty() else 110)
    compare(console, options.steps_per_phase, options.output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # LocalCluster has ended all workers by now.
        sys.exit("Interrupted; all workers have been ended.")
