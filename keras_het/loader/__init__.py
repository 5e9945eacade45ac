"""Feeds the strategy: samples cut into exact unequal shares for the replicas of all workers."""

from keras_het.loader.file_sharding import FileShardedDataset
from keras_het.loader.global_order import GlobalOrderDataset
from keras_het.loader.step_iterator import StepIterator

__all__ = ["FileShardedDataset", "GlobalOrderDataset", "StepIterator"]
