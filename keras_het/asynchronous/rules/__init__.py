"""Published rules by which the workers' weights and the center are combined."""

from keras_het.asynchronous.rules.async_sgd import AsyncSGD
from keras_het.asynchronous.rules.delay_compensated import DelayCompensated
from keras_het.asynchronous.rules.delayed_nesterov import DelayedNesterov
from keras_het.asynchronous.rules.delta import Delta
from keras_het.asynchronous.rules.diloco import DiLoCo, StreamingDiLoCo
from keras_het.asynchronous.rules.elastic_averaging import (
    AsyncEASGD,
    AsyncMEASGD,
    ElasticAveraging,
    HogwildEASGD,
    RoundRobinEASGD,
)
from keras_het.asynchronous.rules.registry import RULES, get, register_rule, serialize
from keras_het.asynchronous.rules.sync_easgd import SyncEASGD
from keras_het.asynchronous.rules.synchronous_rule import SynchronousRule
from keras_het.asynchronous.rules.update_rule import PushMeta, Update, UpdateRule

__all__ = [
    "RULES",
    "AsyncEASGD",
    "AsyncMEASGD",
    "AsyncSGD",
    "DelayCompensated",
    "DelayedNesterov",
    "Delta",
    "DiLoCo",
    "ElasticAveraging",
    "HogwildEASGD",
    "PushMeta",
    "RoundRobinEASGD",
    "StreamingDiLoCo",
    "SyncEASGD",
    "SynchronousRule",
    "Update",
    "UpdateRule",
    "get",
    "register_rule",
    "serialize",
]
