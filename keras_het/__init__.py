"""keras_het: `model.fit` on machines that do not match, with the numbers of one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_het.seen_versions import (
    check_keras_backend_before_import,
    import_part,
    warn_of_unseen_versions,
)

if TYPE_CHECKING:
    from keras_het import callbacks, loader, planning, rules
    from keras_het.asynchronous.parameter_service.client import ServiceLostError
    from keras_het.strategy.cluster.peer_watch import WorkerLostError
    from keras_het.strategy.exact.gradients import reduce_over_replicas
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy
    from keras_het.strategy.pipeline import PipelineStrategy

__version__ = "0.1.0"

__all__ = [
    "HeterogeneousStrategy",
    "PipelineStrategy",
    "ServiceLostError",
    "WorkerLostError",
    "__version__",
    "callbacks",
    "loader",
    "planning",
    "reduce_over_replicas",
    "rules",
]

_MODULES = ("callbacks", "loader", "planning", "rules")
_MODULE_OF = {
    "HeterogeneousStrategy": "keras_het.strategy.heterogeneous_strategy",
    "reduce_over_replicas": "keras_het.strategy.exact.gradients",
    "PipelineStrategy": "keras_het.strategy.pipeline",
    "ServiceLostError": "keras_het.asynchronous.parameter_service.client",
    "WorkerLostError": "keras_het.strategy.cluster.peer_watch",
}


def __getattr__(name: str) -> Any:
    # TensorFlow takes seconds to import; the command line does not need it.
    if name in _MODULE_OF:
        check_keras_backend_before_import()
        warn_of_unseen_versions()
        return import_part(_MODULE_OF[name], name)
    if name in _MODULES:
        return importlib.import_module(f"keras_het.{name}")
    raise AttributeError(f"module 'keras_het' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
