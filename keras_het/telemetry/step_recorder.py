"""The latest steps of a training, read from the strategy and kept in memory."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het.device_names import identities
from keras_het.planning.diagnosis.recording import (
    HARDWARE,
    Change,
    Device,
    PipelineRecord,
    Recording,
)
from keras_het.planning.diagnosis.statistics import throughput
from keras_het.strategy.measure.phase_times import PARTS

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_KEPT_STEPS = 5000
_KEPT_SAMPLES = 1000
_LONGEST_NAMES = 8192
_COMPLETED_STEPS = 64
_logger = logging.getLogger(__name__)


class StepRecorder:
    """Rows of the latest steps, and the hardware's samples of that time."""

    def __init__(self, strategy: HeterogeneousStrategy, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._phases = strategy.extended.compute_times.phases
        self._lock = threading.Lock()
        self.offset = 0
        self.changes: list[Change] = []
        self.pauses: list[tuple[int, float]] = []
        self.pipeline: PipelineRecord | None = None
        self._steps = np.zeros(0, np.int64)
        self._rows = np.zeros((0, PARTS, len(devices)), np.float32)
        self._measured = np.zeros(0, bool)
        self._samples: deque[tuple[int, np.ndarray]] = deque(maxlen=_KEPT_SAMPLES)
        self._epoch_start = self.first_step = 0
        self._taken = -1

    def begin(self, step: int) -> None:
        """Start with the step that comes next; earlier ones belong to another `fit`."""
        self._phases.read_new()
        # Row k of the ring is the step before; the last one of an earlier `fit` comes first.
        self.offset = step - self._phases.count
        self._epoch_start = self.first_step = step
        self._taken = step - 1

    @property
    def next_step(self) -> int:
        return self._phases.count + self.offset

    def begin_epoch(self) -> tuple[int, float] | None:
        """Start the step clock and the epoch's averages again."""
        seconds = self._phases.restart_clock()
        self._epoch_start = self.next_step
        if self._epoch_start == self.first_step:
            return None
        self.pauses.append((self._epoch_start, seconds))
        return self.pauses[-1]

    def read(self) -> None:
        """Read the steps since the last call; any thread may call it."""
        with self._lock:
            first, rows, measured = self._phases.read_new()
            if not len(rows):
                return
            # a replica of a group that this worker does not sum with
            unknown = ~rows[:, :4].any(axis=1, keepdims=True)
            rows = np.where(unknown, np.nan, rows)
            numbers = np.arange(len(rows)) + first + self.offset
            own = numbers >= self.first_step
            self._steps = np.concatenate([self._steps, numbers[own]])[-_KEPT_STEPS:]
            self._rows = np.concatenate([self._rows, rows[own]])[-_KEPT_STEPS:]
            self._measured = np.concatenate([self._measured, measured[own]])[-_KEPT_STEPS:]

    def take_new(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Read, and return first step, rows and what was measured of new blocks without gaps."""
        self.read()
        with self._lock:
            new = self._steps > self._taken
            steps, rows, measured = self._steps[new], self._rows[new], self._measured[new]
        if not len(steps):
            return []
        self._taken = int(steps[-1])
        gaps = np.flatnonzero(np.diff(steps) != 1) + 1
        blocks = np.split(np.arange(len(steps)), gaps)
        return [(int(steps[block[0]]), rows[block], measured[block]) for block in blocks]

    def sample(self) -> tuple[int, np.ndarray] | None:
        """Keep what was sampled last on all workers."""
        count = self._phases.count
        if count + self.offset <= self.first_step:
            return None
        step, samples = count + self.offset, self._phases.samples()
        # A replica of a group that this worker does not sum with has zeros, also for its CPUs.
        samples[~samples.any(axis=1)] = np.nan
        with self._lock:
            self._samples.append((step, samples))
        return step, samples

    def complete(self, strategy: HeterogeneousStrategy) -> None:
        """Fill in others' latest steps; every worker must call it between the same two steps."""
        self.read()
        own = np.zeros([1, _COMPLETED_STEPS, *self._rows.shape[1:]])
        with self._lock:
            count = min(len(self._rows), _COMPLETED_STEPS)
            own[0, _COMPLETED_STEPS - count :] = np.nan_to_num(
                self._rows[len(self._rows) - count :]
            )
        rows = strategy.extended.gather_over_workers(own).sum(axis=0)[_COMPLETED_STEPS - count :]
        unknown = ~rows[:, :4].any(axis=1, keepdims=True)
        with self._lock:
            self._rows[len(self._rows) - count :] = np.where(unknown, np.nan, rows)
            self._taken = min(self._taken, int(self._steps[-count]) - 1) if count else self._taken

    def recording(self) -> Recording:
        with self._lock:
            rows, steps, measured = self._rows.astype(np.float64), self._steps, self._measured
            samples = list(self._samples)
        sampled = np.array([each for _, each in samples])
        sampled = sampled.reshape(-1, len(self.devices), len(HARDWARE))
        return Recording(
            self.devices,
            steps,
            compute=rows[:, 0],
            input=rows[:, 1],
            sync=rows[:, 2],
            other=rows[:, 3],
            shares=rows[:, 4],
            hardware={name: sampled[:, :, place] for place, name in enumerate(HARDWARE)},
            hardware_steps=np.array([step for step, _ in samples], np.int64),
            changes=tuple(self.changes),
            pauses=tuple(self.pauses),
            pipeline=self.pipeline,
            measured=measured,
        )

    def note_change(self, kind: str, text: str) -> Change:
        """Keep a change that was made before the next step."""
        change = Change(self.next_step, kind, text)
        self.changes.append(change)
        return change

    def logs(self, latest: int | None = None) -> dict[str, float]:
        """Return the few numbers that matter, for Keras's logs; empty if no step is known."""
        with self._lock:
            of_epoch = self._rows[self._steps >= self._epoch_start]
            if self._phases.is_sampled and not len(of_epoch):
                of_epoch = self._rows[-1:]  # what is known of the steps before
            rows = of_epoch if latest is None else self._rows[-latest:]
        rows = rows[:, :, ~np.isnan(rows).all(axis=(0, 1))] if len(rows) else rows
        # without a collective in each step, other workers' are known of the latest steps only
        rows = rows[~np.isnan(rows).any(axis=(1, 2))]
        if not rows.size:
            return {}
        samples = rows[:, 4].sum(axis=1) / self._phases.stages
        result = {
            "samples_per_second": throughput(rows[:, :4].sum(axis=1), samples).samples_per_second,
            "input_wait_seconds": float(rows[:, 1].mean(axis=0).max()),
        }
        if len(self.devices) > 1:
            ready = rows[:, :2].sum(axis=1).mean(axis=0)
            sync = np.median(rows[:, 2], axis=0)
            result["slowest_replica"] = float(np.argmax(ready))
            result["slowest_replica_wait_seconds"] = float(sync.max() - sync.min())
        return result


def devices_of(
    strategy: HeterogeneousStrategy, local: Sequence[str], models: Sequence[str]
) -> list[Device]:
    """Return the devices of all replicas; every worker must call it, with its own ones."""
    counts = strategy.extended.compute_times.phases.layout.replicas_per_worker
    # processes of a pipeline may have devices of different types
    kinds = [tf.DeviceSpec.from_string(device).device_type for device in local]
    own = json.dumps([*zip(kinds, models, identities(local), strict=True)]).encode()
    if len(own) > _LONGEST_NAMES:
        own = json.dumps([(kind, "", "") for kind in kinds]).encode()[:_LONGEST_NAMES]
    padded = np.zeros([1, _LONGEST_NAMES], np.uint8)
    padded[0, : len(own)] = np.frombuffer(own, np.uint8)
    if strategy.num_workers > 1:
        padded = strategy.extended.gather_over_workers(padded)
    config = strategy.extended.cluster_config
    addresses = config.sync_group_addresses if config is not None else ()
    hosts = [address.rpartition(":")[0] for address in addresses]
    found = []
    of_identity: Counter[str] = Counter()
    for worker, count in enumerate(counts):
        try:
            names = json.loads(padded[worker].tobytes().rstrip(b"\0"))
        except ValueError:  # too long
            names = []
        for local_index in range(count):
            known = names[local_index] if local_index < len(names) else (kinds[0], "", "")
            kind, model, identity = known
            of_identity[identity] += 1
            if identity and of_identity[identity] > 1:
                identity += f" #{of_identity[identity]}"
            host = hosts[worker] if worker < len(hosts) else ""
            name = f"worker {worker} {kind} {local_index}"
            found.append(Device(name, worker, kind, host, model, identity))
    return found


class Background:
    """A thread that calls a function until it is stopped; an error is one warning and ends it."""

    def __init__(self, work: Callable[[], None], interval_seconds: float) -> None:
        self._work, self._interval_seconds = work, interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_het-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                self._work()
            except Exception as error:  # whatever it is, training continues
                _logger.warning("Telemetry stops after an error: %r. Training continues.", error)
                return
