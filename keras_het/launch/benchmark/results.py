"""The table, the picture and the file of a benchmark."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from keras_het import __version__
from keras_het.launch.benchmark.trials import Settings, Trial, headline

Measured = Mapping[Trial, Mapping[str, Any]]

_COPIES = "copies\nper\nstep"
_WORDS = {
    "even": "all, even shares",
    "balanced": "all, balanced",
    "copies": "all, balanced, without NCCL",
}


def name_of(trial: Trial, settings: Settings) -> str:
    """Return how the table calls a trial."""
    if trial.mode == "plain":
        return f"{settings.devices[trial.devices[0]].label} alone"
    return _WORDS[trial.mode]


def show(settings: Settings, measured: Measured, output: TextIO) -> None:
    """Print a table for each model, with its headline below."""
    console = Console(file=output, highlight=False, soft_wrap=True)
    for model in settings.models:
        table = Table(
            title=f"{model}, {settings.batch_size} samples a device", title_justify="left"
        )
        # as narrow as can be: names of GPUs are long
        for column in ("", "samples/s", "ms a\nstep", "shares", "peak\nMiB", "XLA", _COPIES):
            table.add_column(column, justify="left" if not column else "right")
        for trial, each in measured.items():
            if trial.model == model:
                table.add_row(name_of(trial, settings), *_cells(each))
        console.print(table)
        for trial, each in measured.items():
            if trial.model == model and "error" in each:
                console.print(f"{name_of(trial, settings)} failed: {each['error']}")
        if ratios := headline(model, measured):
            console.print(
                f"All together, balanced: {ratios['over_sum_of_all_alone']:.2f} of the sum of all "
                f"alone, {ratios['over_best_alone']:.2f} times the fastest alone, "
                f"{ratios['over_even']:.2f} times even shares.\n"
            )


def _cells(each: Mapping[str, Any]) -> list[str]:
    if "error" in each:
        return ["failed"]
    return [
        f"{each['samples_per_second']:.0f}",
        f"{1e3 * each['step_seconds']:.1f}",
        " ".join(map(str, each["shares"])),
        " ".join(map(str, each["peak_mib"])) or "-",
        "yes" if each["xla"] else "no",
        " or ".join(map(str, each["copies_per_step"])) or "-",
    ]


def to_dict(settings: Settings, measured: Measured, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain values; of the machine no name and no address."""
    return {
        "keras_het": __version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "is_emulated": settings.is_emulated,
        "machine": machine,
        "devices": [device.label for device in settings.devices],
        "batch_size_per_device": settings.batch_size,
        "precision": settings.precision,
        "seconds": settings.seconds,
        "trials": [{**dataclasses.asdict(trial), **each} for trial, each in measured.items()],
        "headline": {model: headline(model, measured) for model in settings.models},
    }


def save(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write the file that belongs to a report."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "keras-het-benchmark.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def draw(folder: Path, settings: Settings, measured: Measured) -> Path | None:
    """Draw samples per second of all trials; None without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(
        1, len(settings.models), figsize=(6 * len(settings.models), 4), squeeze=False
    )
    for axes, model in zip(all_axes[0], settings.models, strict=True):
        bars = {
            name_of(trial, settings): each["samples_per_second"]
            for trial, each in measured.items()
            if trial.model == model and "error" not in each
        }
        limit = sum(speed for name, speed in bars.items() if name.endswith(" alone"))
        drawn = axes.barh(list(bars), list(bars.values()), color="#4c78a8")
        axes.bar_label(drawn, fmt="%.0f", padding=3)
        axes.axvline(limit, color="#e45756", linestyle="--")
        title = f"{model} (dashed: sum of all alone)"
        axes.set(title=title, xlabel="samples per second", xlim=(0, 1.15 * limit))
        axes.invert_yaxis()
    kind = "emulated devices" if settings.is_emulated else "GPUs"
    figure.suptitle(f"keras_het {__version__}: {kind} alone and together")
    figure.tight_layout()
    path = folder / "keras-het-benchmark.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
