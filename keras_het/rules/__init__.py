"""Published rules by which the workers' weights and the center are combined."""

from keras_het.rules.async_sgd import AsyncSGD, DelayCompensated
from keras_het.rules.diloco import DelayedNesterov, DiLoCo
from keras_het.rules.elastic_averaging import (
    AsyncEASGD,
    AsyncMEASGD,
    ElasticAveraging,
    HogwildEASGD,
    RoundRobinEASGD,
    SyncEASGD,
)
from keras_het.rules.registry import RULES, get, register_rule, serialize
from keras_het.rules.update_rule import (
    Delta,
    PushMeta,
    SynchronousRule,
    Update,
    UpdateRule,
)

__keras_het_stability__ = "experimental"

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
    "SyncEASGD",
    "SynchronousRule",
    "Update",
    "UpdateRule",
    "get",
    "register_rule",
    "serialize",
]
