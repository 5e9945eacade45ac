"""Feeds the strategy: samples cut into exact unequal shares for the replicas of all workers."""

from keras_het.loader.adjustable_pipeline import AdjustablePipeline, pipeline
from keras_het.loader.advice import Advice, AdviceReport, advise
from keras_het.loader.data_service import DataService, service
from keras_het.loader.file_sharding import FileShardedDataset
from keras_het.loader.global_order import GlobalOrderDataset
from keras_het.loader.handover import HandoverError
from keras_het.loader.inspection import PipelineReport, inspect
from keras_het.loader.knobs import Knobs
from keras_het.loader.stall_meter import StallMeter
from keras_het.loader.step_iterator import StepIterator

__all__ = [
    "AdjustablePipeline",
    "Advice",
    "AdviceReport",
    "DataService",
    "FileShardedDataset",
    "GlobalOrderDataset",
    "HandoverError",
    "Knobs",
    "PipelineReport",
    "StallMeter",
    "StepIterator",
    "advise",
    "inspect",
    "pipeline",
    "service",
]
