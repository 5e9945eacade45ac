"""The picture of the quickstart: what each worker does during one step of each split."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # No window: the result is a file.

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Colours of Okabe and Ito, which differ for colour-blind readers and in print.
COMPUTES, WAITS, INK = "#0072B2", "#E8E4DA", "#222222"


@dataclass(frozen=True)
class SplitTimes:
    """One step of one split.

    Args:
        title: name of the split.
        samples: samples of each worker in a step.
        compute_seconds: emulated compute time of each worker for these samples, in seconds.
        step_seconds: measured time of the whole step, in seconds.
        samples_per_second: measured samples per second of all workers together.
    """

    title: str
    samples: Sequence[int]
    compute_seconds: Sequence[float]
    step_seconds: float
    samples_per_second: float


def draw(splits: Sequence[SplitTimes], speeds: Sequence[float], limit: float, path: Path) -> None:
    """Writes the picture as a PNG.

    Args:
        splits: what to draw, one below the other on one axis of time.
        speeds: relative speed of each worker.
        limit: sum of the speeds, in samples per second.
        path: file to write.
    """
    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK})
    height = 1.5 + 1.9 * len(splits)
    figure, axes = plt.subplots(
        len(splits), 1, sharex=True, figsize=(9, height), layout="constrained", squeeze=False
    )
    for axis, split in zip(axes[:, 0], splits, strict=True):
        _draw_split(axis, split, speeds, limit)
    widest = max(split.step_seconds for split in splits)
    axes[-1, 0].set_xlim(0, 1000 * widest * 1.02)
    for axis in axes[:-1, 0]:
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="x", length=0)
    axes[-1, 0].set_xlabel("time within one step (ms)")
    figure.suptitle(
        f"A global batch of {sum(splits[0].samples)} samples on EMULATED devices of speed "
        + ":".join(f"{speed:g}" for speed in speeds),
        x=0.01,
        ha="left",
        weight="bold",
    )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_split(axis: Axes, split: SplitTimes, speeds: Sequence[float], limit: float) -> None:
    names = [f"worker {i} (speed {speed:g})" for i, speed in enumerate(speeds)]
    step = 1000 * split.step_seconds
    computes = [min(1000 * seconds, step) for seconds in split.compute_seconds]
    axis.barh(names, computes, color=COMPUTES, height=0.7, label="computes (emulated)")
    axis.barh(
        names,
        [step - time for time in computes],
        left=computes,
        color=WAITS,
        height=0.7,
        label="waits for the slowest, exchanges gradients (measured)",
    )
    for row, (samples, seconds) in enumerate(zip(split.samples, computes, strict=True)):
        axis.text(
            seconds / 2,
            row,
            f"{samples} samples",
            color="white",
            ha="center",
            va="center",
            weight="bold",
        )
    axis.invert_yaxis()
    axis.set_title(
        f"{split.title.capitalize()}: {split.samples_per_second:.0f} samples/s, "
        f"{split.samples_per_second / limit:.0%} of the sum of the speeds",
        loc="left",
        fontsize=11,
        pad=8,
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
