"""Decide how many loaders prepare batches and how many finished batches may wait."""

from keras_het.planning.loader.allocation import allocate_loaders, allocate_readers
from keras_het.planning.loader.controller import FixedController, LoaderController
from keras_het.planning.loader.plan import LoaderPlan
from keras_het.planning.loader.reading_need import ReadingJob, ReadingNeed
from keras_het.planning.loader.throughput_model import JobModel, ThroughputModel
from keras_het.planning.loader.tuner import TunerController
from keras_het.planning.loader.window import LoaderWindow, StepSums, WindowSize

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
