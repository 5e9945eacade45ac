"""What samples of the hardware say about the hosts of workers: what keeps CPUs from them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from keras_het.planning.diagnosis.readings import Readings
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.steps import BoolArray

# Fraction of the time in which a quota stops a worker.
_STOPPED = 0.1
_SATURATED = 0.95
_LOST_BUDGET = 0.2
# CPUs in use by others, as a fraction of those that the worker may use, and the host's load.
_OTHERS = 0.3
_BUSY_HOST = 0.8
# Another host is in the same state from this fraction of the reading on: readings are noisy.
_ALIKE = 0.8


@dataclasses.dataclass(frozen=True)
class HostState:
    """What is wrong with the host of a worker."""

    kind: str
    why: str
    alike: BoolArray
    quota: bool = False
    stopped: float = 0.0


class Hosts:
    """The hosts of all workers in recent steps."""

    def __init__(self, recording: Recording, readings: Readings) -> None:
        self._readings = readings
        self._workers = np.array([device.worker for device in recording.devices], np.int64)
        self._all = sorted(set(self._workers.tolist()))
        self._hosts: dict[int, set[str]] = {worker: set() for worker in self._all}
        for device in recording.devices:
            self._hosts[device.worker].add(device.host)

    def state(self, worker: int, wants_cpus: bool) -> HostState | None:
        """Return what keeps CPUs from a worker; None if nothing is known to do so."""
        of, place = self._readings.of_worker, self._all.index(worker)
        budget = of("keras_het.cpu.budget", worker)
        before = of("keras_het.cpu.budget", worker, recent=False)
        usage = of("process.cpu.usage", worker)
        stopped, lost, others, used = (
            values[place] for values in (self._stopped, self._lost, self._others, self._used)
        )
        if stopped >= _STOPPED:
            why = f"a CPU quota stops it for {stopped * 100:.0f} % of the time"
            alike = self._alike(self._stopped, worker)
            return HostState("host", why, alike, quota=True, stopped=min(stopped, 0.99))
        if lost > _LOST_BUDGET:
            why = f"it has {_cpus(budget)} instead of {before:.3g}"
            return HostState("host", why, self._alike(self._lost, worker), quota=True)
        load = of("system.cpu.utilization", worker)
        if load >= _BUSY_HOST and others >= _OTHERS:
            why = (
                f"its host is {load * 100:.0f} % busy, and other programs use at least "
                f"{others * budget:.2g} of its {_cpus(budget)}"
            )
            alike = self._alike(self._others, worker) | self._on_host_of(worker)
            return HostState("other_program", why, alike)
        if wants_cpus and used >= _SATURATED:
            why = f"it keeps {usage:.3g} of its {_cpus(budget)} busy"
            return HostState("host", why, self._alike(self._used, worker))
        return None

    def _alike(self, values: Floats, worker: int) -> BoolArray:
        """Return the devices of workers whose reading is as bad as a worker's."""
        bad = np.asarray(self._all)[values >= _ALIKE * values[self._all.index(worker)]]
        return np.isin(self._workers, bad)

    def _on_host_of(self, worker: int) -> BoolArray:
        return np.isin(self._workers, [worker, *self._neighbours(worker)])

    @functools.cached_property
    def _stopped(self) -> Floats:
        """Fraction of the time in which a quota stops each worker."""
        return self._of_workers("keras_het.cpu.throttled")

    @functools.cached_property
    def _lost(self) -> Floats:
        """Fraction of its budget that each worker has lost."""
        now = self._of_workers("keras_het.cpu.budget")
        before = self._of_workers("keras_het.cpu.budget", recent=False)
        return 1.0 - now / before

    @functools.cached_property
    def _used(self) -> Floats:
        """Fraction of its budget that each worker uses."""
        return self._of_workers("process.cpu.usage") / self._of_workers("keras_het.cpu.budget")

    @functools.cached_property
    def _others(self) -> Floats:
        """CPUs that other programs use at least, as a fraction of each worker's budget."""
        budget = self._of_workers("keras_het.cpu.budget")
        usage = dict(zip(self._all, self._of_workers("process.cpu.usage").tolist(), strict=True))
        own = [
            usage[worker] + sum(np.nan_to_num(usage[other]) for other in self._neighbours(worker))
            for worker in self._all
        ]
        # The host has as many CPUs as the budget at least.
        return self._of_workers("system.cpu.utilization") - np.array(own) / budget

    def _neighbours(self, worker: int) -> list[int]:
        hosts = self._hosts[worker]
        return [each for each in self._all if each != worker and self._hosts[each] & hosts]

    def _of_workers(self, name: str, recent: bool = True) -> Floats:
        values = [self._readings.of_worker(name, worker, recent) for worker in self._all]
        return np.array(values, np.float64)


def _cpus(number: float) -> str:
    text = f"{number:.3g}"
    return f"{text} CPU" if text == "1" else f"{text} CPUs"
