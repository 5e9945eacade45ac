"""Published rules by which asynchronous workers and the center are combined."""

from keras_het.strategy.rules.async_sgd import AsyncSGD
from keras_het.strategy.rules.delay_compensated import DelayCompensated
from keras_het.strategy.rules.delta import Delta
from keras_het.strategy.rules.elastic_averaging import ElasticAveraging
from keras_het.strategy.rules.update_rule import PushMeta, UpdateRule

__all__ = [
    "AsyncSGD",
    "DelayCompensated",
    "Delta",
    "ElasticAveraging",
    "PushMeta",
    "UpdateRule",
]
