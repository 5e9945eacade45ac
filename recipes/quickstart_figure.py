"""The figure of the quickstart: compute times of each worker, and the resulting speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extras import MISSING

try:
    import matplotlib
except ImportError as error:
    raise ImportError(MISSING) from error

matplotlib.use("Agg")  # No window: the result is a file.

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Okabe and Ito's colours, which are distinct for colour-blind readers and in print.
COLORS, INK = ("#B9B4A7", "#0072B2"), "#222222"
BAR_WIDTH = 0.38


@dataclass(frozen=True)
class SplitTimes:
    """Measurements with one split.

    Args:
        title: name of the split.
        samples: samples of each worker in a step.
        compute_seconds: compute time of each worker for these samples, in seconds.
        samples_per_second: over all workers.
    """

    title: str
    samples: Sequence[int]
    compute_seconds: Sequence[float]
    samples_per_second: float


def draw(splits: Sequence[SplitTimes], speeds: Sequence[float], limit: float, path: Path) -> None:
    """Write the figure as a PNG.

    Args:
        splits: the two splits to compare.
        speeds: relative speed of each worker.
        limit: sum of the speeds, in samples per second.
        path: file to write.
    """
    plt.rcParams.update({"font.size": 12, "text.color": INK, "axes.labelcolor": INK})
    figure, (times, rates) = plt.subplots(
        1, 2, figsize=(10, 4.6), layout="constrained", width_ratios=(2, 1)
    )
    figure.get_layout_engine().set(wspace=0.08)
    _draw_times(times, splits, speeds)
    _draw_rates(rates, splits, limit, limit * max(speeds) / sum(speeds))
    for axis in times, rates:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", length=0)
    figure.suptitle(
        f"A global batch of {sum(splits[0].samples)} samples on EMULATED devices of speed "
        + ":".join(f"{speed:g}" for speed in speeds),
        x=0.01,
        ha="left",
        weight="bold",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_times(axis: Axes, splits: Sequence[SplitTimes], speeds: Sequence[float]) -> None:
    for place, (split, color) in enumerate(zip(splits, COLORS, strict=True)):
        positions = [i + (place - 0.5) * (BAR_WIDTH + 0.02) for i in range(len(speeds))]
        heights = [1000 * seconds for seconds in split.compute_seconds]
        bars = axis.bar(positions, heights, BAR_WIDTH, color=color, label=split.title)
        labels = [f"{samples}\nsamples" for samples in split.samples]
        axis.bar_label(bars, labels, padding=3, fontsize=11)
    axis.set_xticks(
        range(len(speeds)), [f"worker {i}\n(speed {speed:g})" for i, speed in enumerate(speeds)]
    )
    axis.set_ylabel("measured compute time of a step (ms)")
    axis.margins(y=0.2)
    axis.legend(loc="upper left", frameon=False)
    axis.set_title("The slowest worker sets the step time", loc="left", fontsize=12)


def _draw_rates(axis: Axes, splits: Sequence[SplitTimes], limit: float, alone: float) -> None:
    rates = [split.samples_per_second for split in splits]
    bars = axis.bar([split.title for split in splits], rates, 0.6, color=COLORS)
    labels = [f"{rate:.0f}\n({rate / limit:.0%})" for rate in rates]
    texts = axis.bar_label(bars, labels, label_type="center", fontsize=12, weight="bold")
    texts[-1].set_color("white")
    axis.set_xlim(-0.5, 1.5)
    for height, label in (
        (limit, f"all devices, at best: {limit:.0f}"),
        (alone, f"the fastest alone,\nat best: {alone:.0f}"),
    ):
        axis.axhline(height, color=INK, linestyle="--", linewidth=1.2)
        axis.text(-0.48, height + 0.015 * limit, label, va="bottom", fontsize=11)
    axis.set_ylim(0, limit * 1.12)
    axis.set_ylabel("samples/s")
