"""Callbacks that adapt training between steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from keras_het.seen_versions import check_keras_backend_before_import, import_part

if TYPE_CHECKING:
    import keras

    from keras_het.callbacks.async_workers import AsyncWorkers
    from keras_het.callbacks.backup_and_restore import BackupAndRestore
    from keras_het.callbacks.batch_balancer import BatchBalancer
    from keras_het.callbacks.bucket_tuner import BucketTuner
    from keras_het.callbacks.data_validation import DataValidation
    from keras_het.callbacks.elastic_backup import ElasticBackup
    from keras_het.callbacks.loader_tuner import LoaderTuner
    from keras_het.callbacks.local_training import LocalTraining
    from keras_het.callbacks.telemetry import Telemetry

__all__ = [
    "AsyncWorkers",
    "BackupAndRestore",
    "BatchBalancer",
    "BucketTuner",
    "DataValidation",
    "ElasticBackup",
    "LoaderTuner",
    "LocalTraining",
    "Telemetry",
]


def __getattr__(name: str) -> type[keras.callbacks.Callback]:
    # A program that only tunes a loader should not load the parameter service.
    if name in __all__:
        check_keras_backend_before_import()
        module = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
        return import_part(f"keras_het.callbacks.{module}", name)
    raise AttributeError(f"module 'keras_het.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
