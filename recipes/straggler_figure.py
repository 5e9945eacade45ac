"""The figure of the straggler: step times and shares over the steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras import MISSING

try:
    import matplotlib
except ImportError as error:
    raise ImportError(MISSING) from error

matplotlib.use("Agg")  # No window: the result is a file.

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Okabe and Ito's colours, which are distinct for colour-blind readers and in print.
EVEN, BALANCED, INK, SHADE = "#8C877B", "#0072B2", "#222222", "#F3EBD8"
WORKERS = (("#009E73", "-"), ("#D55E00", "-"), ("#CC79A7", "--"))


def draw(
    even: dict[str, Any],
    balanced: dict[str, Any],
    optima: Sequence[float],
    slow: tuple[int, int],
    event: str,
    path: Path,
) -> None:
    """Write the figure as a PNG.

    Args:
        even: "steps" and "seconds" of the even split, and "shares" of all steps.
        balanced: the same of the balanced training.
        optima: best compute time in each of the three phases, in seconds.
        slow: first step of the slow phase and of the recovery.
        event: what happens in the slow phase.
        path: file to write.
    """
    plt.rcParams.update({"font.size": 12, "text.color": INK, "axes.labelcolor": INK})
    figure, (times, shares) = plt.subplots(
        2, 1, sharex=True, figsize=(10, 6), layout="constrained", height_ratios=(1.3, 1)
    )
    num_steps = len(balanced["shares"])
    _draw_times(times, even, balanced, optima, (0, *slow, num_steps))
    _draw_shares(shares, balanced["shares"])
    for axis in times, shares:
        axis.axvspan(slow[0] - 0.5, slow[1] - 0.5, color=SHADE, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    times.text(
        sum(slow) / 2, 0.98, event, transform=times.get_xaxis_transform(), ha="center", va="top"
    )
    shares.set_xlim(0, num_steps - 1)
    shares.set_xlabel("training step")
    figure.suptitle(
        f"A straggler among {len(balanced['shares'][0])} workers of equal speed (EMULATED devices)",
        x=0.01,
        ha="left",
        weight="bold",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_times(
    axis: Axes,
    even: dict[str, Any],
    balanced: dict[str, Any],
    optima: Sequence[float],
    borders: Sequence[int],
) -> None:
    for numbers, color, label in (even, EVEN, "even split"), (balanced, BALANCED, "balanced"):
        milliseconds = [1000 * seconds for seconds in numbers["seconds"]]
        axis.plot(numbers["steps"], milliseconds, color=color, linewidth=1.8, label=label)
    for first, end, seconds in zip(borders, borders[1:], optima, strict=False):
        name = "optimum for known speeds" if first == 0 else ""
        axis.hlines(
            1000 * seconds, first - 0.5, end - 0.5, color=INK, linestyle=":", zorder=3, label=name
        )
    # Room above the curves for the text.
    axis.set_ylim(top=1.15 * axis.get_ylim()[1])
    axis.set_ylabel("step time (ms)")
    axis.legend(loc="upper left", frameon=False, fontsize=11)


def _draw_shares(axis: Axes, shares: Sequence[Sequence[int]]) -> None:
    for worker, (color, line) in enumerate(WORKERS):
        samples = [each[worker] for each in shares]
        axis.step(
            range(len(samples)),
            samples,
            where="mid",
            color=color,
            linestyle=line,
            linewidth=2,
            label=f"worker {worker}",
        )
    axis.set_ylabel("samples (balanced)")
    axis.legend(loc="lower left", frameon=False, fontsize=11)
