"""The figure of the tuned loader: steps/s over the time of training, and the moves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras import MISSING

try:
    import matplotlib
except ImportError as error:
    raise ImportError(MISSING) from error

matplotlib.use("Agg")  # No window: the result is a file.

import numpy as np
from matplotlib import pyplot as plt

# Okabe and Ito's colours, which are distinct for colour-blind readers and in print.
BEFORE, AFTER, INK = "#8C877B", "#0072B2", "#222222"
WINDOW = 8


def draw(
    before: Any, after: Any, moves: Sequence[tuple[int, str]], limit: float, path: Path
) -> None:
    """Write the figure as a PNG.

    Args:
        before: end of each step with AUTOTUNE, in seconds from the start, float64.
        after: the same with LoaderTuner.
        moves: step and text of each change.
        limit: steps/s of the device if every batch is ready.
        path: file to write.
    """
    plt.rcParams.update({"font.size": 12, "text.color": INK, "axes.labelcolor": INK})
    figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
    axis.axhline(limit, color=INK, linestyle=":", linewidth=1)
    axis.text(0.01, limit, " the device's own speed", va="bottom", transform=_at_left(axis))
    for ends, colour, name in ((before, BEFORE, "AUTOTUNE"), (after, AFTER, "LoaderTuner")):
        times, speeds = _speeds(ends)
        axis.plot(times, speeds, color=colour, linewidth=2)
        axis.text(times[-1], speeds[-1], f"  {name}", color=colour, va="center", weight="bold")
    for number, (step, _) in enumerate(moves):
        when = after[min(step, len(after) - 1)]
        axis.axvline(when, color=AFTER, linewidth=1, alpha=0.4)
        label = f" {number + 1}"
        axis.text(when, 0.02, label, color=AFTER, transform=axis.get_xaxis_transform())
    axis.set_ylim(0, limit * 1.15)
    axis.set_xlim(0, max(before[-1], after[-1]) * 1.16)
    axis.set_xlabel("seconds of training: the same steps in both runs")
    axis.set_ylabel("steps/s")
    axis.spines[["top", "right"]].set_visible(False)
    text = "\n".join(f"{number + 1}: {text}" for number, (_, text) in enumerate(moves[:5]))
    if len(moves) > 5:
        text += f"\n... and {len(moves) - 5} more"
    axis.text(0.99, 0.5, text, transform=axis.transAxes, fontsize=9, ha="right", va="center")
    figure.suptitle(
        "JPEG files from slow storage, decoded while the device waits (EMULATED device)",
        x=0.01,
        ha="left",
        weight="bold",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _at_left(axis: Any) -> Any:
    return axis.get_yaxis_transform()


def _speeds(ends: Any) -> tuple[Any, Any]:
    """Return steps/s over a window of steps, at its middle."""
    window = min(WINDOW, len(ends) - 1)
    spans = ends[window:] - ends[:-window]
    return (ends[window:] + ends[:-window]) / 2, window / np.maximum(spans, 1e-9)
