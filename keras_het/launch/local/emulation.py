"""Devices of different speeds on one machine: the workers' settings, and the label."""

import json
from dataclasses import dataclass

from keras_het.planning.time_model import LinearTimeModel

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

_DEFAULT_SECONDS_PER_SAMPLE = 0.004


@dataclass(frozen=True)
class Emulation:
    """One emulated device per worker.

    A device of speed `s` takes at least `fixed_seconds + seconds_per_sample / s` for a step of one
    sample. It waits for that time without burning CPU, so several fit on one machine. Asynchronous
    ones compute while their hosts continue, as GPUs do.
    """

    speeds: tuple[float, ...]
    seconds_per_sample: float = _DEFAULT_SECONDS_PER_SAMPLE
    fixed_seconds: float = 0.0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise ValueError(
                "Emulated devices need positive finite speeds, one for each worker. Received: "
                f"speeds={self.speeds}. Give relative speeds such as 4,2,1."
            )
        self.time_models()

    def time_models(self) -> tuple[LinearTimeModel, ...]:
        return tuple(
            LinearTimeModel(self.fixed_seconds, self.seconds_per_sample / speed)
            for speed in self.speeds
        )

    def environment_of(self, worker_index: int) -> dict[str, str]:
        model = self.time_models()[worker_index]
        device = {
            "speed": self.speeds[worker_index],
            "fixed_seconds": model.fixed_seconds,
            "seconds_per_sample": model.seconds_per_sample,
        }
        if self.asynchronous:
            device["asynchronous"] = True
        return {KERAS_HET_EMULATED_DEVICES: json.dumps([device])}

    def describe(self) -> str:
        speeds = ":".join(f"{speed:g}" for speed in self.speeds)
        times = ", ".join(f"{1000 * model.seconds_per_sample:g}" for model in self.time_models())
        fixed = f" plus {1000 * self.fixed_seconds:g} ms a step" if self.fixed_seconds else ""
        kind = "asynchronous device" if self.asynchronous else "device"
        return (
            f"EMULATION: {kind} speeds {speeds} are emulated by waiting ({times} ms per sample"
            f"{fixed}). Times of this run are not those of real devices."
        )
