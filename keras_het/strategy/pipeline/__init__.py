"""Training of a model in stages: the strategy, and where the variables of each stage lie."""

from keras_het.strategy.pipeline.pipeline_strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]
