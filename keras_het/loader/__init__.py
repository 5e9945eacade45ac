"""Feeds the strategy: one global order of samples, cut into exact unequal shares."""

from keras_het.loader.global_order import GlobalOrderDataset
from keras_het.loader.step_iterator import StepIterator

__all__ = ["GlobalOrderDataset", "StepIterator"]
