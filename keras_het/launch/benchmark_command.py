"""The command `keras-het benchmark`: this machine's devices alone and together."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from keras_het.launch.benchmark_trials import (
    MODELS,
    Device,
    Settings,
    draw,
    name_of,
    plan,
    run_trial,
    save,
    show,
    to_dict,
)
from keras_het.launch.doctor.facts import gather
from keras_het.launch.grammar import (
    Commands,
    Option,
    add_command,
    add_options,
    argument,
    positive_integer,
    speeds_of,
)
from keras_het.launch.local.worker_environment import present_gpus
from keras_het.telemetry.hardware import NvmlMissingError

_DESCRIPTION = """\
Trains a convnet and a transformer on synthetic data: on each GPU alone, as plain Keras does, and
then on all of them, with even and with balanced shares. Says how much of the GPUs' speed is left
when they work together, and writes a file that you can attach to a report: it has the names of the
GPUs and versions, no name of the machine, and is sent nowhere. Without a GPU, emulated devices take
their place.
"""
_EPILOG = """\
examples:
  keras-het benchmark
  CUDA_VISIBLE_DEVICES=0,2 keras-het benchmark --models transformer --precision mixed_float16
  keras-het benchmark --emulate 4,2,1          without GPUs

Exit code: 1 if a trial failed.
"""
# Of all trials together, without the time that processes take to start.
_SECONDS_FOR_GPUS, _SECONDS_EMULATED = 400.0, 24.0
# With that time, and some for the picture.
_SECONDS_IN_ALL = 590.0
_EMULATED = (2.0, 1.0)
_models = argument(
    ",".join(MODELS), lambda text: tuple(text.split(",")), lambda chosen: set(chosen) <= set(MODELS)
)
_OPTIONS = (
    Option(
        "--models A,B",
        f"which models to train (default: {','.join(MODELS)})",
        _models,
        MODELS,
    ),
    Option(
        "--batch-size N",
        "samples of a step for each device (default: 64 on GPUs, 8 on emulated devices)",
        positive_integer,
    ),
    Option(
        "--seconds S",
        "measured seconds of each trial (default: what fits into 10 minutes, the limit of all)",
        positive_integer,
    ),
    Option(
        "--precision",
        "dtype policy of the models (default: float32)",
        default="float32",
        more={"choices": ("float32", "mixed_float16", "mixed_bfloat16")},
    ),
    Option(
        "--emulate A,B,...",
        "emulate devices with these relative speeds (default without GPUs: 2,1)",
        speeds_of,
    ),
    Option("--output DIRECTORY", "where the file and the picture go (default: here)", Path, Path()),
)


def add_benchmark_command(commands: Commands) -> None:
    summary = "measure this machine's devices alone and together"
    parser = add_command(commands, "benchmark", run_benchmark, summary, _DESCRIPTION, _EPILOG)
    add_options(parser, _OPTIONS)


def run_benchmark(options: argparse.Namespace) -> int:
    settings, machine = _settings(options)
    trials, end = plan(settings), math.inf
    if options.seconds is None:
        end = time.monotonic() + _SECONDS_IN_ALL
        most = _SECONDS_EMULATED if settings.is_emulated else _SECONDS_FOR_GPUS
        settings = replace(settings, seconds=min(20.0, most / len(trials) / 1.7))
    measured = {}
    for number, trial in enumerate(trials, start=1):
        name = f"{trial.model}, {name_of(trial, settings)}"
        sys.stderr.write(f"[{number}/{len(trials)}] {name} ...\n")
        measured[trial] = run_trial(trial, settings, end - time.monotonic())
    show(settings, measured, sys.stdout)
    content = to_dict(settings, measured, machine)
    paths = [
        save(options.output, content),
        draw(options.output, settings, measured),
    ]
    sys.stdout.write(f"Written: {', '.join(str(path) for path in paths if path)}\n")
    return int(any("error" in each for each in measured.values()))


def _settings(options: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Return what the trials have in common, and what a report says of the machine."""
    facts = gather()
    found = facts.tensorflow
    machine = {
        "processor": facts.processor,
        "cpus": facts.cpus,
        "driver": facts.driver,
        "tensorflow": found.tensorflow,
        "keras": found.keras,
    }
    usable = found.gpus if not options.emulate else ()
    try:
        visible = present_gpus() if usable else []
    except NvmlMissingError:
        visible = []
    devices = [
        Device(f"{place}: {name}", each)
        for place, (name, each) in enumerate(zip(usable, visible, strict=False))
    ]
    if not devices:
        speeds = options.emulate or _EMULATED
        devices = [Device(f"emulated, speed {speed:g}", speed=speed) for speed in speeds]
    batch_size = options.batch_size or (64 if devices[0].visible else 8)
    settings = Settings(
        tuple(devices), options.models, batch_size, options.seconds or 0.0, options.precision
    )
    return settings, machine
