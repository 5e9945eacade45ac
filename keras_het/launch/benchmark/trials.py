"""Which trials a benchmark consists of, and what they show."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_het.launch.doctor.tensorflow_facts import answer_in, run_program
from keras_het.launch.local.gpus import environment_of

_PROGRAM = "keras_het.launch.benchmark.trial_program"
_START_SECONDS = 180.0
_EMULATED_MILLISECONDS = 4.0
MODELS = ("convnet", "transformer")


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or an emulated device.

    Attributes:
        label: how a person calls it.
        visible: what CUDA calls it, empty for an emulated device.
        speed: relative speed of an emulated device, 0 for a GPU.
    """

    label: str
    visible: str = ""
    speed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training that is timed.

    Attributes:
        mode: "plain" for Keras alone on one device, "even", "balanced", or "copies": balanced, and
            summed through the first device instead of by NCCL.
        devices: places among all devices.
    """

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


def run_trial(trial: Trial, settings: Settings, run: Callable[..., Any] = run_program) -> Any:
    """Run a trial in a process of its own; return what it measured, or `{"error": ...}`."""
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
    limit = _START_SECONDS + 4 * settings.seconds
    try:
        ended = run(_PROGRAM, environ, limit, json.dumps(request))
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done within {error.timeout:g} s"}
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {ended.returncode}"
    return answer_in(ended.stdout) or {"error": last}


def _environment(devices: Sequence[Device]) -> dict[str, str]:
    if devices[0].visible:
        return environment_of(",".join(device.visible for device in devices))
    emulated = [
        {
            "speed": device.speed,
            "fixed_seconds": 0.0,
            "seconds_per_sample": _EMULATED_MILLISECONDS / 1e3 / device.speed,
        }
        for device in devices
    ]
    return {"KERAS_HET_EMULATED_DEVICES": json.dumps(emulated), "CUDA_VISIBLE_DEVICES": "-1"}


def headline(model: str, measured: Mapping[Trial, Mapping[str, Any]]) -> dict[str, float] | None:
    r"""Return what all devices together compute, as parts of what they compute apart.

    .. math:: \frac{s_\text{balanced}}{\sum_d s_d}, \quad \frac{s_\text{balanced}}{\max_d s_d},
        \quad \frac{s_\text{balanced}}{s_\text{even}}

    with s the samples per second. None if a trial of the model failed.
    """
    of_model = {trial: each for trial, each in measured.items() if trial.model == model}
    if any("error" in each for each in of_model.values()):
        return None
    speeds = {t: float(each["samples_per_second"]) for t, each in of_model.items()}
    alone = [speed for trial, speed in speeds.items() if trial.mode == "plain"]
    modes = {trial.mode: speed for trial, speed in speeds.items() if trial.mode != "plain"}
    balanced = modes["balanced"]
    return {
        "over_sum_of_all_alone": balanced / sum(alone),
        "over_best_alone": balanced / max(alone),
        "over_even": balanced / modes.get("even", balanced),
    }
