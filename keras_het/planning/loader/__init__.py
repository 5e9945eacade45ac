"""Decide how many loaders prepare batches and how many finished batches may wait."""

from keras_het.planning.loader.controller import (
    FixedController,
    LoaderController,
    LoaderPlan,
    LoaderWindow,
    ReadingJob,
    ReadingNeed,
    StepSums,
    WindowSize,
)
from keras_het.planning.loader.throughput_model import (
    JobModel,
    ThroughputModel,
    allocate_loaders,
    allocate_readers,
)
from keras_het.planning.loader.tuner import TunerController

__all__ = [
    "FixedController",
    "JobModel",
    "LoaderController",
    "LoaderPlan",
    "LoaderWindow",
    "ReadingJob",
    "ReadingNeed",
    "StepSums",
    "ThroughputModel",
    "TunerController",
    "WindowSize",
    "allocate_loaders",
    "allocate_readers",
]
