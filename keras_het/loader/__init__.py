"""The strategy's input: samples cut into exact unequal shares for the replicas of all workers."""

from keras_het.loader.input.file_sharding import FileShardedDataset
from keras_het.loader.input.global_order import GlobalOrderDataset
from keras_het.loader.input.step_iterator import StepIterator
from keras_het.loader.iterators.handover import HandoverError
from keras_het.loader.iterators.inspection import PipelineReport, inspect
from keras_het.loader.iterators.live_iterator import InputWaitMeter
from keras_het.loader.iterators.tunable import Knobs, TunablePipeline, tunable_pipeline

__all__ = [
    "FileShardedDataset",
    "GlobalOrderDataset",
    "HandoverError",
    "InputWaitMeter",
    "Knobs",
    "PipelineReport",
    "StepIterator",
    "TunablePipeline",
    "inspect",
    "tunable_pipeline",
]
