"""Feeds the strategy: samples cut into exact unequal shares for the replicas of all workers."""

from keras_het.loader.adjustable_pipeline import AdjustablePipeline, pipeline
from keras_het.loader.file_sharding import FileShardedDataset
from keras_het.loader.global_order import GlobalOrderDataset
from keras_het.loader.handover import HandoverError
from keras_het.loader.inspection import PipelineReport, inspect
from keras_het.loader.knobs import Knobs
from keras_het.loader.stall_meter import StallMeter
from keras_het.loader.step_iterator import StepIterator

__all__ = [
    "AdjustablePipeline",
    "FileShardedDataset",
    "GlobalOrderDataset",
    "HandoverError",
    "Knobs",
    "PipelineReport",
    "StallMeter",
    "StepIterator",
    "inspect",
    "pipeline",
]
