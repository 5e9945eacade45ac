"""Logs of simulated trainings, as `Telemetry` writes them."""

from __future__ import annotations

import dataclasses

import numpy as np
from step_recordings import Fault, Training

from keras_het.planning.diagnosis.recording import PHASES, Change
from keras_het.telemetry.event_log import EventLog


def write_log(folder, recording, **settings):
    """Write a recording as a log, in blocks of ten steps; return the log, still open."""
    names = tuple(recording.hardware)
    log = EventLog(folder / "telemetry", recording.devices, names, **settings)
    rows = np.stack([getattr(recording, name) for name in (*PHASES, "shares")], axis=1)
    for begin in range(0, len(rows), 10):
        log.write_steps(int(recording.steps[begin]), rows[begin : begin + 10])
    for row, step in enumerate(recording.hardware_steps.tolist()):
        sample = np.array([recording.hardware[name][row] for name in names])
        log.write_hardware(step, sample.T)
    for change in recording.changes:
        log.write_change(change)
    log.flush()
    return log


def balanced_recording(steps=160):
    """Two fast devices and two slow ones, whose shares follow after a quarter of the steps."""
    shares = np.full((steps, 4), 32)
    shares[steps // 4 :] = [48, 48, 16, 16]
    change = Change(
        steps // 4,
        "shares",
        "shares 48 48 16 16 (min_max: in proportion to measured speeds)",
    )
    training = Training(
        n=4,
        steps=steps,
        slowness=(1.0, 1.0, 3.0, 3.0),
        shares=shares,
        faults=(Fault("input", size=0.6, device=0),),
        changes=(change,),
    )
    recording = training.record()
    products = (
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-40GB",
        *["NVIDIA GeForce RTX 2080 Ti"] * 2,
    )
    devices = tuple(
        dataclasses.replace(device, model=model)
        for device, model in zip(recording.devices, products, strict=True)
    )
    return dataclasses.replace(recording, devices=devices)
