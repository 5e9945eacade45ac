"""A training on devices that do not match, made of numbers: what a log of it holds.

    python tests/tensorboard/made_training.py FOLDER [REPLICAS] [STEPS]

writes one, to be looked at with TensorBoard.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from keras_het.planning.diagnosis.recording import Change, Device
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import Value

MODELS = {
    "NVIDIA A100-SXM4-40GB": 1.0,
    "NVIDIA GeForce RTX 2080 Ti": 2.3,
    "NVIDIA Tesla K80": 6.0,
}
HARDWARE = ("hw.gpu.utilization", "hw.temperature", "process.cpu.usage")
BLOCK = 20
GLOBAL_BATCH = 64
SECONDS_PER_SAMPLE = 0.0008


def devices_of(replicas):
    names = list(MODELS)
    return tuple(
        Device(f"worker {n // 2} GPU {n % 2}", n // 2, "GPU", f"node{n // 2:02}", names[n // 2 % 3])
        for n in range(replicas)
    )


def times(devices, steps):
    """Times and shares, [steps, 5, replicas]: even shares, balanced ones after a fifth.

    After 70 % of the steps the second device throttles, and is given less after 80 %.
    """
    noise = np.random.default_rng(7)
    replicas = len(devices)
    slow = np.array([MODELS[device.model] for device in devices]) * SECONDS_PER_SAMPLE
    step = np.arange(steps)[:, None]
    factor = np.where((np.arange(replicas) == 1) & (step >= 0.7 * steps), 1.8, 1.0)
    speed = 1 / slow
    balanced = np.round(GLOBAL_BATCH * replicas * speed / speed.sum())
    later = speed / np.where(np.arange(replicas) == 1, 1.8, 1.0)
    again = np.round(GLOBAL_BATCH * replicas * later / later.sum())
    shares = np.where(step < steps // 5, GLOBAL_BATCH, balanced)
    shares = np.where(step < 0.8 * steps, shares, again)
    compute = 0.004 + shares * slow * factor * noise.normal(1, 0.02, (steps, replicas))
    wait = np.abs(noise.normal(0.001, 0.0005, (steps, replicas)))
    wait[noise.random((steps, replicas)) < 0.002] += 0.05
    wait[:, -1] += 0.006
    other = np.full_like(compute, 0.003) + noise.exponential(0.0005, compute.shape)
    compute[:1] += 2.5  # tracing
    own = compute + wait + other
    sync = own.max(axis=1, keepdims=True) - own + 0.008
    return np.stack([compute, wait, sync, other, shares], axis=1).astype(np.float32)


def hardware(devices, step, steps):
    part = step / max(steps, 1)
    sample = np.empty((len(devices), len(HARDWARE)), np.float32)
    sample[:, 0] = 0.9 - 0.1 * np.arange(len(devices)) / len(devices)
    sample[:, 1] = 60 + 10 * part
    sample[:, 2] = np.nan
    sample[min(1, len(devices) - 1), 1] = 60 + 30 * part
    return sample


def changes(steps):
    return [
        Change(steps // 5, "shares", "Shares follow the devices' speed: a step takes 58 % less."),
        Change(steps // 2, "loader", "8 parallel calls instead of 4: worker 0 waited for input."),
        Change(int(0.8 * steps), "shares", "worker 0 GPU 1 became slower and gets fewer samples."),
    ]


def values(replicas, steps):
    """All that a log of the training holds, as a data provider gives it."""
    devices = devices_of(replicas)
    setup = log_format.setup_text(devices, HARDWARE).encode()
    yield Value(log_format.SETUP, 0, 1.0, setup)
    block = times(devices, steps)
    for start in range(0, steps, BLOCK):
        time = 2.0 + start
        yield Value(log_format.STEPS, start, time, block[start : start + BLOCK])
        if start % 100 == 0:
            sample = hardware(devices, start, steps)
            yield Value(log_format.HARDWARE_SAMPLES, start, time, sample)
    for change in changes(steps) if steps >= BLOCK else ():
        text = log_format.entries_text([{"kind": change.kind, "text": change.text}]).encode()
        yield Value(log_format.CHANGES, change.step, 2.0 + change.step, text)


def write(folder, replicas, steps, measured_every=1, **settings):
    """Write the log of a training into a folder, of which every so manyth step was measured."""
    from keras_het.telemetry.event_log import EventLog

    devices = devices_of(replicas)
    log = EventLog(folder / log_format.DIRECTORY, devices, HARDWARE, **settings)
    block = times(devices, steps)
    measured = np.arange(steps) % measured_every == measured_every - 1
    ends = (np.arange(steps) // measured_every + 1) * measured_every - 1
    block = block[np.minimum(ends, steps - 1)]
    later = changes(steps) if steps >= BLOCK else []
    for start in range(0, steps, BLOCK):
        part = block[start : start + BLOCK]
        if start % 100 == 0:
            log.write_hardware(start, hardware(devices, start, steps))
        log.write_steps(start, part, measured[start : start + BLOCK])
        while later and later[0].step < start + BLOCK:
            log.write_change(later.pop(0))
        for worker in range(2):
            log.write_async(
                *(start, worker), staleness=2 + worker, exchange_seconds=0.08, samples_per_second=55
            )
        wall = float(np.max(part[-1, :4].sum(axis=0)))
        log.write_scalars(
            start + len(part) - 1,
            {
                "heterogeneous/step_seconds": wall,
                "heterogeneous/samples_per_second": float(part[-1, 4].sum()) / wall,
                "heterogeneous/slowest_replica_wait_seconds": float(part[-1, 2].max()),
                "heterogeneous/input_wait_seconds": float(part[-1, 1].max()),
            },
        )
    log.close()


SPEEDS = {"fast": 4, "other": 2, "slow": 1}
GENERATIONS = (
    (0, ("fast", "other", "slow")),
    (300, ("slow", "fast")),
    (600, ("fast", "new", "slow")),
)


def machines(hosts):
    """The GPUs of some hosts, one for each worker."""
    return tuple(
        Device(f"worker {n} GPU 0", n, "GPU", host, "H100", f"GPU-{host}")
        for n, host in enumerate(hosts)
    )


def balanced(hosts, steps):
    """Times and shares of machines that finish together, [steps, 5, replicas]."""
    speed = np.array([SPEEDS.get(host, 2) for host in hosts], float)
    shares = np.round(GLOBAL_BATCH * speed / speed.sum())
    noise = np.random.default_rng(7).normal(1, 0.02, (steps, len(hosts)))
    compute = 0.004 * shares / speed * noise
    sync = compute.max(axis=1, keepdims=True) - compute + 0.004
    short = np.full_like(compute, 0.001)
    parts = [compute, short, sync, short, np.broadcast_to(shares, compute.shape)]
    return np.stack(parts, axis=1).astype(np.float32)


def write_generations(folder, generations=GENERATIONS, steps=300):
    """Write the log of a training that lost a machine, and then got a new one."""
    from keras_het.telemetry.event_log import EventLog

    for first, hosts in generations:
        path = folder / log_format.DIRECTORY
        log = EventLog(path, machines(hosts), HARDWARE, first_step=first)
        # the first value is of a later step, as that of a sampler is
        log.write_hardware(first + 1, np.full((len(hosts), len(HARDWARE)), 0.5))
        block = balanced(hosts, steps)
        for start in range(0, steps, BLOCK):
            log.write_steps(first + start, block[start : start + BLOCK])
        log.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))
