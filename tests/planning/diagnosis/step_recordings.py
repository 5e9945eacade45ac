"""Recordings of simulated trainings, with faults that are known."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import Change, Device, Recording
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.what_if import gain_over_even, what_if

STEP = 0.1
SHARE = 32


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong, on a device or on a worker.

    Args:
        kind: "compute", "input", "other", "host" or "link".
        shape: "static" from the first step on, "temporary" for 60 steps, or "creeping", which
            grows for 40 steps and stays.
        size: how many steps' time it costs at its worst.
    """

    kind: str
    shape: str = "static"
    size: float = 1.0
    device: int = 0
    begin: int = 0

    def strength(self, steps):
        numbers = np.arange(steps)
        if self.shape == "static":
            return np.ones(steps)
        if self.shape == "temporary":
            return ((numbers >= self.begin) & (numbers < self.begin + 60)).astype(float)
        return np.clip((numbers - self.begin) / 40, 0.0, 1.0)


def devices_of(n, per_worker=2, kind="GPU", host=None):
    return tuple(
        Device(
            f"worker {i // per_worker} {kind} {i % per_worker}",
            i // per_worker,
            kind,
            host or f"host{i // per_worker}",
        )
        for i in range(n)
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """A training of n replicas: its speeds, noise, faults."""

    n: int = 4
    steps: int = 200
    per_worker: int = 2
    kind: str = "GPU"
    slowness: tuple[float, ...] | None = None
    shares: tuple[int, ...] | np.ndarray | None = None
    fixed: float = 0.0
    transfer: float = 0.1
    noise: float = 0.05
    spikes: float = 0.01
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    with_hardware: bool = True
    warm_up: bool = True
    changes: tuple[Change, ...] = ()

    def record(self):
        random = np.random.default_rng(self.seed)
        shape = (self.steps, self.n)
        shares = np.broadcast_to(SHARE if self.shares is None else self.shares, shape).astype(float)
        slow = np.ones(self.n) if self.slowness is None else np.array(self.slowness)
        devices = devices_of(self.n, self.per_worker, self.kind)
        workers = np.array([device.worker for device in devices])
        compute = (self.fixed + STEP * shares / SHARE) * slow * (shares > 0)
        compute *= np.exp(self.noise * random.normal(size=shape))
        compute *= np.where(random.random(shape) < self.spikes, 1 + 2 * random.random(shape), 1.0)
        waited = 0.005 * STEP * random.exponential(size=shape)
        other = 0.04 * STEP * np.exp(self.noise * random.normal(size=shape))
        transfer = self.transfer * STEP * np.exp(self.noise * random.normal(size=self.steps))
        throttled = np.zeros(shape)
        for fault in self.faults:
            strength = fault.strength(self.steps)
            worker = workers == workers[fault.device]
            extra = fault.size * STEP * strength
            if fault.kind == "compute":
                compute[:, fault.device] *= 1 + fault.size * strength
            elif fault.kind == "input":
                waited[:, worker] += (extra * random.gamma(4, 0.25, self.steps))[:, None]
            elif fault.kind == "other":
                other[:, worker] += extra[:, None]
            elif fault.kind == "link":
                transfer += extra
            elif fault.kind == "host":
                throttled[:, worker] = (strength * fault.size / (1 + fault.size))[:, None]
                if self.kind == "CPU":
                    compute[:, worker] *= 1 + fault.size * strength[:, None]
                else:
                    waited[:, worker] += 0.6 * extra[:, None]
                    other[:, worker] += 0.4 * extra[:, None]
        if self.warm_up:
            compute[:2] += 50 * STEP
        own = compute + waited + other
        sync = own.max(axis=1, keepdims=True) - own + transfer[:, None]
        return Recording(
            devices,
            np.arange(self.steps),
            compute,
            waited,
            sync,
            other,
            shares,
            hardware=self._hardware(random, throttled) if self.with_hardware else {},
            hardware_steps=np.arange(0, self.steps, 5) if self.with_hardware else np.zeros(0, int),
            changes=self.changes,
        )

    def _hardware(self, random, throttled):
        shape = (len(range(0, self.steps, 5)), self.n)
        usage = 8.0 if self.kind == "CPU" else 2.5
        samples = {
            "keras_het.cpu.budget": np.full(shape, 8.0),
            "process.cpu.usage": usage * random.uniform(0.9, 1.0, shape),
            "keras_het.cpu.waiting": np.full(shape, np.nan),
            "keras_het.cpu.throttled": throttled[::5] * random.uniform(0.9, 1.1, shape),
            "system.cpu.utilization": usage / 8 * random.uniform(0.9, 1.0, shape),
        }
        if self.kind == "GPU":
            samples |= {
                "hw.gpu.utilization": random.uniform(0.85, 1.0, shape),
                "hw.gpu.memory.usage": np.full(shape, 8e9),
                "hw.gpu.memory.limit": np.full(shape, 16e9),
                "keras_het.gpu.clock": random.uniform(1.3e9, 1.4e9, shape),
                "keras_het.gpu.clock_limit": np.full(shape, 1.4e9),
                "keras_het.gpu.throttle_reasons": np.zeros(shape),
            }
        return samples


@np.errstate(all="ignore")
def scores_of(recording):
    """How fast each device is, compared with the fastest and with its own best steps."""
    situation = Situation(recording)
    return situation.best, situation.own_best


@np.errstate(all="ignore")
def repairs_of(recording):
    """What the recent steps would take without one device's, worker's or phase's troubles."""
    return what_if(Situation(recording))


@np.errstate(all="ignore")
def gain_of(recording):
    return gain_over_even(Situation(recording))
