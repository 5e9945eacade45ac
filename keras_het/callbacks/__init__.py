"""Callbacks that adapt training between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_het.keras_backend import check_keras_backend_before_import
from keras_het.seen_versions import import_part

if TYPE_CHECKING:
    import keras

    from keras_het.callbacks.backup_and_restore import BackupAndRestore
    from keras_het.callbacks.batch_balancer import BatchBalancer
    from keras_het.callbacks.data_validation import DataValidation
    from keras_het.callbacks.hybrid_aggregation import HybridAggregation
    from keras_het.callbacks.loader_tuner import LoaderTuner
    from keras_het.callbacks.local_training import LocalTraining
    from keras_het.callbacks.telemetry import Telemetry

__all__ = [
    "BackupAndRestore",
    "BatchBalancer",
    "DataValidation",
    "HybridAggregation",
    "LoaderTuner",
    "LocalTraining",
    "Telemetry",
]

_MODULES = {
    "BackupAndRestore": "backup_and_restore",
    "BatchBalancer": "batch_balancer",
    "DataValidation": "data_validation",
    "HybridAggregation": "hybrid_aggregation",
    "LoaderTuner": "loader_tuner",
    "LocalTraining": "local_training",
    "Telemetry": "telemetry",
}


def __getattr__(name: str) -> type[keras.callbacks.Callback]:
    # A program that only tunes a loader should not load the parameter service.
    if name in _MODULES:
        check_keras_backend_before_import()
        return import_part(f"keras_het.callbacks.{_MODULES[name]}", name)
    raise AttributeError(f"module 'keras_het.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
