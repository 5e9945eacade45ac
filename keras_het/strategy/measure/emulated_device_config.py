"""Emulated devices: how `keras-het run --speeds` tells a worker to be slower than it is.

Nothing here delays anything; it only reads and describes. Standard library only.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from keras_het.planning.times.time_model import LinearTimeModel

_logger = logging.getLogger(__name__)

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

_KEYS = ("speed", "fixed_seconds", "seconds_per_sample")
_EXAMPLE = '[{"speed": 4.0, "fixed_seconds": 0.0, "seconds_per_sample": 0.001}]'


@dataclass(frozen=True)
class EmulatedDevice:
    """A device that takes at least the time its time model says for each step."""

    speed: float
    time_model: LinearTimeModel

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(
                "An emulated device needs a positive finite speed. Received: "
                f"speed={self.speed!r}. Give relative speeds such as 4, 2 and 1."
            )

    def describe(self) -> str:
        """Return one line for logs and plots that labels the device as EMULATED."""
        model = self.time_model
        fixed = f"{1000 * model.fixed_seconds:g} ms + " if model.fixed_seconds else ""
        return (
            f"EMULATED device of speed {self.speed:g}: a step takes at least "
            f"{fixed}{1000 * model.seconds_per_sample:g} ms per sample"
        )


def describe_emulated_devices(devices: tuple[EmulatedDevice, ...]) -> str:
    """Return one line per device, each of which says EMULATED."""
    return "\n".join(
        f"local replica {index}: {device.describe()}" for index, device in enumerate(devices)
    )


def read_emulated_devices(
    environ: Mapping[str, str] | None = None,
) -> tuple[EmulatedDevice, ...] | None:
    """Read the environment variable KERAS_HET_EMULATED_DEVICES."""
    text = (os.environ if environ is None else environ).get(KERAS_HET_EMULATED_DEVICES, "")
    if not text.strip():
        return None
    try:
        devices = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(
            f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}", text
        ) from error
    if not isinstance(devices, list) or not devices:
        raise _error("must be a JSON list with one object for each local replica", text)
    return tuple(_read_device(device, index, text) for index, device in enumerate(devices))


def _read_device(device: object, index: int, text: str) -> EmulatedDevice:
    if not isinstance(device, dict) or set(device) != set(_KEYS):
        raise _error(f"must hold objects with the keys {list(_KEYS)}; device {index} is not", text)
    for key in _KEYS:
        if isinstance(device[key], bool) or not isinstance(device[key], (int, float)):
            raise _error(f"must hold numbers; device {index} has {key}={device[key]!r}", text)
    try:
        model = LinearTimeModel(float(device["fixed_seconds"]), float(device["seconds_per_sample"]))
        return EmulatedDevice(float(device["speed"]), model)
    except ValueError as error:
        raise _error(f"describes device {index} wrongly: {error}", text) from error


def _error(problem: str, text: str) -> ValueError:
    return ValueError(
        f"The environment variable {KERAS_HET_EMULATED_DEVICES} {problem}. Received: {text!r}; "
        f"expected for example {_EXAMPLE}. Unset it to use the devices as they are, or let "
        "`keras-het run --speeds` set it."
    )


def warn_of_emulated_devices(
    devices: tuple[EmulatedDevice, ...] | None, num_local_replicas: int
) -> None:
    """Warn that times are not real if devices are emulated."""
    if devices is None:
        return
    if len(devices) != num_local_replicas:
        raise ValueError(
            "KERAS_HET_EMULATED_DEVICES must describe every local replica. Received: "
            f"{len(devices)} device(s); expected: {num_local_replicas}."
        )
    _logger.warning("%s", describe_emulated_devices(devices))


def warn_that_nothing_waits() -> None:
    """Warn that a custom loop does not emulate, although the launcher's label says so."""
    _logger.warning(
        "A function of one's own in strategy.run does not wait for emulated devices "
        "(KERAS_HET_EMULATED_DEVICES, `keras-het run --speeds`): only the steps of Keras, as "
        "those of fit, do. Its times say nothing about devices of different speed."
    )
