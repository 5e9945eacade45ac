"""Which trials a benchmark consists of, and what they show."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from keras_het import __version__
from keras_het.launch.doctor.tensorflow_facts import answer_in, last_line, run_program
from keras_het.launch.local.worker_environment import (
    KERAS_HET_EMULATED_DEVICES,
    VISIBLE,
    Emulation,
    environment_of,
)

_PROGRAM = "keras_het.launch.benchmark_trial_program"
_START_SECONDS = 180.0
MODELS = ("convnet", "transformer")


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or an emulated device."""

    # `visible` is what CUDA calls a GPU, `speed` the relative speed of an emulated device.

    label: str
    visible: str = ""
    speed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training that is timed."""

    # Modes: "plain" for Keras alone on one device, "even", "balanced", and "copies": balanced, and
    # summed through the first device instead of by NCCL.

    model: str
    mode: str
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all trials have in common; `batch_size` is for each device."""

    devices: tuple[Device, ...]
    models: tuple[str, ...] = MODELS
    batch_size: int = 64
    seconds: float = 15.0
    precision: str = "float32"

    @property
    def is_emulated(self) -> bool:
        return self.devices[0].speed > 0


def plan(settings: Settings) -> list[Trial]:
    """Return each device alone and then all together, for each model."""
    everyone = tuple(range(len(settings.devices)))
    together = ["even", "balanced"] if len(everyone) > 1 else ["balanced"]
    if len(everyone) > 1 and not settings.is_emulated:
        together.append("copies")
    return [
        trial
        for model in settings.models
        for trial in (
            *(Trial(model, "plain", (place,)) for place in everyone),
            *(Trial(model, mode, everyone) for mode in together),
        )
    ]


def run_trial(
    trial: Trial,
    settings: Settings,
    seconds_left: float = math.inf,
    run: Callable[..., Any] = run_program,
) -> Any:
    """Run a trial in a separate process; return what it measured, or `{"error": ...}`."""
    if seconds_left < settings.seconds:
        return {"error": "no time was left: choose fewer --models, or give --seconds"}
    devices = [settings.devices[place] for place in trial.devices]
    kind = "CPU" if settings.is_emulated else "GPU"
    is_plain = trial.mode == "plain" and not settings.is_emulated
    request = {
        "model": trial.model,
        # plain Keras knows no emulated devices
        "mode": trial.mode if is_plain or trial.mode != "plain" else "even",
        # CPU:0 is the host
        "devices": [f"{kind}:{place + settings.is_emulated}" for place in range(len(devices))],
        "is_emulated": settings.is_emulated,
        "batch_size": settings.batch_size * len(devices),
        "precision": settings.precision,
        "seconds": settings.seconds,
        "warm_up_seconds": settings.seconds / (1 if trial.mode in ("balanced", "copies") else 2),
    }
    environ = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **_environment(devices)}
    limit = min(_START_SECONDS + 4 * settings.seconds, seconds_left)
    try:
        ended = run(_PROGRAM, environ, limit, json.dumps(request))
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done within {error.timeout:g} s"}
    return answer_in(ended.stdout) or {"error": last_line(ended)}


def _environment(devices: Sequence[Device]) -> dict[str, str]:
    if devices[0].visible:
        return environment_of(",".join(device.visible for device in devices))
    emulation = Emulation(tuple(device.speed for device in devices))
    return {KERAS_HET_EMULATED_DEVICES: json.dumps(emulation.devices()), VISIBLE: "-1"}


Measured = Mapping[Trial, Mapping[str, Any]]


def _of_model(model: str, measured: Measured) -> Measured:
    return {trial: each for trial, each in measured.items() if trial.model == model}


def headline(model: str, measured: Measured) -> dict[str, float] | None:
    """Return parts of what all devices compute apart; None if a trial that it needs failed."""
    needed = _of_model(model, measured).items()
    trials = {trial: each for trial, each in needed if trial.mode != "copies"}
    if any("error" in each for each in trials.values()):
        return None
    speeds = {trial: float(each["samples_per_second"]) for trial, each in trials.items()}
    alone = [speed for trial, speed in speeds.items() if trial.mode == "plain"]
    modes = {trial.mode: speed for trial, speed in speeds.items() if trial.mode != "plain"}
    balanced = modes["balanced"]
    return {
        "over_sum_of_all_alone": balanced / sum(alone),
        "over_best_alone": balanced / max(alone),
        "over_even": balanced / modes.get("even", balanced),
    }


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
        trials = _of_model(model, measured)
        for trial, each in trials.items():
            table.add_row(name_of(trial, settings), *_cells(each))
        console.print(table)
        for trial, each in trials.items():
            if "error" in each:
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
            for trial, each in _of_model(model, measured).items()
            if "error" not in each
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
